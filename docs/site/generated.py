"""Pages that nobody writes: of methods, of modules, of files that are linked to, and the output of a command."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from links import ROOT, page_of

SOURCE = ROOT / "src" / "fedsim"
OF_SEVERAL_METHODS = {"base", "pruned", "reference"}
CONFIG = "configs/quickstart.yaml"
FLOORS = (
    "testing", "inference", "federation", "evaluation", "methods", "training", "generation", "data", "models",
    "functional", "strategy", "core",
)  # fmt: skip
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".sbatch": "bash", ".toml": "toml"}

Page = tuple[str, str]
"""Place on the site, and Markdown"""


def _imports(path: Path) -> dict[str, str]:
    """Return the names that a file imports from modules of fedsim: name -> module."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and node.module]
    return {name.name: str(node.module) for node in nodes for name in node.names if str(node.module)[:6] == "fedsim"}


def method_classes() -> dict[str, list[str]]:
    """Return the classes of each module of methods: ``fedprox`` -> [``FedProx``]."""
    found: dict[str, list[str]] = {}
    for name, module in _imports(SOURCE / "methods" / "__init__.py").items():
        found.setdefault(module.rpartition(".")[2], []).append(name)
    return found


def method_pages() -> Iterator[Page]:
    """Yield each method's page: its paper, hooks and deviations, its classes, and the configs that name it."""
    configs = {path: path.read_text() for path in sorted((ROOT / "configs" / "methods").glob("*.yaml"))}
    listed = []
    for module, classes in sorted(method_classes().items()):
        title = ", ".join(f"`{name}`" for name in classes)
        named = re.compile(rf"(?:class_path|method): (?:{'|'.join(classes)})\b")
        blocks = [
            f'```yaml title="{path.relative_to(ROOT)}"\n{text.rstrip()}\n```\n'
            for path, text in configs.items()
            if named.search(text)
        ]
        parts = [f"# {title} {{#fedsim.methods.{module}}}\n", f"::: fedsim.methods.{module}\n"]
        yield f"methods/{module}.md", "\n".join(parts + (["## Configs\n", *blocks] if blocks else []))
        source = (SOURCE / "methods" / f"{module}.py").read_text()
        listed.append(
            f"| [{title}]({module}.md) | {(ast.get_docstring(ast.parse(source)) or '').partition(chr(10))[0]} |"
        )
    head = "# Methods\n\nA page has a method's paper, its hooks with equations, its deviations and settings.\n"
    yield "methods/index.md", "\n".join([head, "| class | paper |", "|---|---|", *listed, ""])


def _defined_in(name: str, module: str) -> str:
    """Return the module in which a name is defined that ``module``, maybe a package, offers."""
    face = SOURCE.joinpath(*module.split(".")[1:]) / "__init__.py"
    return _imports(face)[name] if face.exists() else module


def api_pages() -> Iterator[Page]:
    """Yield a page per module of all rooms but the commands', one per room, and one with the names of ``fedsim``."""
    public = {name: _defined_in(name, module) for name, module in _imports(SOURCE / "__init__.py").items()}
    public.pop("__version__")
    text = ["# API\n", "`from fedsim import ...`\n", "| name | defined in |", "|---|---|"]
    text += [f"| [`{name}`][{module}.{name}] | `{module}` |" for name, module in sorted(public.items())]
    text += ["\nRooms, from the top ([map and glossary](../architecture.md)):\n", "| room | |", "|---|---|"]
    for room in FLOORS:
        summary, rows = _summary(SOURCE / room / "__init__.py"), []
        for path in sorted((SOURCE / room).rglob("*.py")):
            name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
            if path.name == "__init__.py" or (room == "methods" and path.stem not in OF_SEVERAL_METHODS):
                continue
            rows.append(f"| [`{name}`]({path.stem}.md) | {_summary(path)} |")
            yield f"api/{room}/{path.stem}.md", f"# {path.stem} {{#{name}}}\n\n`{name}`\n\n::: {name}\n"
        if room == "methods":
            rows.append("| the [methods](../../methods/index.md) | |")
        yield f"api/{room}/index.md", "\n".join([f"# {room}\n\n{summary}\n", "| module | |", "|---|---|", *rows, ""])
        text.append(f"| [{room}]({room}/index.md) | {summary} |")
    text.append("\nCommands, the room above, have no API: `fedsim COMMAND --help`.\n")
    yield "api/index.md", "\n".join(text)


def _summary(path: Path) -> str:
    """Return the first line of a file's docstring, as a cell of a table."""
    line = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", line).replace("``", "`").replace("|", "\\|")


def describe_page() -> Page:
    """Return the page with an example of ``fedsim describe``."""
    command = [sys.executable, "-m", "fedsim", "describe", "--config", CONFIG]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"fedsim describe failed; is fedsim installed beside MkDocs?\n{done.stderr}")
    return (
        "describe.md",
        f"# Output of `fedsim describe`\n\n```\n$ fedsim describe --config {CONFIG}\n{done.stdout.rstrip()}\n```\n",
    )


def file_pages(paths: Iterable[str]) -> Iterator[Page]:
    """Yield a page for each file of text, and a list for each folder; paths are those of the repository."""
    waiting, seen = sorted(paths), set()
    while waiting:
        path = waiting.pop()
        place = page_of(path)
        if path in seen or not place.startswith("files/"):
            continue
        seen.add(path)
        if (ROOT / path).is_dir():
            inside = [name for name in sorted((ROOT / path).iterdir()) if name.is_file()]
            waiting += [str(name.relative_to(ROOT)) for name in inside]
            yield place, f"# `{path}`\n\n" + "".join(f"- [{name.name}]({name.name}.md)\n" for name in inside)
        else:
            language = LANGUAGES.get(Path(path).suffix, "text")
            yield place, f"# `{path}`\n\n`````{language}\n{(ROOT / path).read_text().rstrip()}\n`````\n"


def records_page(records: Iterable[Path]) -> Page:
    """Return the list of dated records of measurements, the newest first."""
    rows = [f"| {path.name[:10]} | [{_title(path)}]({path.name}) |" for path in sorted(records, reverse=True)]
    return "records/index.md", "\n".join(["# Records of measurements\n", "| date | record |", "|---|---|", *rows, ""])


def _title(path: Path) -> str:
    return path.read_text().partition("\n")[0].removeprefix("# ")
