"""Write docs/methods/*.md from the methods' docstrings and docs/describe.md from ``fedsim describe``.

python docs/generate.py          write
python docs/generate.py --check  exit 1 if a file would change
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


def pages():
    """Yield (path, text)."""
    for info in pkgutil.iter_modules(fedsim.methods.__path__):
        if info.name in SHARED:
            continue
        module = importlib.import_module(f"fedsim.methods.{info.name}")
        title, _, rest = module.__doc__.partition("\n")
        names = ", ".join(f"`{name}`" for name in module.__all__)
        source = f"`src/fedsim/methods/{info.name}.py`"
        yield DOCS / "methods" / f"{info.name}.md", f"# {names}\n\n{title}\n{rest.rstrip()}\n\nSource: {source}\n"
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["describe", "--config", str(DOCS.parent / CONFIG)]) == 0
    text = f"# What `fedsim describe --config {CONFIG}` prints\n\n```\n{output.getvalue().rstrip()}\n```\n"
    yield DOCS / "describe.md", text


if __name__ == "__main__":
    stale = [path for path, text in pages() if not path.is_file() or path.read_text() != text]
    if "--check" in sys.argv:
        sys.exit(f"run make docs: {', '.join(map(str, stale))} would change" if stale else 0)
    for path, text in pages():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
