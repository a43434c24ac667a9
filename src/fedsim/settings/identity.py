"""The identity of a run: its settings, the files that they name, and the code of the user."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedsim.settings.configuration import digest, fingerprint_of, flat
from fedsim.settings.table import LIBRARIES, digest_of_table, section

_REQUIRED = ("numpy", "PIL", "timm", "torchmetrics", "torchvision", "yaml")
"""packages that fedsim requires, or an extra of it: no code of the user's"""
_INSTALLED = ("site-packages", "dist-packages")
"""names of folders of installed packages"""


def identity_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a run as ``summary.json`` has it.

    Args:
        config: the resolved configuration.

    Returns:
        ``config``: a hash of all settings, by which a later change of ``config.yaml`` shows; ``table``: that of the
        facts by which the fingerprint was made; ``files``: option -> hash of the file that it names; ``code``: module
        -> hash of the user's code in it and in what it imports.
    """
    hashes = {"config": digest_of_config(config), "table": digest_of_table()}
    files = {module: _with_imports(module, {}) for module in sorted(set(_own_modules(config)))}
    code = {
        module: digest(sorted((name, _digest_of_file(path)) for path, name in modules.items()))
        for module, modules in files.items()
    }
    return {**hashes, "files": dict(_files(config)), "code": code}


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON file with a ``seal``: a hash of all else, by which a later change shows.

    >>> content = sealed({"seed": 0})
    >>> is_as_sealed(content), is_as_sealed(content | {"seed": 1}), is_as_sealed({"seed": 0})
    (True, False, True)
    """
    return {**content, "seal": _seal_of(content)}


def is_as_sealed(content: Mapping[str, Any]) -> bool:
    """Return whether nothing has changed since the seal; a file of an earlier version has none, and nothing shows."""
    return "seal" not in content or content["seal"] == _seal_of(content)


def _seal_of(content: Mapping[str, Any]) -> str:
    return digest(json.loads(json.dumps({name: value for name, value in content.items() if name != "seal"})))


def line_of_identity(config: Mapping[str, Any]) -> str:
    """Return a line with the hash of the settings by which runs are one experiment, of files and of the user's code."""
    identity = identity_of(config)
    texts = [f"{name} {value}" for content_kind in ("files", "code") for name, value in identity[content_kind].items()]
    return ", ".join([f"Identity: settings {fingerprint_of(config)}", *texts])


def changed_content(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the files and the code that two identities have with other contents, and both hashes.

    Settings that a config cannot have are compared by the reason why.

    >>> changed_content({"files": {"data.manifest": "a"}}, {"files": {"data.manifest": "b"}, "code": {"mine": "c"}})
    {'data.manifest': ('a', 'b')}
    """
    pairs = {
        name if content_kind == "files" else f"code of {name}": (earlier, new[content_kind][name])
        for content_kind in ("files", "code")
        for name, earlier in old.get(content_kind, {}).items()
        if name in new.get(content_kind, {})
    }
    if old:
        pairs["settings outside config.yaml"] = (old.get("unwritable", "none"), new.get("unwritable", "none"))
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def digest_of_config(config: Mapping[str, Any]) -> str:
    """Return a hash of all settings but those of a start."""
    of_start = {name for name, setting in section("").arguments.items() if setting.facts.effect == "nothing"}
    return digest({name: value for name, value in config.items() if name not in of_start})


def _files(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for option, entry in flat(config).items():
        if entry.setting.facts.is_file and isinstance(entry.value, str) and os.path.isfile(entry.value):
            yield option, _digest_of_file(Path(entry.value))


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def _own_modules(value: Any, is_class: bool = False) -> Iterator[str]:
    """Yield the user's modules of which a configuration names a class, or any text in it a class or a function."""
    if isinstance(value, str) and all(part.isidentifier() for part in value.split(".")):
        module = value.rpartition(".")[0]
        while module and _file_of(module) is None:  # a class may stand in another one
            module = module.rpartition(".")[0]
        if module and (is_class or _has(module, value[len(module) + 1 :].partition(".")[0])):
            yield module
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, content in inner:
        yield from _own_modules(content, name == "class_path")


def _has(module: str, name: str) -> bool:
    """Return whether a name is in the code of a module, which defines it, or imports it from elsewhere."""
    path = _file_of(module)
    return path is not None and re.search(rf"\b{name}\b", path.read_text(errors="replace")) is not None


def _with_imports(module: str, files: dict[Path, str], importer: str = "") -> dict[Path, str]:
    """Return the files of a module, of the packages around it, and of the user's modules that they import, by names.

    Nothing is executed.
    """
    path = _file_of(module, importer)
    if path is None or path in files:
        return files
    files[path] = module
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        nodes = []
    around = module.rpartition(".")[0]
    package = module if path.name == "__init__.py" else around
    for name in (around, *(name for node in nodes for name in _imported(node, package))):
        _with_imports(name, files, module)
    return files


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the modules that an import may mean; a name of ``from a import b`` may be a module, too."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: max(len(package.split(".")) - node.level + 1, 0)] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def _file_of(module: str, importer: str = "") -> Path | None:
    """Return the file of a module of the user's; None of a library's, and if there is none.

    An installed module is the user's if a configuration names it, or one of the same package imports it; without
    ``importer``, a configuration does.
    """
    top = module.partition(".")[0]
    if not top or top in (*sys.stdlib_module_names, "fedsim", *LIBRARIES, *_REQUIRED):
        return None
    with_installed = importer.partition(".")[0] in ("", top)
    for folder in [os.getcwd(), *sys.path, *_of_finders(top)]:
        if with_installed or Path(folder).name not in _INSTALLED:
            module_path = Path(folder, *module.split("."))
            for path in (module_path.with_suffix(".py"), module_path / "__init__.py"):
                if path.is_file():
                    return path.resolve()
    return None


def _of_finders(top: str) -> list[str]:
    """Return the folders of a package that an installation for editing has put outside ``sys.path``."""
    try:
        spec = find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        return []
    places = (spec.submodule_search_locations or [spec.origin or ""]) if spec is not None else []
    return [str(Path(place).parent) for place in places]
