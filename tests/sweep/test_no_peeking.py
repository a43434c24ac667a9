"""A sweep does not order settings by a test score: 200 drawn ones are refused; those that choose nothing are not."""

import random

import pytest
import yaml

from fedsim.core.errors import ConfigError
from fedsim.papers.files import list_papers, read_paper
from fedsim.parsing.config_files import shipped_configs
from fedsim.sweep.file import sweep_of
from fedsim.sweep.made import sweep_of_method, sweep_of_paper
from small import refuse

KINDS = ("global", "local", "personalised", "ensemble")
NAMES = ("unseen", "seen", "market1501", "msmt17", "site%2Fa", "val", "test", "oracle")
METRICS = ("mAP", "rank1", "rank5", "rank10", "mAP_trapezoid", "mINP", "top1", "mAP_std")
CHOICES = {
    "model.client.optimizer.init_args.lr": {"values": [0.1, 0.01]},
    "model.method": {"values": ["FedPav", "FedProx"]},
    "model.client.local_epochs": {"min": 1, "max": 5},
    "model.backbone.init_args.style.p": {"distribution": "uniform", "min": 0.0, "max": 1.0},
    "paper": {"values": ["005/table1_fedpav_msmt17", "005/table1_moon_msmt17"]},
    "config": {"values": ["a.yaml", "b.yaml"]},
    "data.val_fraction": {"values": [0.1, 0.2]},
    "trainer.max_epochs": {"values": [10, 20, 40]},
    "data.source": {"values": ["A", "B"]},
}
NO_CHOICES = {
    "data.unseen": {"values": [["market1501"], ["msmt17"]]},
    "data.val": {"values": ["identities", "none"]},
    "seed_everything": {"values": [0, 1, 2]},
    "model.client.batch_size": {"value": 64},
    "model.neck.dim": {"values": [512]},
    "model.neck.kind": {"values": ["bnneck", "bnneck"]},
}


def test_score(rng):
    """The name of a test score: of a model on a set, of one client's, or of the spread over clients."""
    name = ["test", rng.choice(KINDS), rng.choice(NAMES), rng.choice(METRICS)]
    name = name if rng.random() < 0.6 else [*name[:3], "market1501", name[3]]
    return "/".join(name if rng.random() < 0.8 else ["spread", "test", *name[1:2], name[-1], "p50"])


test_score.__test__ = False


def content(rng, metric, parameters):
    random_method = any("min" in fields for fields in parameters.values())
    names = rng.sample([*parameters], len(parameters))
    method = "random" if random_method else rng.choice(["grid", "random"])
    goal = rng.choice(["maximize", "minimize"])
    return {"method": method, "metric": {"name": metric, "goal": goal}, "program": "fedsim",
            "parameters": {name: parameters[name] for name in names}}  # fmt: skip


def test_no_drawn_sweep_orders_settings_by_a_test_score():
    rng, passed = random.Random(0), []
    for _ in range(200):
        chosen = rng.sample([*CHOICES], rng.randint(1, 3))
        others = rng.sample([*NO_CHOICES], rng.randint(0, 3))
        metric = test_score(rng)
        fields = content(rng, metric, {n: (CHOICES | NO_CHOICES)[n] for n in (*chosen, *others)})
        try:
            sweep_of(fields, "s.yaml")
        except ConfigError as error:
            line = str(error)
            assert line.startswith(f"s.yaml: metric.name: {metric} is a test score, and would choose ")
            assert any(name in line for name in chosen)
            assert "set it to val/mAP" in line
            assert "\n" not in line
        else:
            passed.append(metric)
    assert passed == []


def test_sweeps_that_choose_nothing_or_by_the_sources_are_not_refused():
    rng = random.Random(1)
    for _ in range(200):
        names = rng.sample([*NO_CHOICES], rng.randint(1, 4))
        metric = test_score(rng)
        assert sweep_of(content(rng, metric, {n: NO_CHOICES[n] for n in names}), "s.yaml").metric == metric
        metric = rng.choice(["val/mAP", "val/top1", "oracle/rank1", "train/loss", "val/global/test/mAP", "tests"])
        assert sweep_of(content(rng, metric, {n: CHOICES[n] for n in rng.sample([*CHOICES], 2)}), "s.yaml")


def test_it_is_one_line_of_the_command(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    fields = content(random.Random(0), "test/global/unseen/mAP", {"model.method": {"values": ["a", "b"]}})
    path.write_text(yaml.safe_dump(fields))
    for how in ("--dry_run", "--print", "--local"):
        line = refuse(capsys, "sweep", path, how)
        assert "metric.name: test/global/unseen/mAP is a test score, and would choose model.method; set it" in line
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("# sweep: metric: test/global/unseen/rank1\nmodel: {method: FedPav}\n")
    line = refuse(capsys, "sweep", "--method", recipe, "--dry_run", "--count", "2")
    assert "is a test score, and would choose model.client.optimizer.init_args.lr" in line


@pytest.mark.parametrize("name", ["005", "006", "007"])
def test_sweeps_of_papers_with_a_target_are_ordered_by_the_sources(name):
    assert {sweep.get("metric") for sweep in read_paper(name).sweeps.values()} <= {"val/mAP"}


def test_no_shipped_sweep_is_refused():
    for key in list_papers():
        for name in read_paper(key).sweeps:
            assert sweep_of(sweep_of_paper(f"{key}/{name}", []), name).metric in ("oracle/rank1", "val/mAP")
    for config in shipped_configs():
        if config.startswith(("methods/", "recipes/")):
            assert sweep_of(sweep_of_method(config, []), config).metric == "val/mAP"
