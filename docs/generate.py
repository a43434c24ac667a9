"""Write a page per method from its docstring, and one with the output of ``fedsim describe``.

python docs/generate.py            write to docs/_build, which git ignores
python docs/generate.py FOLDER     write to FOLDER
"""

import contextlib
import importlib
import io
import pkgutil
import sys
from pathlib import Path

import fedsim.methods
from fedsim.__main__ import main

DOCS = Path(__file__).parent
SHARED = ("base", "pruned", "reference")  # of several methods
CONFIG = "configs/quickstart.yaml"


def method_pages():
    """Yield path and text of each method's page."""
    for info in pkgutil.iter_modules(fedsim.methods.__path__):
        if info.name in SHARED:
            continue
        module = importlib.import_module(f"fedsim.methods.{info.name}")
        title, _, rest = module.__doc__.partition("\n")
        classes = [getattr(fedsim.methods, name) for name in fedsim.methods.__all__]
        names = ", ".join(f"`{cls.__name__}`" for cls in classes if cls.__module__ == module.__name__)
        source = f"`src/fedsim/methods/{info.name}.py`"
        yield Path("methods") / f"{info.name}.md", f"# {names}\n\n{title}\n{rest.rstrip()}\n\nSource: {source}\n"


def describe_page():
    """Return path and text of the page with an example of ``fedsim describe``."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["describe", "--config", str(DOCS.parent / CONFIG)]) == 0
    text = f"# Output of `fedsim describe --config {CONFIG}`\n\n```\n{output.getvalue().rstrip()}\n```\n"
    return Path("describe.md"), text


def write_pages(folder):
    """Write all pages below a folder."""
    for path, text in [*method_pages(), describe_page()]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "_build"
    write_pages(FOLDER)
    sys.stdout.write(f"pages are in {FOLDER}\n")
