"""The plan of the house: eleven rooms, each of which knows only rooms below it; no circle, a light door."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import fedsim

SOURCE = Path(fedsim.__file__).parent
FLOORS = [  # from the ground up; rooms of one floor do not know each other
    {"core", "_version"},
    {"functional", "strategy"},
    {"data", "models"},
    {"training", "generation"},
    {"methods"},
    {"evaluation"},
    {"federation"},
    {"cli"},
    {"__main__"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
OF_SEVERAL_METHODS = ("base", "pruned", "reference")


def modules():
    """Yield name and path of each module of the package."""
    for path in SOURCE.rglob("*.py"):
        yield ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"), path


def imports(path, known):
    """Modules that a file imports, also those for annotations only: a type is knowledge, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fedsim"):
            for name in node.names:
                yield f"{node.module}.{name.name}" if f"{node.module}.{name.name}" in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("fedsim."))


KNOWN = dict(modules())
GRAPH = {name: {i for i in imports(path, KNOWN) if i in KNOWN} - {name} for name, path in KNOWN.items()}


def room(module):
    """The room of a module; none for the package itself."""
    return module.split(".")[1] if "." in module else ""


def upward(graph):
    """Imports of a room that is not below."""
    pairs = [(a, b) for a, names in graph.items() for b in names if room(a) and room(b) and room(a) != room(b)]
    return [f"{a} imports {b}" for a, b in pairs if FLOOR_OF[room(b)] >= FLOOR_OF[room(a)]]


def circle(graph, faces=()):
    """Modules that import each other in a circle; a room's ``__init__`` is its face and belongs to all of its files."""
    try:
        TopologicalSorter({a: names - set(faces) for a, names in graph.items() if a not in faces}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_there_are_eleven_rooms():
    assert {room(name) for name in KNOWN} - {""} == set(FLOOR_OF)
    assert sorted(path.name for path in SOURCE.glob("*.py")) == ["__init__.py", "__main__.py", "_version.py"]


def test_imports_point_down():
    assert upward(GRAPH) == []


def test_no_files_import_each_other_in_a_circle():
    assert circle(GRAPH, {name for name, path in KNOWN.items() if path.name == "__init__.py"}) == []


def test_a_climb_and_a_circle_are_found():
    assert upward({"fedsim.core.flat": {"fedsim.models.reid"}}) == ["fedsim.core.flat imports fedsim.models.reid"]
    assert upward({"fedsim.data.images": {"fedsim.models.reid"}}), "rooms of one floor do not know each other"
    assert circle({"fedsim.core.a": {"fedsim.core.b"}, "fedsim.core.b": {"fedsim.core.a"}})


def test_only_faces_know_single_methods():
    single = [(a, b) for a, names in GRAPH.items() for b in names if b.startswith("fedsim.methods.")]
    known = [(a, b) for a, b in single if b.split(".")[2] not in OF_SEVERAL_METHODS and a != "fedsim.methods"]
    assert known == []


def test_tests_stand_in_the_rooms_of_what_they_test():
    tests = Path(__file__).parent
    folders = {path.parent.relative_to(tests).parts[0] for path in tests.glob("*/test_*.py")}
    assert folders <= set(FLOOR_OF) | {"cluster", "device"}
    of_all = ["test_docs.py", "test_durations.py", "test_house.py"]
    assert sorted(path.name for path in tests.glob("test_*.py")) == of_all


def test_only_the_strategy_calls_torch_distributed():
    users = {p.name for p in SOURCE.rglob("*.py") if "torch.distributed" in p.read_text().replace("``torch.distr", "")}
    assert users - {"__init__.py"} == {"strategy.py", "sharing.py", "trial.py"}, "trial.py only tries it"


def test_help_version_and_wrong_commands_do_not_import_torch():
    code = (
        "import sys; from fedsim.__main__ import main; "
        "codes = [main(['--help']), main(['--version']), main(['nonsense'])]; "
        "assert codes == [0, 0, 2], codes; assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "there is no command nonsense; choose from fit" in result.stderr
    assert f"fedsim {fedsim.__version__}" in result.stdout


def test_no_print_in_the_package():
    calls = [
        f"{path.name}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert calls == []
