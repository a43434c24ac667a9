"""The plan of the house: two towers of rooms, each of which knows only rooms below it; no circle, a light door."""

import ast
import importlib.util
import inspect
import random
import re
import subprocess
import sys
import tomllib
from collections import Counter
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import fedsim
import plain_names

SOURCE = Path(fedsim.__file__).parent
FLOORS = [  # from the ground up; rooms of one floor do not know each other
    {"core", "_version"},
    {"settings"},
    {"functional", "strategy", "parsing"},
    {"data", "models", "papers"},
    {"training", "generation", "report"},
    {"methods", "sweep"},
    {"evaluation"},
    {"federation"},
    {"inference", "testing"},
    {"cli"},
    {"__main__"},
]
RESULTS = {"parsing", "papers", "report", "sweep"}
"""The tower of results; all other rooms but ``core``, ``inference`` and ``cli`` are the tower of learning."""
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
OF_SEVERAL_METHODS = ("base", "declared", "pruned", "reference", "restyling")


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


def between_towers(graph):
    """Imports from one tower to the other: only commands and finished runs stand on both, and both on ``core``."""
    common = {"", "__main__", "_version", "cli", "core", "inference", "settings"}
    pairs = [(a, b) for a, names in graph.items() for b in names if not {room(a), room(b)} & common]
    return [f"{a} imports {b}" for a, b in pairs if (room(a) in RESULTS) != (room(b) in RESULTS)]


def out_of_parts(graph, package):
    """Imports of a part of a room (a folder in it) from the room's own files: parts are below these."""
    parts = {path.name for path in (SOURCE / package).iterdir() if (path / "__init__.py").is_file()} - {"callbacks"}
    place = {name: name.split(".") for name in graph if name.startswith(f"fedsim.{package}.")}
    below = [name for name, words in place.items() if words[2] in parts]
    return [f"{a} imports {b}" for a in below for b in graph[a] if b in place and place[b][2] not in parts]


def test_rooms_are_known():
    assert {room(name) for name in KNOWN} - {""} <= set(FLOOR_OF)
    assert sorted(path.name for path in SOURCE.glob("*.py")) == ["__init__.py", "__main__.py", "_version.py"]


def test_imports_point_down():
    assert upward(GRAPH) == []


def test_no_files_import_each_other_in_a_circle():
    assert circle(GRAPH, {name for name, path in KNOWN.items() if path.name == "__init__.py"}) == []


def test_the_towers_of_learning_and_of_results_do_not_know_each_other():
    assert between_towers(GRAPH) == []


def test_parts_of_the_federation_do_not_look_back_into_it():
    assert out_of_parts(GRAPH, "federation") == []


def test_a_climb_and_a_circle_are_found():
    assert upward({"fedsim.core.flat": {"fedsim.models.reid"}}) == ["fedsim.core.flat imports fedsim.models.reid"]
    assert upward({"fedsim.data.images": {"fedsim.models.reid"}}), "rooms of one floor do not know each other"
    assert circle({"fedsim.core.a": {"fedsim.core.b"}, "fedsim.core.b": {"fedsim.core.a"}})
    assert between_towers(
        {"fedsim.report.runs": {"fedsim.models.reid"}, "fedsim.data.images": {"fedsim.parsing.values"}}
    )
    part, file = "fedsim.federation.scheduling.plan", "fedsim.federation.round"
    assert out_of_parts({part: {file}, file: {part}}, "federation") == [f"{part} imports {file}"]


def test_only_faces_know_single_methods():
    single = [(a, b) for a, names in GRAPH.items() for b in names if b.startswith("fedsim.methods.")]
    known = [(a, b) for a, b in single if b.split(".")[2] not in OF_SEVERAL_METHODS and a != "fedsim.methods"]
    assert known == []


def test_tests_stand_in_the_rooms_of_what_they_test():
    tests = Path(__file__).parent
    folders = {path.parent.relative_to(tests).parts[0] for path in tests.glob("*/test_*.py")}
    assert folders <= set(FLOOR_OF) | {"cluster", "device"}
    of_all = ["test_docs.py", "test_durations.py", "test_house.py", "test_others.py", "test_records.py"]
    assert sorted(path.name for path in tests.glob("test_*.py")) == of_all


