"""A fit into the folder of another run is refused before the slow imports, unless it continues or replaces that run."""

import subprocess
import sys

import pytest

from fedsim.core.errors import ConfigError
from fedsim.core.run_lock import WAYS
from fedsim.parsing.command_line import given, merged
from fedsim.parsing.config_files import with_shipped
from fedsim.parsing.early import refuse_used_folder
from run_dirs import scores_of, write_run

PROGRAM = """
import sys
from fedsim.__main__ import main
code = main(sys.argv[1:])
assert not {"torch", "lightning", "numpy"} & set(sys.modules), "imported before the folder was looked at"
sys.exit(code)
"""


def settings_of(words):
    return merged(given(with_shipped(words)))


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", {1: scores_of({"a": 0.5})})


def test_it_comes_before_all_slow_imports(run):
    words = ["fit", "--config", "quickstart", "--run_dir", str(run)]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"fedsim: error: run_dir: {run} holds a run already; {WAYS}\n"


@pytest.mark.parametrize(
    "words",
    [["--run_dir=RUN"], ["--config", "quickstart", "--run_dir", "RUN"], ["--run_dir=RUN", "--config=methods/fedavg"]],
)
def test_a_folder_that_holds_a_run_is_refused(words, run):
    with pytest.raises(ConfigError, match="holds a run already"):
        refuse_used_folder(settings_of([word.replace("RUN", str(run)) for word in words]))


@pytest.mark.parametrize(
    "words",
    [
        ["--run_dir=RUN", "--overwrite", "true"],
        ["--run_dir=RUN", "--overwrite=true"],
        ["--run_dir=RUN", "--ckpt_path=last"],
        ["--run_dir", "RUN", "--ckpt_path", "last"],
        ["--run_dir=RUN", "--config=CONFIG"],
        ["--run_dir=RUN", "--print_config"],
        ["--run_dir=RUN/new"],
        ["--run_dir=$NOT_SET/x"],
        ["--run_dir="],
        ["--run_dir=null"],
        [],
    ],
)
def test_what_may_be_right_or_is_another_mistake_is_left_to_the_fit(words, run, tmp_path):
    (tmp_path / "own.yaml").write_text("overwrite: true\n")
    given = {"RUN": str(run), "CONFIG": str(tmp_path / "own.yaml")}
    for name, path in given.items():
        words = [word.replace(name, path) for word in words]
    refuse_used_folder(settings_of(words))


def test_only_the_first_rank_looks(run, monkeypatch):
    monkeypatch.setattr("fedsim.parsing.early.rank_of_this_process", lambda: 1)
    refuse_used_folder({"run_dir": str(run)})
