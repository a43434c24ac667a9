"""``fedsim fit --left_out``: a run without each data set, as one command with one table."""

import json

import pytest
import yaml

from fedsim.__main__ import main
from fedsim.papers.files import read_paper, rotation_in
from fedsim.sweep.rotation import runs_of_rotation, table_of_rotation
from tiny_run import TINY

COMMON = ["--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=1"]


@pytest.mark.slow
def test_a_rotation_on_drawn_people_is_one_command_and_one_table(tmp_path, capfd, quick_python):
    config, root = tmp_path / "tiny.yaml", tmp_path / "runs"
    config.write_text(TINY)
    sets = ["town0", "town1"]
    command = ["fit", "--config", str(config), *COMMON, f"--run_dir={root}"]
    assert main([*command, "--left_out", *sets]) == 0
    table = capfd.readouterr().out
    head = table.splitlines()[0].split()
    assert head == ["method", "model", *sets, "mean"]
    assert "the round is chosen by best: the round with the best val/mAP" in table
    for column in ("oracle", "gap", "evaluations"):
        assert column in table.split("\n\n")[2].splitlines()[0]
    for name in sets:
        (folder,) = root.glob(f"{name}-*/")
        assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["unseen"] == [name]
        summary = json.loads((folder / "summary.json").read_text())
        assert name in summary["unseen"]
        assert name not in summary["clients"]
    assert main([*command, "--left_out=town0,town1", "--parallel", "2"]) == 0  # nothing is trained twice
    assert capfd.readouterr().out == table


def test_folders_have_the_names_of_the_left_out_sets_and_of_seeds(tmp_path):
    by_set = {name: [f"--data.unseen={json.dumps([name])}"] for name in ("a/b", "B", "b")}
    words = ["--model.method=FedPav", f"--run_dir={tmp_path}"]
    runs = runs_of_rotation(words, by_set, [3, 4])
    assert len({run.folder for run in runs}) == 6
    assert len({str(run.folder).lower() for run in runs}) == 6  # disks that do not distinguish case
    assert all(run.folder.parent == tmp_path for run in runs)
    assert runs[0].folder.name.startswith("a%2Fb-seed3-")
    assert runs[0].command[-2:] == ("--seed_everything=3", f"--run_dir={runs[0].folder}")
    assert runs[0].sample == {"left_out": "a/b", "seed": 3}
    (alone, *_) = runs_of_rotation(["--config", "x/mine.yaml"], by_set, [])
    assert str(alone.folder.parent) == "runs/mine-left-out"
    assert not any(word.startswith("--seed_everything") for word in alone.command)
    runs[0].folder.mkdir()
    assert runs_of_rotation(words, by_set, [3])[0].command[-1] == "--ckpt_path=last"


def test_a_row_of_a_paper_is_all_of_its_runs():
    paper, name = rotation_in(["--model.method=x", "--paper", "005/table1_fedpav"])
    assert (paper.key, name) == ("005", "table1_fedpav")
    assert rotation_in(["--paper=005/table1_fedpav"])[1] == "table1_fedpav"
    assert paper.rotations["table1_fedpav"] == {
        data_set: f"table1_fedpav_{data_set}" for data_set in ("market1501", "msmt17", "cuhk03")
    }
    for words in (["--paper=005/table1_fedpav_msmt17"], ["--paper=003/table5"], ["--paper", "nothing"], ["--paper"], [],
                  ["--paper=005"], ["--paper=005/table1_fed"]):  # fmt: skip
        assert rotation_in(words) is None
    for name, runs in paper.rotations.items():
        for data_set, row in runs.items():
            assert paper.rows[row]["notes"].endswith(f"Left out: {data_set}.")
            assert paper.configs(row)[0]["data"]["unseen"] == [data_set], name


@pytest.mark.parametrize(("words", "line"), [
    (["--left_out"], "--left_out: names no data set; give two or more"),
    (["--left_out", "a"], "--left_out: a rotation needs two data sets or more; for one, give --data.unseen='[\"a\"]'"),
    (["--left_out=a"], "--left_out: a rotation needs two data sets or more"),
    (["--left_out", "a", "b", "a"], "--left_out: a is given twice; give each data set once"),
    (["--left_out", "a", "b", "--left_out", "c", "d"], "--left_out: is given twice"),
    (["--left_out=a,"], "--left_out: the name is empty"),
    (["--left_out", "a", "b", "--data.unseen", "[a]"], "--data.unseen: leave it out: --left_out gives the data sets"),
    (["--paper=005/table1_fedpav", "--data.unseen=[a]"], "--data.unseen: leave it out"),
    (["--paper=005/table1_fedpav", "--left_out", "a", "b"], "--left_out: 005/table1_fedpav gives the left-out"),
    (["--left_out", "a", "b", "--ckpt_path", "last"], "--ckpt_path: leave it out"),
    (["--left_out", "a", "b", "--seeds", "1", "--seed_everything=3"], "--seed_everything: leave it out: --seeds gives"),
    (["--left_out", "a", "b", "--parallel", "0"], "--parallel: give the number of parallel runs"),
    (["--left_out", "a", "b", "--trainer.max_epoch", "2"], "did you mean --trainer.max_epochs?"),
])  # fmt: skip
def test_wrong_words_of_a_rotation_are_one_line(words, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", *words]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_reason_of_a_failed_run_is_in_the_last_line(tmp_path, capfd, quick_python):
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    command = ["fit", "--config", str(config), *COMMON, f"--run_dir={tmp_path / 'runs'}"]
    assert main([*command, "--left_out", "nowhere", "town9"]) == 1
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("fedsim: error: 2 of 2 runs failed; call again to repeat only those (")
    assert "the first failed with exit code 2: data.unseen: " in line
    assert "nowhere" in line


def test_every_rotation_of_a_paper_finds_its_table():
    tables = {f"{key}/{name}": table_of_rotation(read_paper(key), name) for key in ("005", "006", "007")
              for name in read_paper(key).rotations}  # fmt: skip
    assert tables["005/table1_fedpav_momentum"] == "005/table1"
    assert tables["005/supp1_fedpav_ms_c2"] == "005/supp1"
    assert tables["006/table1_fedprox"] == "006/table1"
    assert tables["007/protocol2_fedpav"] == "007/table1"
