"""``fedsim sweep --left_out``: methods without each data set and with each seed, and one page of all runs."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from fedsim.__main__ import main
from fedsim.core.errors import ConfigError
from fedsim.sweep.left_out import labels_of, repeated, report_left_out
from fedsim.sweep.local import Result, SweepRun
from fedsim.sweep.sampling import samples
from small import refuse
from sweep_files import read_sweep
from tiny_run import TINY


def commands(capsys, *words):
    """The command lines of a sweep, each as its words."""
    capsys.readouterr()
    assert main(["sweep", "--dry-run", *words]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def test_sets_and_seeds_replace_those_of_the_file(write_sweep):
    sweep = read_sweep(write_sweep(parameters={"a": {"values": [1, 2]}, "seed_everything": {"value": 9}}))
    assert repeated(sweep, [], []) == sweep
    runs = list(samples(repeated(sweep, ["x", "y"], [3, 4])))
    assert [(run["a"], run["data.unseen"], run["seed_everything"]) for run in runs] == [
        (a, [name], seed) for a in (1, 2) for seed in (3, 4) for name in ("x", "y")
    ]
    drawn = read_sweep(write_sweep(method="random", parameters={"a": {"min": 0.0, "max": 1.0}}))
    for sets, seeds, option in ((["x", "y"], [], "--left_out"), ([], [1, 2], "--seeds")):
        with pytest.raises(ConfigError, match=f"{option}: .* chooses its runs, and cannot repeat them"):
            repeated(drawn, sets, seeds)


def test_repetitions_are_printed_and_fixed_options_do_not_replace_them(capsys, write_sweep):
    path = str(write_sweep(parameters={"seed_everything": {"values": [0, 1]}, "trainer.max_epochs": {"value": 1}}))
    assert main(["sweep", path, "--left_out", "a", "b", "--seeds", "7", "8", "--print"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)["parameters"]
    assert printed["data.unseen"] == {"values": [["a"], ["b"]]}
    assert printed["seed_everything"] == {"values": [7, 8]}
    line = refuse(capsys, "sweep", path, "--local", "--left_out", "a", "--html", "page.html")
    assert "are no grid over several" in line
    for words in (["--left_out", "a", "b"], ["--seeds", "1", "2"], ["--html", "page.html"]):
        line = refuse(capsys, "sweep", path, "--local", *words, "--count", "1")
        assert "--count: tables of left-out data sets need all runs" in line


@pytest.mark.parametrize("words", [
    ["--model.client.local_epochs=1"], ["--model.client.local_epochs", "1"], ["--model.client", '{"local_epochs": 1}'],
    ["--config", "CONFIG"], ["--config=CONFIG"], ["--model.client.optimizer.init_args.lr=0.1"],
    ["--model.client.optimizer.lr=0.1"],
])  # fmt: skip
def test_no_option_behind_the_varied_ones_replaces_their_values(words, capsys, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("model: {client: {local_epochs: 1}}")
    words = [word.replace("CONFIG", str(config)) for word in words]
    line = refuse(capsys, "sweep", "--method", "fedpav", "--dry-run", "--", *words)
    assert "behind the varied options sets it, too, for all runs; leave it out there" in line
    assert commands(capsys, "--method", "fedpav", "--", "--trainer.max_epochs=2")


def test_a_file_whose_command_replaces_what_it_varies_is_refused(capsys, write_sweep):
    command = ["${program}", "fit", "${args}", "--model.client.batch_size=4"]
    path = str(write_sweep(command=command, parameters={"model.client.batch_size": {"values": [2, 4]}}))
    assert "--model.client.batch_size: an option behind" in refuse(capsys, "sweep", path, "--dry-run")
    path = str(
        write_sweep(command=command[:2] + command[:1:-1], parameters={"model.client.batch_size": {"values": [2, 4]}})
    )
    assert len(commands(capsys, path)) == 2


def test_names_of_methods_differ_where_their_settings_do():
    shown = ["config", "lr"]
    pairs = [("methods/fedprox", 0.1), ("field/fedprox", 0.1), ("methods/fedprox", 0.1)]
    labels = labels_of([{"config": config, "lr": lr} for config, lr in pairs], shown)
    assert labels[0] == labels[2] != labels[1]
    labels = labels_of([{"config": "a", "lr": 0.00012341}, {"config": "a", "lr": 0.00012344}], ["lr"])
    assert len(set(labels)) == 2
    assert not any(sign in label for label in labels for sign in "=/")


def test_the_field_is_each_method_without_each_set_with_each_seed(capsys):
    lines = commands(capsys, "--method", "recipes/field")
    methods = list(dict.fromkeys(word for line in lines for word in line if word.startswith("--config=")))[-16:]
    assert methods[0] == "--config=methods/fedpav", "with which all others are compared"
    assert len({*methods}) == 16
    assert len(lines) == len({tuple(line[:-1]) for line in lines}) == 16 * 3 * 3
    small = commands(capsys, "--method", "recipes/field", "--config", "quickstart", "--left_out", "town3", "town4",
                     "--seeds", "5", "6", "7", "8")  # fmt: skip
    assert len(small) == 16 * 2 * 4
    assert {word for line in small for word in line if "data.unseen" in word} == {
        "--data.unseen=['town3']", "--data.unseen=['town4']"
    }  # fmt: skip


@pytest.mark.parametrize(("words", "line"), [
    (["--left_out", "a", "b", "a"], "--left_out: a is given twice; give it once"),
    (["--left_out", ""], "--left_out: is empty"),
    (["--seeds", "1", "1"], "--seeds: 1 is given twice; give it once"),
    (["--seeds", "-1"], "--seeds: -1"),
    (["--html", "field.txt"], "field.txt ends with .txt, not with one of .html, .htm; name another"),
])  # fmt: skip
def test_wrong_words_are_one_line_before_the_first_run(words, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert line in refuse(capsys, "sweep", "--method", "recipes/field", "--local", *words)
    assert not list(tmp_path.iterdir())


def test_what_has_no_left_out_sets_is_refused(capsys):
    line = refuse(capsys, "sweep", "--method", "local", "--local", "--html", "a.html")
    assert "--html: is a page of left-out data sets, and these runs are no grid over several; give --left_out" in line
    line = refuse(capsys, "sweep", "--paper", "003/figure4_batch_sizes", "--local", "--left_out", "a", "b")
    assert "--left_out: is not for --paper, whose rows have their own data" in line


def test_a_failed_run_leaves_no_page(write_sweep, tmp_path, capsys):
    file = write_sweep(
        command=["${interpreter}", "-c", "raise SystemExit(1)", "${args}"], parameters={"a": {"value": 1}}
    )
    page, words = tmp_path / "page.html", ["--local", "--left_out", "x", "y", "--run_dir", str(tmp_path / "runs")]
    assert main(["sweep", str(file), *words, "--html", str(page)]) == 1
    assert "2 of 2 runs failed; call the sweep again to repeat only those" in capsys.readouterr().err
    assert not page.exists()


def test_runs_that_leave_out_one_set_have_no_page():
    runs = [SweepRun({"data.unseen": ["x"], "seed_everything": seed}, (), Path("runs", str(seed))) for seed in (0, 1)]
    assert report_left_out([Result(run, 0, {}) for run in runs], None) == ""


@pytest.mark.slow
def test_methods_on_drawn_people_are_one_command_and_one_page(tmp_path, capfd, quick_python):
    config, root, page = tmp_path / "tiny.yaml", tmp_path / "runs", tmp_path / "field.html"
    config.write_text(TINY)
    sweep = tmp_path / "two.yaml"
    sweep.write_text(
        json.dumps({
            "program": "fedsim", "method": "grid", "metric": {"name": "val/mAP", "goal": "maximize"},
            "parameters": {"config": {"values": ["methods/fedpav", "recipes/standardise"]}},
            "command": ["${program}", "fit", f"--config={config}", "${args}"],
        })
    )  # fmt: skip
    repeats = ["--left_out", "town0", "town1", "--seeds", "0", "1"]
    short = ["--", "--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=1"]
    words = ["sweep", str(sweep), "--local", *repeats, "--run_dir", str(root), "--html", str(page), *short]
    assert main(words) == 0
    output = capfd.readouterr().out
    scores = {}
    for path in root.glob("*/summary.json"):
        summary = json.loads(path.read_text())
        (name,) = set(summary["unseen"]) & {"town0", "town1"}
        style = "standardise" if "kind: standardise" in (path.parent / "config.yaml").read_text() else "fedpav"
        scores[style, name, summary["seed"]] = summary["best"]["metrics"][f"test/global/{name}/mAP"]
    assert len(scores) == 8
    rows = [line.split() for line in output.splitlines()]
    for style in ("fedpav", "standardise"):
        for name in ("town0", "town1"):
            (row,) = [row for row in rows if row[:4] == [style, "global", name, "mAP"]]
            assert row[4] == f"{50 * sum(scores[style, name, seed] for seed in (0, 1)):.1f}"
            gain = 50 * sum(scores["standardise", name, seed] - scores["fedpav", name, seed] for seed in (0, 1))
            assert style == "fedpav" or row[8] == f"{gain:+.1f}"
    assert "less fedpav" in output
    assert "NOT EQUAL WORK" not in output
    assert "Differences to the first method" in page.read_text()
    page.unlink()
    assert main(words) == 0  # nothing is trained twice
    assert capfd.readouterr().out == output
    assert page.is_file()
