"""Names of runs: a lone variant says what makes it one, a plain run is called by its method alone."""

from pathlib import Path

import pytest
import yaml

from fedsim.__main__ import main
from fedsim.parsing.config_files import shipped_configs
from fedsim.report import group_runs
from run_dirs import scores_of, write_run

METHODS = [name for name in shipped_configs() if name.startswith("methods/")]
VARIANTS = {  # with settings that are neither defaults of the method nor those of the config that bears its name
    "fedavg_d": "FedAvg weighting uniform, share_head false, share_neck false",
    "fedpav_cdw": "FedPav weighting cdw",
    "fedpav_kd_cdw": "FedPav weighting cdw, distillation",
    **{name.lower(): f"FedPav server_optimizer {name}" for name in ("FedAdagrad", "FedAdam", "FedAvgM", "FedYogi")},
    "feduca": "FedAvg share_head false",
    "feducc": "FedBN weighting size",
    "fedper": "FedAvg share_head false, share_neck false",
    "parameter_average": "FedAvg weighting uniform, share_head false, share_neck false",
    "stylebank_random": "StyleBank styles random",
}


def write_method(folder, class_path, config=None, clients=("a",), **arguments):
    method = {"class_path": class_path, "init_args": arguments}
    config = config or {"model": {"method": method}}
    name = config["model"]["method"]["class_path"].rpartition(".")[2]
    rounds = config.get("trainer", {}).get("max_epochs", 1)
    scores = {rounds: scores_of({"a": 0.5})}
    return write_run(folder, scores, config=config, method=name, clients=list(clients))


def labels(*folders):
    return [group.label for group in group_runs(list(folders))]


@pytest.mark.parametrize("name", METHODS)
def test_a_run_of_a_shipped_config_is_called_by_its_method(name, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", name, "--model.backbone=SmallCNN", "--data.source=SyntheticReID", "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    method = config["model"]["method"]["class_path"].rpartition(".")[2]
    is_union = config["data"]["partition"] == "union"
    run = write_method(tmp_path / "run", "", config, ("union",) if is_union else ("a",))
    expected = "Centralised" if is_union else VARIANTS.get(Path(name).name, method)
    assert labels(run) == [expected]


def test_a_lone_variant_is_told_by_its_settings(tmp_path):
    lsn = write_method(tmp_path / "lsn", "fedsim.methods.SKA", dual=False, personal="after", unseen="avg")
    assert labels(lsn) == ["SKA dual false, unseen avg"]
    plain = write_method(tmp_path / "plain", "fedsim.methods.FedProx", mu=0.01, weighting="uniform")
    assert labels(lsn, plain) == ["SKA dual false, unseen avg", "FedProx"]
    own = write_method(tmp_path / "own", "my.package.SKA", dual=False)
    assert labels(own) == ["my.package.SKA"], "a class of another package is none of fedsim's"
    union = write_method(tmp_path / "union", "fedsim.methods.FedPav", clients=["union"], weighting="cdw")
    assert labels(union) == ["Centralised"]


def test_what_variants_share_stands_before_what_tells_them_apart(tmp_path):
    folders = [write_method(tmp_path / f"{n}", "SKA", dual=False, unseen="avg", avg_every=n) for n in (2, 3)]
    assert labels(*folders) == ["SKA dual false, unseen avg, avg_every 2", "SKA dual false, unseen avg, avg_every 3"]


def test_tuned_numbers_make_no_variant(tmp_path):
    assert labels(write_method(tmp_path / "run", "FedKLPR", prune_from=3, plateau=0.1)) == ["FedKLPR"]


def test_of_many_settings_the_first_are_told(tmp_path):
    arguments = {"prune": False, "sas": False, "crr": False, "accuracy": "centroids", "step": 0.3}
    folder = write_method(tmp_path / "run", "FedKLPR", **arguments)
    assert labels(folder) == ["FedKLPR prune false, sas false, crr false, ..."]


def test_a_long_name_is_broken_over_lines_of_a_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lsn = write_method(tmp_path / "lsn", "SKA", dual=False, unseen="avg")
    plain = write_method(tmp_path / "plain", "FedPav")
    assert main(["report", str(lsn), str(plain)]) == 0
    head = [line.split() for line in capsys.readouterr().out.splitlines()[:3]]
    assert head == [["data", "set", "SKA", "dual", "false,"], ["unseen", "avg", "FedPav"], ["global", "global"]]
