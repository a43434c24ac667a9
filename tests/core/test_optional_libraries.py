"""Optional libraries that are missing, or are there and do not start: one line with the remedy."""

import tomllib
from pathlib import Path

import pytest

from fedsim.core.errors import ConfigError
from fedsim.core.extras import DISTRIBUTION, load_extra

BROKEN = {
    "raise RuntimeError('its CUDA libraries are missing\\nsee a page')": "its CUDA libraries are missing",
    "raise OSError('libcublas.so.12: cannot open shared object file')": "libcublas.so.12: cannot open",
    "raise ImportError('/lib/libc.so.6: version GLIBC_2.38 not found')": "version GLIBC_2.38 not found",
    "raise AttributeError": "AttributeError",
    "import no_such_part": "needs no_such_part; pip install",
}
"""first statement of a library -> words of the refusal; FAISS, for one, raises the first"""


@pytest.mark.parametrize(("statement", "words"), BROKEN.items(), ids=[*BROKEN.values()])
def test_a_library_that_does_not_start_is_one_line(statement, words, tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text(statement)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as refused:
        load_extra("broken_library", "backend", "faiss", instead="use torch")
    assert words in str(refused.value)
    assert str(refused.value).startswith("backend")
    assert str(refused.value).endswith("; pip install 'fedsim-reid[faiss]', or use torch")
    assert "\n" not in str(refused.value)


def test_pip_knows_the_package_by_this_name():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    assert any(needed.startswith(f"{DISTRIBUTION}[") for needed in project["optional-dependencies"]["dev"])
