"""Imports point one way, and the start of the command line imports nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import fedsim

SOURCE = Path(fedsim.__file__).parent

# from the top down: a module may import from its own level and those below
LEVELS = [
    {
        "__main__",
        "cli",
        "trainer",
        "describe",
        "report",
        "export",
        "sparse_file",
        "messages",
        "run_directory",
        "config_files",
        "sweep",
        "local_sweep",
        "commands",
        "data_commands",
        "augment",
        "augment_checks",
        "augment_processes",
        "augment_settings",
        "rank",
    },
    {
        "adaptation",
        "federation",
        "hosting",
        "aggregation",
        "server_work",
        "assembly",
        "methods",
        "callbacks",
        "compatibility",
        "round_table",
        "round_log",
        "ledger",
        "privacy",
    },
    {"strategy", "evaluation", "generation"},
    {
        "client",
        "visit",
        "server",
        "method",
        "selection",
        "settings",
        "hardware",
        "resident",
        "local_optimizer",
        "pruning",
        "received",
        "checkpoint",
        "control",
        "cluster",
        "extraction",
        "label_source",
    },
    {"clustering"},
    {"functional", "models", "data"},
    {"core", "_version"},
]
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}


def part(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_parts(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fedsim."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fedsim."))


def test_every_module_has_a_level():
    parts = {part(path) for path in SOURCE.rglob("*.py")} - {"__init__"}
    assert parts == set(LEVEL_OF)


def test_imports_point_down():
    upward = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in SOURCE.rglob("*.py")
        for name in imported_parts(path)
        if part(path) != "__init__" and LEVEL_OF[name] < LEVEL_OF[part(path)]
    ]
    assert upward == []


def test_core_imports_nothing_of_fedsim_but_itself():
    names = {name for path in (SOURCE / "core").glob("*.py") for name in imported_parts(path)}
    assert names <= {"core"}


def test_only_the_strategy_calls_torch_distributed():
    users = {p.name for p in SOURCE.rglob("*.py") if "torch.distributed" in p.read_text().replace("``torch.distr", "")}
    assert users - {"__init__.py"} == {"strategy.py"}


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
