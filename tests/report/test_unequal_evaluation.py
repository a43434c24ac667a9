"""Scores that are measured in two ways do not stand side by side in silence."""

import random
import re
from itertools import pairwise

import pytest

from fedsim.__main__ import main
from fedsim.parsing.config_files import read_config, shipped_configs
from fedsim.report.groups import group_runs, unequal_evaluation
from fedsim.settings.configuration import fingerprint_of
from run_dirs import scores_of, write_run

SCORED_BY = {
    "layer": ["pool", "neck"],
    "distance": ["euclidean", "cosine"],
    "flip": [True, False],
    "camera_aware": [True, False],
}
OF_OTHER_GROUPS = {"batch_size": [100, 200], "backend": ["torch", "faiss"]}  # no number depends on them


def run_with(folder, method="FedPav", unseen=None, data=None, **evaluation):
    """A run whose config has some settings of its evaluation."""
    config = {"model": {"method": method, "evaluation": evaluation}, "data": (data or {}) | {"unseen": unseen or []}}
    scores = scores_of({"market1501": 0.5, "msmt17": 0.4})
    summary = {"method": method, "unseen": unseen or [], "fingerprint": fingerprint_of(config)}
    return write_run(folder, {2: scores}, config=config, **summary)


def lines(*folders):
    return list(unequal_evaluation(group_runs([*folders])))


def test_a_drawn_difference_is_named_and_nothing_else(tmp_path):
    draw, wrong = random.Random(3), []
    values = SCORED_BY | OF_OTHER_GROUPS
    for n in range(60):
        first, second = ({name: draw.choice(of) for name, of in values.items()} for _ in range(2))
        folders = [run_with(tmp_path / f"{n}{m}", m, **e) for m, e in (("FedPav", first), ("SKA", second))]
        differing = [name for name in SCORED_BY if first[name] != second[name]]
        printed = lines(*folders)
        named = re.findall(r"model\.evaluation\.(\w+)", "".join(printed))
        if sorted(named) != sorted(differing) or len(printed) != bool(differing):
            wrong.append((first, second, printed))
    assert wrong == []


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [
        ({"test_size": [64, 32]}, {"test_size": [256, 128]}, True),
        ({"size": [64, 32]}, {"size": [256, 128]}, True),  # of training and test images alike
        ({"size": [256, 128], "test_size": [64, 32]}, {"size": [64, 32]}, False),
    ],
)
def test_the_size_of_test_images_counts(first, second, differs, tmp_path):
    small, large = run_with(tmp_path / "a", data=first), run_with(tmp_path / "b", "SKA", data=second)
    words = "NOT EQUAL EVALUATION: FedPav and SKA differ in the size of test images [64, 32] / [256, 128]"
    assert lines(small, large) == [words] * differs


def test_a_run_without_its_config_is_not_judged(tmp_path):
    folders = [run_with(tmp_path / "a", layer="neck"), run_with(tmp_path / "b", "SKA", layer="pool")]
    assert len(lines(*folders)) == 1
    (folders[1] / "config.yaml").unlink()
    assert lines(*folders) == []


@pytest.mark.parametrize("options", [[], ["--compare", "003/table4"]])
def test_a_report_has_the_line(options, tmp_path, capsys):
    folders = [run_with(tmp_path / "a", layer="neck"), run_with(tmp_path / "b", "SKA", layer="pool")]
    assert main(["report", *map(str, folders), *options]) == 0
    assert (
        "NOT EQUAL EVALUATION: FedPav and SKA differ in model.evaluation.layer neck / pool" in capsys.readouterr().out
    )


def test_a_table_of_left_out_sets_has_one_line_per_method(tmp_path, capsys):
    names = ("market1501", "msmt17")
    runs = [
        str(run_with(tmp_path / f"{method}-{name}", method, [name], layer=layer))
        for method, layer in (("FedPav", "neck"), ("SKA", "pool"))
        for name in names
    ]
    assert main(["report", *runs, "--left_out", "true"]) == 0
    text = capsys.readouterr().out
    assert text.count("NOT EQUAL EVALUATION") == 1
    assert "FedPav and SKA differ in model.evaluation.layer neck / pool" in text


def test_methods_of_one_paper_are_scored_alike():
    """The shipped baselines of paper 000 stand beside SKA without the line."""
    files = [str(shipped_configs()[f"methods/{name}"]) for name in ("ska", "fedavg_d", "fedbn", "fedprox", "moon")]
    evaluations = [read_config(file)["model"]["evaluation"] for file in files]
    assert all(first == second for first, second in pairwise(evaluations))
