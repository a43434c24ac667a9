"""A comparison is of whole configurations: each change of a row's settings is named, and no other experiment passes."""

import copy
import json
import random
from typing import get_args

import pytest
import yaml

from fedsim.__main__ import main
from fedsim.papers.files import list_papers, read_paper
from fedsim.papers.resolved_rows import resolved_row
from fedsim.report.closest import _text, differences_of, method_of, settings_of_row
from fedsim.settings.configuration import flat
from fedsim.settings.facts import Group
from run_dirs import clients_and_unseen, data_of_row, scores_of, write_run
from write_rows import flat as nested_names
from write_rows import printed_config

ROWS = [(key, name) for key in list_papers() for name in read_paper(key).rows]
FOUR = ["dukemtmc", "market1501", "cuhk03np", "msmt17"]
GROUPS = get_args(Group)


def row_of(key, name):
    return resolved_row(read_paper(key), name)


def written(config):
    """A config as a file has it."""
    return yaml.safe_load(yaml.safe_dump(config))


def differences(row, config):
    """Option -> its difference."""
    return {difference.option: difference for difference in differences_of(flat(row), flat(config))}


def that_count(row, config):
    """The options that differ with an effect on results."""
    return [option for option, difference in differences(row, config).items() if difference.effect == "results"]


def option_of(name):
    return name.replace(".init_args", "").removesuffix(".class_path")


def is_compared(name):
    return "." in name


def other_value(value, rng):
    """Another value of a setting."""
    if isinstance(value, bool):
        return not value
    if value is None or (isinstance(value, str) and "/" in value):  # another file is no difference, no file is one
        return rng.choice([7, "other", True]) if value is None else None
    if isinstance(value, int | float):
        return rng.choice([value + 1, -value - 1, None, str(value)])
    if isinstance(value, str):
        return rng.choice([f"{value}x", None])
    return rng.choice([[*value, 1], None]) if isinstance(value, list) else {"added": 1}


def change_of_sources(sources, rng):
    """Leave out a data set, add one, or change an argument of one; return the data sets, and a name that is said."""
    sources = [sources] if isinstance(sources, dict) else copy.deepcopy(sources)
    place = rng.randrange(len(sources))
    name = sources[place]["class_path"].rpartition(".")[2]
    arguments = [*sources[place]["init_args"]]
    kind = rng.choice(["less", "more", "argument"])
    if kind == "argument" and arguments:
        argument = rng.choice(arguments)
        sources[place]["init_args"][argument] = other_value(sources[place]["init_args"][argument], rng)
        return sources, f"data.source.{name}.{argument}"
    if kind == "less":
        del sources[place]
        return sources, "data.source"
    return [*sources, {"class_path": "other.Set", "init_args": {}}], "data.source"


def draw(rng):
    """A row's config with one change, the row's, and the option that has changed."""
    row = row_of(*rng.choice(ROWS))
    config = copy.deepcopy(row)
    name = rng.choice([name for name in nested_names(row) if is_compared(name)])
    section = config
    *path, last = name.split(".")
    for part in path:
        section = section[part]
    if name == "data.source" or name.startswith("data.source."):
        config["data"]["source"], option = change_of_sources(config["data"]["source"], rng)
    else:
        section[last], option = other_value(section[last], rng), option_of(name)
    return written(config), row, option


@pytest.mark.parametrize(("key", "name"), ROWS, ids=lambda part: part)
def test_a_row_has_no_difference_from_itself(key, name):
    row = row_of(key, name)
    assert differences(row, written(row)) == {}


def test_each_of_200_single_changes_is_named():
    rng = random.Random(0)
    missed = []
    for _ in range(200):
        config, row, option = draw(rng)
        if [*differences(row, config)] != [option]:
            missed.append(option)
    assert missed == []


def test_another_machine_is_a_difference_without_effect():
    row = row_of("003", "table4_batch_32")
    config = copy.deepcopy(row)
    config |= {"seed_everything": 5, "run_dir": "x", "ckpt_path": "last"}
    config["trainer"] |= {"devices": 4, "logger": [{"class_path": "lightning.pytorch.loggers.CSVLogger"}]}
    config["trainer"]["strategy"]["init_args"]["timeout"] = "0:30:00"
    config["data"] |= {"workers": 9, "cache": "host"}
    for source in config["data"]["source"]:
        source["init_args"]["root"] = "/elsewhere"
    found = differences(row, config)
    assert {difference.effect for difference in found.values()} == {"nothing"}
    assert {"trainer.devices", "trainer.logger", "data.workers", "data.source.VIPeR.root"} <= {*found}
    config["trainer"]["strategy"]["class_path"] = "S"
    assert that_count(row, config)[0] == "trainer.strategy"


