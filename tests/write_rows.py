"""All settings of papers' rows: ``make rows`` calls this file, and it writes ``src/fedsim/papers/resolved``."""

import contextlib
import io
import json
from pathlib import Path

import yaml

from fedsim.__main__ import main
from fedsim.papers.files import list_papers, read_paper
from fedsim.papers.resolved_rows import digest_of

FOLDER = Path(__file__).parents[1] / "src" / "fedsim" / "papers" / "resolved"


def printed_config(*args):
    """Return what the parser makes of a fit's options, as text."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):  # the parser's way to end
        assert main(["fit", *args, "--print_config"]) == 0
    return output.getvalue()


def parsed_row(row):
    """Return all settings of a row, nested, without the run directory."""
    content = yaml.safe_load(printed_config(f"--paper={row}"))
    del content["run_dir"]
    return content


def flat(content, prefix=""):
    """Return nested settings by their dotted names."""
    if not isinstance(content, dict) or not content:
        return {prefix: content}
    assert not any("." in name for name in content), "a name with a dot cannot be nested again"
    return {k: v for name, value in content.items() for k, v in flat(value, f"{prefix}.{name}".lstrip(".")).items()}


def packed(rows):
    """Return the settings of the first row, and the settings in which others differ from it."""
    base = next(iter(rows.values()))
    changes = {
        name: {
            "changes": {k: v for k, v in settings.items() if k not in base or base[k] != v},
            "gone": [k for k in base if k not in settings],
        }
        for name, settings in rows.items()
    }
    return base, changes


def text_of(key):
    """Return the file of a paper: a line per setting of its first row, and a line per row."""
    paper = read_paper(key)
    base, rows = packed({name: flat(parsed_row(f"{key}/{name}")) for name in paper.rows})
    settings = [f'  "{name}": {json.dumps(value)}' for name, value in base.items()]
    lines = [f'  "{name}": {json.dumps({"of": digest_of(paper, name), **row})}' for name, row in rows.items()]
    entries = ",\n".join
    return f'{{\n "base": {{\n{entries(settings)}\n }},\n "rows": {{\n{entries(lines)}\n }}\n}}\n'


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for paper_key in list_papers():
        (FOLDER / f"{paper_key}.json").write_text(text_of(paper_key))
