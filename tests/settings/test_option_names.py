"""No table of option names stands outside the declarations: a fact about a setting is written at its field."""

import ast
import re
from pathlib import Path

import pytest

import fedsim
from fedsim.settings.table import UNKNOWN, section, sections, setting_at

SOURCE = Path(fedsim.__file__).parent
SECTIONS = "|".join(sections())
NAMES = {name for of in ("", *sections()) for name in section(of).arguments}
PATTERN = re.compile(rf"(?:{SECTIONS})\)?\\\.")  # of a regular expression, such as r"data\.(unseen|public)"
OTHER_THINGS = {  # tables of names that are no options, though options have them, too
    "inference/tensors.py: _ASSEMBLED": "arguments of layers",
    "models/onnx_file.py: Layer": "layers of a network",
    "data/__init__.py: _NAMES_IN": "modules",
    "testing/__init__.py: _PLACES": "modules",
    "report/run_files.py: _FIELDS": "fields of summary.json",
    "report/groups.py: _GROUPS": "groups of settings",
}


def tables_in(source):
    """Yield the module-level names whose values hold two option names, or an option with its section.

    One text alone is no table: a component names its own setting in its messages.
    """
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        texts = [
            inner.value
            for inner in ast.walk(node.value)
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
        ]
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        are_texts = isinstance(node.value, ast.Constant) or isinstance(target, ast.Tuple)
        plain = {text for text in texts if (text.split()[0][2:] if text.startswith("--") else text) in NAMES}
        dotted = [text for text in texts if (is_option(text) and not are_texts) or PATTERN.search(text)]
        if dotted or (len(plain) > 1 and not are_texts):
            yield ast.unparse(target)


def is_option(text):
    """Whether a text is an option of a section, maybe with hyphens before it and a dot after it."""
    name = text.lstrip("-").removesuffix(".")
    return name.partition(".")[0] in sections() and "." in name and setting_at(name) is not UNKNOWN


def test_no_table_of_option_names_stands_outside_the_declarations():
    found = {
        f"{path.relative_to(SOURCE).as_posix()}: {name}"
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "settings" or path.parent.parent != SOURCE
        for name in tables_in(path.read_text())
    }
    assert found == OTHER_THINGS.keys()


@pytest.mark.parametrize(
    "source",
    [
        '_FILES = ("config", "run_dir")',
        '_FILES: tuple[str, ...] = ("config", "run_dir")',
        '_REFUSED = {"--ckpt_path": "why", "--overwrite": "why"}',
        '_USUAL = {"--config FILE": "settings", "--run_dir FOLDER": "output"}',
        '_TEXTS = {"method": 1, "backbone": 2}',
        '_SET = frozenset(["devices", "accelerator"])',
        'A = B = ["data.unseen"]',
        '_INFINITE = ("model.hardware.",)',
        '_BASES = {"model.method": ("fedsim.methods.base", "Method")}',
        '_SINGLE = r"data\\.(public|manifest)"',
        '_LOGGER = rf"trainer\\.logger\\.({NAMES})"',
        '_ONE = {"--data.unseen": "--left_out gives it"}',
        '_DEEP = dict(rate="model.client.optimizer.init_args.lr")',
    ],
)
def test_tables_of_option_names_are_found(source):
    assert len([*tables_in(f"import re\n{source}\n")]) == 1


@pytest.mark.parametrize(
    "source",
    [
        '_FIELD = "model.attack"',
        '_FIELD = "config"',
        '_METHOD, _SERVER = "model.method", "model.server_optimizer"',
        '_SHEETS = ("data.png", "clients.png")',
        '_ROOM = ("fedsim.data.images", "fedsim.models.reid")',
        '_SKIP = "or leave such updates out with model.on_bad_update: skip_client"',
        'def f(settings):\n    return settings["trainer.devices"], settings["run_dir"]',
        '_METRICS = ("mAP", "rank1")',
        'class A:\n    devices: int = 1\n    accelerator: str = "cpu"',
    ],
)
def test_other_texts_are_no_tables_of_option_names(source):
    assert [*tables_in(source)] == []