def test_the_order_of_data_sets_is_a_difference_with_both_orders():
    row, config = row_of("003", "table4_batch_32"), copy.deepcopy(row_of("003", "table4_batch_32"))
    config["data"]["source"].reverse()
    [difference] = differences(row, config).values()
    assert difference.effect == "results"
    assert _text(difference).startswith("data.source [ILIDS, ThreeDPeS, VIPeR, ")
    assert "(row: [MSMT17, DukeMTMC, " in _text(difference)


def test_modules_of_classes_are_no_difference():
    row, config = row_of("003", "table4_batch_32"), copy.deepcopy(row_of("003", "table4_batch_32"))
    config["model"]["selection"]["class_path"] = "fedsim.selection.AllClients"  # of an earlier version
    config["model"]["method"]["class_path"] = "FedPav"
    assert differences(row, config) == {}
    config["model"]["method"]["class_path"] = "mine.FedPav"
    config["model"]["selection"]["class_path"] = "mine.AllClients"
    config["model"]["client"]["optimizer"]["class_path"] = "mine.SGD"
    assert that_count(row, config) == ["model.method", "model.client.optimizer", "model.selection"]


def test_of_another_class_the_common_arguments_are_compared():
    row, config = row_of("003", "table4_batch_32"), copy.deepcopy(row_of("003", "table4_batch_32"))
    config["model"]["client"]["optimizer"] = {
        "class_path": "torch.optim.Adam",
        "init_args": {"lr": 1.0, "weight_decay": 0.0005, "eps": 1},
    }
    found = differences(row, config)
    assert [*found] == ["model.client.optimizer", "model.client.optimizer.lr"]
    assert {difference.group for difference in found.values()} == {"training"}


def test_settings_that_a_version_did_not_have_are_compared_by_their_defaults():
    row, config = row_of("003", "table4_batch_32"), copy.deepcopy(row_of("003", "table4_batch_32"))
    del config["model"]["client"]["schedule"]["milestones"], config["model"]["client"]["micro_batch"]
    assert differences(row, config) == {}
    del config["model"]["client"]["batch_size"]
    assert [*differences(row, config)] in ([], ["model.client.batch_size"])


def test_each_group_has_settings():
    expected = {
        "data.partition": "data", "data.val_fraction": "evaluation", "data.augmentation.erase": "images",
        "model.neck.dim": "network", "model.objective.triplet": "loss",
        "model.client.batch_size": "training", "trainer.max_epochs": "training", "model.method": "method",
        "model.evaluation.layer": "evaluation",
    }  # fmt: skip
    settings = settings_of_row("003", "table4_batch_32")
    assert {option: settings[option].group for option in expected} == expected
    assert set(expected.values()) == {*GROUPS}


# -- other experiments that once passed as the paper's -----------------------------------------------------------------


def compare(capsys, run, reference, *words):
    assert main(["report", str(run), *map(str, words), "--compare", reference]) == 0
    return capsys.readouterr().out


def run_of(folder, config, sets=(*FOUR, "viper", "ilids", "cuhksysu"), row="", scores=None, **summary):
    """A whole run with these settings, on the data of a row, PAPER/NAME; its scores are no matter."""
    scores, data = scores or scores_of(dict.fromkeys(sets, 0.5)), data_of_row(*row.split("/")) if row else None
    known = {"unseen": ["viper", "ilids", "cuhksysu"]} if data is None else clients_and_unseen(config, data)
    method = config["model"]["method"]["class_path"].rpartition(".")[2]
    known |= {"method": method, "seed": config["seed_everything"], "data": data}
    rounds = config["trainer"]["max_epochs"]
    return write_run(folder, {rounds: scores}, config=config, **known | summary)