def test_no_two_test_files_have_one_name():
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py") if path.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == [], "pytest imports only one of them"


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


# -- names -------------------------------------------------------------------------------------------------------------

BINDINGS = {  # each binds NAME in a function
    "argument": "def f({name}): pass",
    "keyword": "def f(*, {name}=1): pass",
    "variadic": "def f(*{name}): pass",
    "assignment": "def f():\n    {name} = 1",
    "tuple": "def f():\n    a, ({name}, *b) = g()",
    "walrus": "def f():\n    return ({name} := 1)",
    "annotated": "def f():\n    {name}: int = 1",
    "loop": "def f():\n    for {name} in g(): pass",
    "comprehension": "def f():\n    return [{name} for {name} in g()]",
    "with": "def f():\n    with g() as {name}: pass",
    "except": "def f():\n    try: g()\n    except ValueError as {name}: pass",
    "match": "def f(x):\n    match x:\n        case [{name}]: pass",
    "star": "def f(x):\n    match x:\n        case [*{name}]: pass",
    "lambda": "f = [lambda {name}: 1 for _ in (1,)]",
    "async": "async def f():\n    async with g() as {name}: pass",
    "method": "class A:\n    def f(self):\n        {name} = 1",
    "nested": "def f():\n    def g({name}): pass",
}
FIELDS = ("class A:\n    {name}: int", "class A(B):\n    x: int = 0\n    {name}: list[int] = field()")


def test_vague_names_are_refused_wherever_they_are_bound():
    rng = random.Random(0)
    missed = []
    for _ in range(500):
        kind, name = rng.choice(list(BINDINGS)), rng.choice(sorted(plain_names.VAGUE))
        if [found for _, found in plain_names.vague_names(BINDINGS[kind].format(name=name))] == []:
            missed.append((kind, name))
    assert missed == []
    for name in sorted(plain_names.VAGUE):
        found = [[*plain_names.vague_names(field.format(name=name))] for field in FIELDS]
        assert found == ([[(2, name)], [(3, name)]] if name in plain_names.VAGUE_FIELDS else [[], []])
    assert [*plain_names.vague_names("def f(self):\n    self.own = g(how=1)\n    members = {'what': 2}")] == []


def test_names_that_fit_anything_are_refused_where_they_are_many(tmp_path):
    for binding in BINDINGS.keys() - {"lambda"}:
        for name in plain_names.GENERAL:
            functions, names = plain_names.general_names(BINDINGS[binding].format(name=name))
            assert (functions, names) == ((2, 2 * [name]) if binding == "nested" else (1, [name])), binding
    assert plain_names.general_names("def f(self, x):\n    self.text = g(kind=x.line)\n    return place") == (1, [])
    (tmp_path / "few.py").write_text("def f(text, line): return [text for text in line]\n\n\n" + 98 * "def g(): pass\n")
    (tmp_path / "one.py").write_text("def f():\n    kind = 1\n")
    assert plain_names.too_general(tmp_path) == []  # 3 in 100 functions
    (tmp_path / "one.py").write_text("def f(place):\n    kind = 1\n")
    [finding] = plain_names.too_general(tmp_path)
    assert finding.startswith(
        f"{tmp_path}: kind, line, place, text: 4.0 arguments and locals per 100 functions, at most 3"
    )
    assert finding.endswith("first in few.py 2, one.py 2")
    assert plain_names.too_general(SOURCE) == []


def test_words_that_make_a_person_of_a_program_are_refused():
    texts = ["# nobody waits", 'x = "it told rank 0"', '"""Whoever comes.\n\nIt tells more."""', "f'{a} tears {b}'"]
    assert [[word for _, word in plain_names.words(text)] for text in texts] == [
        ["nobody"], ["told"], ["Whoever", "tells"], ["tears"],
    ]  # fmt: skip
    assert [*plain_names.words("# The ranks report their losses.")] == []


def test_no_docstring_of_the_package_begins_with_a_question():
    begun = [
        f"{path.relative_to(SOURCE)}:{line}: {words}"
        for path in SOURCE.rglob("*.py")
        for line, words in plain_names.asking_docstrings(path.read_text())
    ]
    assert begun == [], "name the thing: Return the files beside the images"


