"""Images and steps of the runs in a report: scores of more work are not compared in silence."""

import random

import pytest

from fedsim.__main__ import main
from fedsim.report.costs import EQUAL_WORK, work
from fedsim.report.groups import RunGroup
from fedsim.report.runs import read_run
from run_dirs import scores_of, write_log, write_run


def run_with(folder, rounds, seed=0, fingerprint=None, **summary):
    """A run; rounds: (images, steps) of each, and further numbers."""
    scores = scores_of({"market1501": 0.5})
    write_run(folder, {len(rounds): scores}, seed=seed, fingerprint=fingerprint or folder.name, config={}, **summary)
    logged = [
        (t, {"train/clients": 2, "train/images": images, "train/steps": steps, **dict(*more)})
        for t, (images, steps, *more) in enumerate(rounds, 1)
    ]
    write_log(folder / "metrics.csv", [*logged, (len(rounds), scores)])
    return folder


def lines(*groups):
    return list(work([RunGroup(label, tuple(map(read_run, folders))) for label, folders in groups]))


def test_images_and_steps_are_sums_over_rounds(tmp_path):
    a = run_with(tmp_path / "a", [(1000, 40), (500, 20)])
    b = run_with(tmp_path / "b", [(1100, 40), (500, 21)])
    assert lines(("A", [a])) == ["trained on: A 1,500 images in 60 steps"]
    assert lines(("A", [a, b])) == ["trained on: A 1,500 to 1,600 images in 60 to 61 steps"]
    assert lines(("A", [a]), ("B", [b])) == [
        "trained on: A 1,500 images in 60 steps, B 1,600 images in 61 steps",
        "NOT EQUAL WORK: B trained on 7% more images than A; this may change scores",
    ]
    none = run_with(tmp_path / "none", [(0, 0)])
    assert lines(("A", [a]), ("N", [none]))[1:] == [
        "NOT EQUAL WORK: A trained on more images than N; this may change scores",
        "NOT EQUAL WORK: A took more steps than N; this may change scores",
    ]
    assert len(lines(("N", [none]))) == 1


def test_differences_beyond_five_percent_are_named_and_no_others(tmp_path):
    rng = random.Random(0)
    wrong = []
    for number in range(40):
        counts = [rng.randrange(1000, 1200) for _ in range(3)]
        equal = rng.random() < 0.5  # images, or steps
        rounds = [(1000, c) if equal else (c, 1000) for c in counts]
        groups = [(f"{i}", [run_with(tmp_path / f"{number}{i}", [r])]) for i, r in enumerate(rounds)]
        differs = max(counts) / min(counts) > 1 + EQUAL_WORK
        said = lines(*groups)[1:]
        if len(said) != differs or (said and counts[int(said[0].split()[3])] != max(counts)):
            wrong.append(counts)
        wrong += [line for line in said if (" steps than " if equal else " images than ") not in line]
    assert wrong == []


def test_roles_are_named_where_they_have_work(tmp_path):
    personal = {"train/images_personal": 100, "train/steps_personal": 5}
    server = {"train/images_server": 60, "train/steps_server": 2}
    plain = run_with(tmp_path / "plain", [(200, 10), (200, 10)])
    both = run_with(tmp_path / "both", [(300, 15, personal), (360, 17, personal | server)])
    more = run_with(tmp_path / "more", [(300, 15, personal), (300, 15, personal)])
    assert lines(("A", [plain]), ("B", [both, more])) == [
        "trained on: A 400 images in 20 steps, B 600 to 660 images in 30 to 32 steps "
        "(personal 200 in 10; server 0 to 60 in 0 to 2)",
        "NOT EQUAL WORK: B trained on 57% more images than A; this may change scores",
        "NOT EQUAL WORK: B took 55% more steps than A; this may change scores",
    ]


def test_runs_of_earlier_versions_have_no_such_numbers(tmp_path):
    old = write_run(tmp_path / "old", {1: scores_of({"market1501": 0.5})}, config={})
    write_log(old / "metrics.csv", [(1, {"train/clients": 2})])
    assert lines(("O", [old])) == []
    (old / "metrics.csv").unlink()
    assert lines(("O", [old])) == []
    new = run_with(tmp_path / "new", [(10, 1)])
    assert lines(("O", [old]), ("N", [new])) == ["trained on: N 10 images in 1 steps"]


@pytest.mark.parametrize("options", [[], ["--compare", "003/table4"]])
def test_a_report_says_it(options, tmp_path, capsys):
    folders = [run_with(tmp_path / "a", [(1000, 40)]), run_with(tmp_path / "b", [(2000, 80)], method="FedProx")]
    assert main(["report", *map(str, folders), *options]) == 0
    text = capsys.readouterr().out
    assert "trained on: FedPav 1,000 images in 40 steps, FedProx 2,000 images in 80 steps" in text
    assert "NOT EQUAL WORK: FedProx trained on 100% more images than FedPav" in text


def test_a_fit_logs_all_images_of_all_epochs(tiny, tmp_path):
    options = ["--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=2", "--model.client.local_epochs=2"]
    assert main(["fit", "--config", str(tiny), *options, f"--run_dir={tmp_path / 'run'}"]) == 0
    run = read_run(tmp_path / "run")
    rows = [run.log[t] for t in (1, 2)]
    assert rows[0]["train/images"] == rows[1]["train/images"] > 0
    batches = rows[0]["train/images"] / 8  # of eight images; the last of each client and epoch may have fewer
    assert batches <= rows[0]["train/steps"] < batches + 4 * 2
    assert lines(("R", [tmp_path / "run"]))[0].startswith(f"trained on: R {2 * rows[0]['train/images']:,.0f} images")