ODD = """--data.dry_run true --model.backbone SmallCNN --data.size [64,32] --trainer.max_epochs 1
--trainer.check_val_every_n_epoch 1 --trainer.devices 1 --model.client.schedule.kind cosine --model.neck.kind bnneck
--model.neck.dropout 0 --model.objective.label_smoothing 0.1 --model.objective.triplet 1.0
--model.client.sampler identity --model.bn_stats local --model.evaluation.layer pool
--model.evaluation.distance euclidean --data.augmentation.erase 0.5"""


def test_a_run_with_many_other_settings_names_all_of_them(tmp_path, capsys):
    words = ODD.split()
    config = yaml.safe_load(printed_config("--paper=003/table4", *words))
    text = compare(capsys, run_of(tmp_path / "odd", config, FOUR, "003/table4_batch_32", unseen=[]), "003")
    lines = {name: line for line in text.splitlines() if (name := line.split(":")[0].strip()) in GROUPS}
    for option, value in zip(words[::2], words[1::2], strict=True):
        if option != "--trainer.devices":
            name = option.removeprefix("--")
            value = value.replace("[64,32]", "[64, 32]").removesuffix(".0")
            assert any(f" {name} {value} (row: " in line for line in lines.values()), option
    assert list(lines) == [*GROUPS]


def section_of(config, path):
    for part in path:
        config = config[part]
    return config


NOISE = {"class_path": "WhiteNoise", "init_args": {"beta": 0.05, "in_aggregation": True, "in_download": True}}
OBJECTIVE = {"model.objective.label_smoothing": 0.1, "model.objective.triplet": 1.0}
FAKES = [
    ("001/table2_fedreid", "table2", {"model.method.init_args.expert": False}),
    ("001/table2_fedreid", "table2", {"model.privacy": NOISE}),
    ("001/table2_fedreid", "table2", {"model.availability.drop": 0.5}),
    ("001/table2_fedreid", "table2", {
        "model.method.init_args.start_mix": 0.5, "model.method.init_args.expert_from": "global",
        "model.method.init_args.views": "same",
    }),
    ("001/table2_fedavg_half", "table2", {"model.selection.init_args.fraction": 0.25}),
    ("001/table2_fedavg", "table2", {
        "model.method.init_args.share_head": False, "model.backbone.init_args.last_stride": 1,
        "model.client.sampler": "identity", "data.augmentation.erase": 0.5, **OBJECTIVE,
    }),
    ("000/table2_fedprox", "table2", {
        "model.method.init_args.mu": 10.0, "model.method.init_args.share_head": True,
        "model.method.init_args.weighting": "size", **OBJECTIVE,
    }),
    ("000/table2_fedbn", "table2", {
        "model.method.init_args.share_head": True, "model.method.init_args.weighting": "size", **OBJECTIVE,
    }),
    ("000/table2_adddata", "table2", {"model.method.init_args.distillation": None, **OBJECTIVE}),
    ("000/table4_ska", "table4", {
        "model.method.init_args.personal": "before_aggregation", **OBJECTIVE,
    }),
]  # fmt: skip


@pytest.mark.parametrize(("row", "table", "changes"), FAKES, ids=range(len(FAKES)))
def test_another_experiment_is_not_the_papers(row, table, changes, tmp_path, capsys):
    key, _, name = row.partition("/")
    config = copy.deepcopy(row_of(key, name))
    text = compare(capsys, run_of(tmp_path / "run", config, row=row), f"{key}/{table}")
    assert f"({row})\n" in text
    assert "settings that differ" not in text
    for option, value in changes.items():
        *path, last = option.split(".")
        section = section_of(config, path)
        assert last in section
        section[last] = value
    text = compare(capsys, run_of(tmp_path / "run", config, row=row), f"{key}/{table}")
    assert f"({row}); settings that differ: {len(changes)}\n" in text
    for option in changes:
        assert f" {option_of(option)} " in text, option


@pytest.mark.parametrize(
    ("method", "reference", "wrong"),
    [("FedAvg", "001/table4", "TJAIDL"), ("FedAvg", "001/table5", "DSIFT"), ("MOON", "001/table6", "DPR"),
     ("FedReIDFineTune", "001/table3", "Centralised")],
)  # fmt: skip
def test_a_run_is_not_closest_to_another_method(method, reference, wrong, tmp_path, capsys):
    config = copy.deepcopy(row_of("001", "table2_fedavg"))
    config["model"]["method"] = {"class_path": f"fedsim.methods.{method}", "init_args": {}}
    text = compare(capsys, run_of(tmp_path / "run", config, method=method), reference)
    assert wrong in text
    assert f"- {method}: no row of this table is of this method" in text
    assert "closest to" not in text