@pytest.mark.parametrize(
    "place", ["{}", "class A:\n    {}", "def f():\n    {}", "class A:\n    async def f():\n        {}"]
)
def test_docstrings_that_begin_with_a_question_are_found(place):
    for text in ("What it does.", "Who pays.", "Return what is left.", "Yield what\n    is left."):
        [(line, words)] = plain_names.asking_docstrings(place.format(f'"""{text}"""'))
        assert (line, text.replace("\n    ", " ").startswith(words)) == (place.count("\n") + 1, True)
    for text in ("Whatever.", "Return whatever.", "Whose it is.", "The files: what is left.", "Return the files."):
        assert [*plain_names.asking_docstrings(place.format(f'"""{text}"""'))] == []


def test_no_two_public_classes_have_one_name():
    classes = Counter(
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in classes.items() if count > 1] == []


# -- private names of other libraries ----------------------------------------------------------------------------------

PRIVATE = re.compile(r"_(?!_)\w+")
DOCUMENTED = {
    "_asdict",
    "_current_frames",
    "_exit",
    "_fields",
    "_replace",
}  # in spite of the underscore
PRIVATE_NAMES = {  # library: file: names; a new version may rename them, so pyproject.toml bounds Lightning's
    "lightning": {
        "compatibility": {"_layer_sync"},
        "fit": {"_dump_config", "_parser", "_signal_connector"},
        "inner_trainer": {"_checkpoint_connector", "_logged_metrics", "_logger_connector", "_signal_connector"},
        "checks": {"_name", "_root_dir", "_version"},
        "preemption": {"_broadcast_sigterm_tensor"},
        "ready_ranks": {"_SubprocessScriptLauncher", "_call_children_scripts", "_check_can_spawn_children"},
        "sharing": {"_destroy_dist_connection"},
        "summary": {"_check_log_dir_exists"},
        "strategy": {
            "_configure_launcher",
            "_get_process_group_backend",
            "_launcher",
            "_parallel_devices",
            "_process_group_backend",
        },
        "tracking": {"_experiment_name", "_mlflow_client", "_offline", "_run_id", "_run_name", "_wandb_init"},
    },
    "argparse": {
        "short_help": {"_action_groups", "_actions", "_group_actions"},
        "error_lines": {"_actions"},
    },
    "optuna": {"search": {"_trial_id"}},
    "torch": {
        "apfl": {"_foreach_mul_"},
        "blueprint": {"_backward_hooks", "_post_accumulate_grad_hooks"},
        "fingerprint": {"_backward_hooks"},
        "devices": {"_is_mkldnn_bf16_supported"},
        "flat": {"_non_persistent_buffers_set"},
        "fedsam": {"_foreach_add_", "_foreach_copy_", "_foreach_mul_"},
        "groups": {"_NormBase"},
        "lora": {"_BatchNorm"},
        "memory": {"_cdata"},
        "micro_batches": {"_foreach_add_"},
        "optimizer": {"_foreach_add_"},
        "requirements": {"_BatchNorm"},
        "perfedavg": {"_foreach_add_", "_foreach_copy_"},
        "network": {"_foreach_copy_", "_non_persistent_buffers_set", "_version"},
    },
    "torchmetrics": {"metrics": {"_plot"}},
}


def strangers(kind):
    """The bases of a class that are not of this package."""
    return [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in {"fedsim", "builtins"}]


def inherited(kind):
    """Private names that a class has from the bases that are not of this package, also those of its instances."""
    for base in strangers(kind):
        yield from filter(PRIVATE.fullmatch, vars(base))
        with suppress(OSError, TypeError):  # classes in C have no source
            yield from re.findall(r"\bself\.(_(?!_)\w+)", inspect.getsource(base))