def test_the_method_of_one_client_with_all_data_is_centralised():
    assert method_of(flat({})) == ""
    assert method_of(flat({"model": {"method": "Local"}})) == "Local"
    assert (
        method_of(flat({"model": {"method": {"class_path": "a.FedPav"}}, "data": {"partition": "union"}}))
        == "Centralised"
    )


def test_copied_numbers_name_whose_they_are(tmp_path, capsys):
    run = run_of(tmp_path / "run", row_of("004", "table2_fedureid"), ("market1501", "viper"), "004/table2_fedureid")
    text = compare(capsys, run, "004/table2")
    assert "has all settings of 'FedUReID' (004/table2_fedureid)" in text
    assert "copied from its own paper; known of its settings: its code has 1 local epoch, batches of 16 and SGD" in text
    row = "001/table2_fedreid"
    text = compare(capsys, run_of(tmp_path / "b", row_of(*row.split("/")), FOUR, row), "000/table2")
    assert "has all settings of 'FedReID' (001/table2_fedreid)" in text
    assert "copied from paper 001; known of its settings: all of 001/table2_fedreid" in text


def test_of_several_runs_of_a_row_the_one_with_fewest_differences_counts(tmp_path, capsys):
    for key, name in (("000", "table2_fedbn"), ("000", "table4_lsn")):
        run = run_of(tmp_path / name, row_of(key, name), FOUR, f"{key}/{name}")
        assert f"has all settings of 'FedBN+D' ({key}/{name})" in compare(capsys, run, "000/table2")


def test_single_clients_stand_below_the_right_rows(tmp_path, capsys):
    """With three groups, runs stand below the paper's rows: each client's own model below that of the client."""
    config = row_of("001", "table3_local")
    runs = []
    for count, changes in enumerate(({}, {"batch_size": 16}, {"batch_size": 8})):
        config = copy.deepcopy(config)
        config["model"]["client"] |= changes
        scores = scores_of({"viper": 0.2, "ilids": 0.4}, "personalised") | scores_of({"viper": 0.3}, "ensemble")
        scores |= scores_of({f"viper/{client}": 0.1 * place for place, client in enumerate(FOUR, 1)}, "personalised")
        folder = tmp_path / str(count)
        options = {"method": "Local", "primary": "personalised", "unseen": ["viper", "ilids"], "clients": FOUR}
        runs.append(str(write_run(folder, {100: scores}, config=config, **options)))
    text = compare(capsys, runs[0], "001/table3", *runs[1:])
    lines = [line.split("  ") for line in text[text.index("---") :].splitlines()[1:]]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    labels = [line[1] for line in cells[: cells.index([])] if len(line) > 1]
    expected = [[client] * 4 for client in FOUR]  # the paper's, and three runs'
    assert labels[:16] == [client for four in expected for client in ("personalised", *four[1:])]
    assert labels[16:20] == ["ensemble"] * 4


def test_a_run_on_cifar10_stands_beside_its_column(tmp_path, capsys):
    """Table 2 of paper 001 has a column of top-1 accuracies beside those of rank-1."""
    for name, printed in (("cifar10", "FedAVG, S = 1"), ("cifar10_fedreid_half", "FedReID, S = 0.5")):
        scores = {"test/global/cifar10/top1": 0.9123, "test/global/seen/top1": 0.9123}
        run = run_of(tmp_path / name, row_of("001", name), row=f"001/{name}", scores=scores)
        for options in ([], ["--metric", "top1"]):
            text = compare(capsys, run, "001/table2", *options)
            assert "; rank-1 in percent; cifar10: top-1\n" in text
            cells = next(line for line in text.splitlines() if line.startswith("cifar10")).split()
            assert cells[-1] == "91.23"
            assert "93.21 ± 0.08" in text
            assert next(line for line in text.splitlines() if line.startswith("viper")).split()[-1] == "-"
            assert f"has all settings of '{printed}' (001/{name})" in text
        assert "\ntable2: " in compare(capsys, run, "001")


def test_the_record_of_rows_is_small():
    """It is read by each comparison."""
    assert all(len(json.dumps(row_of(*row))) < 20_000 for row in ROWS)