def is_self(node):
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def private_names(tree, kinds=()):
    """Private names in a module that belong to others: imported, of other objects, or of the bases of its classes.

    ``kinds`` are its classes. A name on ``self`` is a base's, if a base has it; on anything else it is another
    library's unless the module itself has a function, class, attribute or variable of this name.
    """
    nodes = list(ast.walk(tree))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr)]
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store) and is_self(node.value)}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            parts = {part for alias in node.names for part in alias.name.split(".")}
            origin = (getattr(node, "module", None) or "").split(".")
            if not ({"fedsim", "__future__"} & {origin[0], *parts}):
                yield from filter(PRIVATE.fullmatch, {*parts, *origin})
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"getattr", "setattr"}:
            names = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            yield from filter(PRIVATE.fullmatch, names)
    yield from (node.attr for node in attributes if not is_self(node.value) and node.attr not in own)
    for kind in kinds:
        [body] = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
        used = {node.attr for node in ast.walk(body) if isinstance(node, ast.Attribute) and is_self(node.value)}
        used |= {node.name for node in body.body if isinstance(node, ast.FunctionDef)}
        yield from used & set(inherited(kind))


def classes(name):
    """The classes that a module defines."""
    found = vars(import_module(name)).values()
    return [kind for kind in found if isinstance(kind, type) and kind.__module__ == name]


def test_private_names_of_other_libraries_are_these():
    """Before a new one is listed: is there a public way? Files count by their names, wherever they lie."""
    used = {
        f"{path.stem}: {private}"
        for name, path in KNOWN.items()
        for private in private_names(ast.parse(path.read_text()), classes(name))
        if private not in DOCUMENTED
    }
    listed = {f"{file}: {name}" for files in PRIVATE_NAMES.values() for file, names in files.items() for name in names}
    assert used == listed


def test_private_names_of_other_libraries_are_found():
    source = """
from fedsim.core.flat import _own
from somewhere import _imported
from somewhere._inner import name
import somewhere._other
_table = 1
class Reader(Base):
    def __init__(self): self._mine = 0
    def _overridden(self): return self._of_base + self._mine
    def read(self, other): return other._mine + other._foreign + table._table
getattr(Reader, "_by_name")
other._stored = super()._above
"""
    base = type("Base", (), {"_overridden": None, "_of_base": 1, "_unused": 2, "__module__": "somewhere"})
    found = set(private_names(ast.parse(source), [type("Reader", (base,), {"__module__": "fedsim"})]))
    imported = {"_imported", "_inner", "_other"}
    assert found == imported | {"_overridden", "_of_base", "_foreign", "_by_name", "_stored", "_above"}


def test_each_lower_bound_is_tested_or_has_a_reason():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *(need for extra in project["optional-dependencies"].values() for need in extra)]
    bounds = {found[1]: found[2] for need in needs if (found := re.match(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)", need))}
    lines = (Path(__file__).parent / "oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    reasons = [found for line in lines if (found := re.fullmatch(r"# not pinned: ([^:]+): .+", line))]
    left_out = {name for found in reasons for name in found[1].split(", ")}
    assert not pins.keys() & left_out
    assert bounds.keys() == (pins.keys() & bounds.keys()) | left_out
    for name in pins.keys() & bounds.keys():
        assert f"{pins[name]}.".startswith(f"{bounds[name]}."), name


def test_lightning_is_bounded_by_the_version_whose_private_names_are_used():
    needs = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["dependencies"]
    [bounds] = [need.removeprefix("lightning") for need in needs if re.match(r"lightning\b", need)]
    assert re.fullmatch(r">=2\.\d+,<2\.\d+", bounds)


def imported_names(code):
    """Each module of fedsim that a file imports from, with the name."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedsim":
            yield from ((node.module, alias.name) for alias in node.names)


def is_there(module, name):
    """Whether a module of fedsim has a name, or is a package with a module so called."""
    try:
        return hasattr(import_module(module), name) or bool(importlib.util.find_spec(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


def test_scripts_import_only_names_that_there_are():
    files = [
        path
        for folder in ("benchmarks", "docs", "slurm")
        for path in (Path(__file__).parents[1] / folder).rglob("*.py")
    ]
    lost = {(path.name, *name) for path in files for name in imported_names(path.read_text()) if not is_there(*name)}
    assert lost == set()
    assert not is_there("fedsim.core.nothing", "x")
    assert not is_there("fedsim.core.errors", "NothingError")
    assert is_there("fedsim.core", "errors")
