"""Configurations setting by setting, and the comparison of two of them, against plain code and by hand."""

import copy
import json
import random
from functools import partial

import pytest

from fedsim.papers.files import list_papers, read_paper
from fedsim.papers.resolved_rows import resolved_row
from fedsim.settings import table
from fedsim.settings.changes import changes_between
from fedsim.settings.configuration import (
    compare,
    fingerprint_from,
    fingerprint_of,
    flat,
    idle_settings,
    is_of_experiment,
    line_of_idle,
    missing_settings,
    names_file,
    text_of,
)

ROWS = [(key, name) for key in list_papers() for name in read_paper(key).rows]
LIGHTNING = "lightning.pytorch"


def row_of(key="003", name="table4_batch_32"):
    return copy.deepcopy(resolved_row(read_paper(key), name))


def with_value(option, value, config=None):
    """A configuration with one setting, below that of a row."""
    config = row_of() if config is None else copy.deepcopy(config)
    *path, last = option.split(".")
    section = config
    for part in path:
        section = section.setdefault(part, {})
        section = section.get("init_args", section)
    section[last] = value
    return config


def part(path, **arguments):
    return {"class_path": path, "init_args": arguments}


def nested(option, value):
    """A configuration of one setting."""
    for name in reversed(option.split(".")):
        value = {name: value}
    return value


def differing(old, new, effects=("results", "rounding", "nothing")):
    return [difference.option for difference in compare(flat(old), flat(new)) if difference.effect in effects]


# -- spellings ---------------------------------------------------------------------------------------------------------

SGD = {"lr": 0.005, "momentum": 0.9, "weight_decay": 0.0005, "nesterov": True}
EQUAL = [
    ("trainer.precision", [None, "32-true", 32, "32"]),
    ("trainer.limit_val_batches", [None, 1.0]),
    ("trainer.limit_train_batches", [None, 1.0]),
    ("trainer.callbacks", [None, [], part(f"{LIGHTNING}.callbacks.RichProgressBar"),
                           [part(f"{LIGHTNING}.callbacks.lr_monitor.LearningRateMonitor")],
                           [f"{LIGHTNING}.callbacks.ModelSummary", part(f"{LIGHTNING}.callbacks.ModelCheckpoint")]]),
    ("trainer.plugins", [None, []]),
    ("data.unseen", [None, []]),
    ("data.test_size", [None, [256, 128], (256, 128)]),
    ("data.size", [[256, 128], (256, 128), [256.0, 128]]),
    ("model.client.micro_batch", [None, 32, 32.0]),
    ("model.client.head_lr", [0.05]),
    ("model.clients", [
        None, {}, {"town0": {}}, {"town0": {"batch_size": 32, "head_lr": None}},
        {"town0": {"optimizer": part("torch.optim.SGD", lr=0.005, momentum=0.9, weight_decay=5e-4, nesterov=True)}},
    ]),
    ("data.augmentation.crop", [None, [256, 128], (256, 128)]),
    ("model.client.schedule.milestones", [[40, 70], [70, 40]]),
    ("model.private", [None, []]),
    ("model.timing", [None, "Synchronous", part("fedsim.federation.components.timing.Synchronous")]),
    ("model.method", ["fedsim.methods.FedPav", "FedPav", part("fedsim.methods.fedpav.FedPav"),
                      part("fedsim.of.later.FedPav", weighting="size", distillation=None)]),
    ("model.client.optimizer", [part("torch.optim.SGD", **SGD), part("torch.optim.sgd.SGD", **SGD, dampening=0.0)]),
    ("model.evaluation.junk_pids", [[-1, 0], [-1.0, 0], (0, -1)]),
]  # fmt: skip


@pytest.mark.parametrize(("option", "values"), EQUAL, ids=[option for option, _ in EQUAL])
def test_equal_values_are_equal_however_they_are_spelled(option, values):
    configs = [with_value(option, value) for value in values]
    for config in configs:
        assert differing(configs[0], config) == differing(config, configs[0]) == []
        assert fingerprint_of(config) == fingerprint_of(configs[0])
        assert changes_between(configs[0], config, 1) == []


OTHER = [
    ("trainer.callbacks", [part("mine.ModelCheckpoint")]),
    ("trainer.callbacks", part("mine.callbacks.RichProgressBar")),
    ("trainer.callbacks", ["mine.Halve"]),
    ("trainer.callbacks", [part(f"{LIGHTNING}.callbacks.ModelCheckpoint"), part("mine.Halve")]),
    ("trainer.callbacks", [part(f"{LIGHTNING}.callbacks.StochasticWeightAveraging")]),
    ("trainer.plugins", part(f"{LIGHTNING}.plugins.precision.MixedPrecision", precision="bf16-mixed")),
    ("trainer.strategy", part("mine.FederatedStrategy")),
    ("trainer.logger", [part("mine.CSVLogger")]),
    ("trainer.logger", [part(f"{LIGHTNING}.loggers.CSVLogger"), part("mine.Logger")]),
    ("trainer.profiler", part("mine.SimpleProfiler")),
    ("trainer.accelerator", part("mine.CPUAccelerator")),
    ("trainer.sync_batchnorm", 1),
    ("trainer.an_option_of_later", 1),
    ("model.an_option_of_later", None),
    ("model.method", part("mine.FedPav", weighting="size")),
    ("model.method", "notfedsim.methods.FedPav"),
    ("model.selection", "mine.AllClients"),
    ("model.client.optimizer", part("mine.SGD", **SGD)),
    ("model.client.batch_size", "32"),
    ("model.client.batch_size", True),
    ("model.objective.cross_entropy", True),
    ("model.head.bias", 1),
    ("model.backbone.weights", None),
    ("model.backbone.weights", "IMAGENET1K_V2"),
    ("model.backbone.weights", "weights/mine.pth"),
    ("data.manifest", "mine.csv"),
    ("data.dry_run", True),
    ("data.source", part("mine.Market1501", root="data")),
]


@pytest.mark.parametrize(("option", "value"), OTHER, ids=[f"{option} {value}"[:60] for option, value in OTHER])
def test_what_may_change_results_is_a_difference(option, value):
    row, config = row_of(), with_value(option, value)
    assert differing(row, config, ["results"])[0] == option
    assert fingerprint_of(row) != fingerprint_of(config)


@pytest.mark.parametrize(
    "option", ["trainer.limit_val_batches", "trainer.limit_test_batches", "model.unknown", "trainer.x"]
)
def test_one_is_not_1_0_where_both_may_be_valid(option):
    assert differing(with_value(option, 1), with_value(option, 1.0)) == [option]
    assert differing(with_value(option, [1]), with_value(option, [1.0])) == [option]


RING = part("torch.optim.SGD", lr=0.1)


@pytest.mark.parametrize(
    ("common", "own", "names"),
    [
        ({"batch_size": 16}, {"batch_size": 32}, ["batch_size"]),
        ({"batch_size": 1}, {"batch_size": True}, ["batch_size"]),
        ({"optimizer": RING}, {"optimizer": RING}, []),
        ({"optimizer": RING}, {"optimizer": part("torch.optim.SGD", lr=0.2)}, ["optimizer"]),
        ({"optimizer": part("mine.Opt", a=1)}, {"optimizer": part("mine.Opt", a=1)}, []),
        ({"optimizer": part("mine.Opt", a=1, b=2)}, {"optimizer": part("mine.Opt", a=1)}, ["optimizer"]),
        ({"cluster": {"eps": 0.4}}, {"cluster": {"eps": 0.4}}, []),
        ({"cluster": {"eps": 0.4}}, {"cluster": {}}, []),
        ({"cluster": {"eps": 0.4}}, {"cluster": {"eps": 0.5}}, ["cluster.eps"]),
        ({}, {"cluster": {}}, ["cluster"]),
    ],
)
def test_a_client_that_repeats_a_common_value_makes_no_difference(common, own, names):
    row = with_value("model.client", common)
    config = with_value("model.clients", {"town0": own}, row)
    assert differing(row, config) == [f"model.clients.town0.{name}" for name in names]
    assert (fingerprint_of(row) == fingerprint_of(config)) is not bool(names)


def test_a_client_that_repeats_the_common_hardware_makes_no_difference():
    rates = {"up_mbit": 8, "down_mbit": 8, "images_per_second": 9}
    row = with_value("model.hardware", rates)
    same, other = (with_value("model.hardware", rates | {"clients": {"town0": {"up_mbit": n}}}) for n in (8, 9))
    assert differing(row, same) == []
    assert [d.option for d in compare(flat(row), flat(other))] == ["model.hardware.clients.town0.up_mbit"]


def test_null_stands_for_another_setting_only_while_no_client_has_its_own():
    row = row_of()
    assert differing(row, with_value("model.client.micro_batch", 32, row)) == []
    alone = with_value("model.clients", {"town0": {"batch_size": 64}}, row)
    assert differing(alone, with_value("model.client.micro_batch", 32, alone)) == ["model.client.micro_batch"]
    assert differing(row, alone) == ["model.clients.town0.batch_size"]


@pytest.mark.parametrize(
    ("option", "values", "is_path"),
    [
        ("data.generated.root", ["generators", "/mnt/generators"], True),
        ("data.manifest", ["fed", "other/fed"], True),
    ],
)
def test_a_path_is_known_by_its_setting(option, values, is_path):
    first, second = (flat(nested(option, value)) for value in values)
    assert [names_file(entry) for entry in (first[option], second[option])] == [is_path] * 2
    assert (fingerprint_from(first) == fingerprint_from(second)) is is_path


@pytest.mark.parametrize(
    ("backbone", "values", "is_path"),
    [
        ("ResNet", ["r50.pth", "b/R50.PTH"], True),
        ("ResNet", ["IMAGENET1K_V1", "IMAGENET1K_V2"], False),
        ("TimmBackbone", ["augreg.in21k", "augreg.in1k"], False),
    ],
)
def test_weights_are_a_path_or_a_name_as_their_backbone_reads_them(backbone, values, is_path):
    entries = [flat({"model": {"backbone": part(f"fedsim.models.{backbone}", weights=v)}}) for v in values]
    assert [names_file(of_one["model.backbone.weights"]) for of_one in entries] == [is_path] * 2


def test_true_is_not_one():
    one, true = ({"model": {"client": {"batch_size": value}}} for value in (1, True))
    assert differing(one, true) == ["model.client.batch_size"]
    assert differing({"trainer": {"x": [1, 0]}}, {"trainer": {"x": [True, False]}}) == ["trainer.x"]


SETS = [part("fedsim.data.datasets.GRID", root="x", seed=seed) for seed in (1, 2)]
SETS += [part("fedsim.data.datasets.VIPeR", root="x"), part("mine.Set", a=1)]


def test_a_list_of_classes_is_another_one_with_one_more_or_one_changed():
    first = {"data": {"source": SETS}}
    twice = {"data": {"source": [*SETS, SETS[0]]}}
    assert differing(first, twice)[0] == "data.source"
    changed = {"data": {"source": [part("fedsim.data.datasets.GRID", root="x", seed=3), *SETS[1:]]}}
    assert differing(first, changed) == ["data.source.GRID.seed"]


def test_a_data_set_has_one_name_whether_its_folder_or_itself_is_named():
    def left_out(source, *names):
        return {"data": {"source": {"class_path": f"fedsim.data.{source}"}, "unseen": [*names], "public": names[0]}}

    by_folder, by_name = (flat(left_out("FedReIDBench", name, "viper")) for name in ("Market", "market1501"))
    assert by_folder == by_name
    assert by_name["data.unseen"].value == ["market1501", "viper"]
    assert by_name["data.public"].value == "market1501"
    assert flat(left_out("MarketFolders", "Market"))["data.unseen"].value == ["Market"]


def test_the_order_of_attackers_has_no_meaning():
    first, second, other = (
        {"model": {"attack": part("fedsim.federation.components.attacks.SignFlip", attackers=names)}}
        for names in (["town0", "town1"], ["town1", "town0"], ["town1", "town2"])
    )
    assert differing(first, second) == []
    assert differing(first, other) == ["model.attack.attackers"]


LOGGERS = [part(f"{LIGHTNING}.loggers.CSVLogger", save_dir=folder) for folder in "ab"] + [part("mine.Logger", a=1)]
TOWERS = [part("fedsim.models.SmallCNN", width=width) for width in (4, 8)] + [part("mine.Net", a=1)]
HOOKS = [part("mine.Halve", every=every) for every in (1, 2)] + [part("mine.Other")]


@pytest.mark.parametrize(
    ("option", "values", "has_order"),
    [
        ("data.source", SETS, True),
        ("model.adaptive_backbones.ladder", TOWERS, True),
        ("trainer.callbacks", HOOKS, True),
        ("trainer.logger", LOGGERS, False),
        ("data.unseen", ["town0", "town1", "town2"], False),
        ("model.private", ["head.*", "scale"], False),
        ("model.client.schedule.milestones", [40, 70, 90], False),
        ("trainer.plugins", [part("mine.One", a=1), part("mine.Other", a=2)], False),
    ],
)
def test_an_order_is_compared_where_it_has_a_meaning(option, values, has_order):
    config_of = partial(nested, option)
    rng, first = random.Random(0), config_of(values)
    orders = [order for order in (rng.sample(values, len(values)) for _ in range(20)) if order != values]
    for order in orders:
        assert bool(differing(first, config_of(order), ["results"])) is has_order
        assert (fingerprint_of(first) != fingerprint_of(config_of(order))) is has_order
    assert len(orders) > 5
    watched = config_of([*values, part(f"{LIGHTNING}.callbacks.ModelSummary")])
    assert option != "trainer.callbacks" or differing(first, watched) == []


# -- against plain code ------------------------------------------------------------------------------------------------


def plain_leaves(content, place=()):
    """Every plain value of a nested configuration by its place, with classes by their last names."""
    if isinstance(content, dict) and "class_path" in content:
        yield place, content["class_path"].rpartition(".")[2]
        content = content.get("init_args") or {}
    if isinstance(content, dict):
        for name, inner in content.items():
            yield from plain_leaves(inner, (*place, name))
    elif not (isinstance(content, list) and content and isinstance(content[0], dict)):
        yield place, content


@pytest.mark.parametrize(("key", "name"), random.Random(0).sample(ROWS, 25))
def test_all_values_of_a_row_are_there(key, name):
    row = row_of(key, name)
    entries = flat(row)
    for place, value in plain_leaves(row):
        option = ".".join(place)
        facts = entries[option].setting.facts if option in entries else None
        if facts is None:
            assert value == {} or value is None or option.startswith("data.source"), option
        elif value is None:
            assert entries[option].is_null or entries[option].value == facts.null, option
        elif option != "model.clients" and not option.startswith("data.source"):
            last = str(value).rpartition(".")[2]
            assert entries[option].value == value or str(entries[option].value).rpartition(".")[2] == last, option
    assert missing_settings(entries) == []


def plain_value(rng):
    return rng.choice(
        [None, 0, 1, 1.0, True, False, "x", "1", [], [1], [1.0], [True], ["x"], {"a": 1}, {"a": {"b": 2}}]
    )


def plainly_equal(one, other):
    """Whether two values are equal, and of one type; tuples are lists."""

    def spelled(value):
        if isinstance(value, bool):
            return f"bool {value}"
        if isinstance(value, list):
            return [spelled(inner) for inner in value]
        if isinstance(value, dict):
            return {name: spelled(inner) for name, inner in value.items()}
        return value

    return json.dumps(spelled(one)) == json.dumps(spelled(other))


def test_options_that_nobody_knows_are_compared_as_they_are():
    rng = random.Random(0)
    for _ in range(300):
        one, other = plain_value(rng), plain_value(rng)
        found = differing({"model": {"unknown": one}}, {"model": {"unknown": other}}, ["results"])
        assert bool(found) is not plainly_equal(one, other), (one, other)


@pytest.mark.parametrize("seed", range(30))
def test_a_comparison_is_the_same_from_both_sides_and_equals_the_fingerprints(seed):
    """Two rows have equal fingerprints exactly if no difference between them is of the experiment."""
    rng = random.Random(seed)
    one, other = (flat(row_of(*rng.choice(ROWS))) for _ in range(2))
    there, back = list(compare(one, other)), list(compare(other, one))
    assert {d.option for d in there} == {d.option for d in back}
    assert {(d.option, str(d.old), d.effect) for d in there} == {(d.option, str(d.new), d.effect) for d in back}
    of_experiment = [d for d in there if is_of_experiment(d)]
    assert bool(of_experiment) is (fingerprint_from(one) != fingerprint_from(other))


DAMAGED = [
    {"class_path": None}, {"class_path": 3, "init_args": 4}, [[]], {"class_path": "a.B", "init_args": [1]},
    [None, {"class_path": "c"}], float("nan"),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_configuration_is_read_without_a_crash(seed):
    """Any value may stand anywhere, and anything may lack."""
    rng = random.Random(seed)
    config = row_of(*rng.choice(ROWS))
    for _ in range(8):
        section = config
        while True:
            name = rng.choice([*section])
            inner = section[name]
            if not isinstance(inner, dict) or not inner or rng.random() < 0.2:
                break
            section = inner
        if rng.random() < 0.3:
            del section[name]
            if not section:
                break
        else:
            section[name] = rng.choice(
                [
                    plain_value(rng),
                    {"class_path": None},
                    {"class_path": 3, "init_args": 4},
                    [[]],
                    {"class_path": "a.B", "init_args": [1]},
                    [None, {"class_path": "c"}],
                    float("nan"),
                ]
            )
    entries = flat(config)
    assert differing(config, copy.deepcopy(config)) == []
    assert json.dumps({option: text_of(entry.value) for option, entry in entries.items()})
    list(compare(entries, flat(row_of())))
    missing_settings(entries)


# -- effects -----------------------------------------------------------------------------------------------------------

CONDITIONS = [  # a setting, a value of another one beside which it has no effect, and one beside which it has
    ("model.client.schedule.step", "model.client.schedule.kind", "constant", "step", 7),
    ("data.alpha", "data.partition", "by_dataset", "dirichlet", 0.1),
    ("data.parts", "data.partition", "by_camera", "iid", 9),
    ("model.objective.margin", "model.objective.triplet", 0.0, 1.0, 0.9),
    ("model.availability.straggler_work", "model.availability.straggle", 0.0, 0.5, 0.1),
    ("model.client.num_instances", "model.client.sampler", "shuffle", "identity", 9),
    ("data.val_fraction", "data.val", "none", "identities", 0.7),
    ("model.client.num_instances", "model.clients", None, {"town0": {"sampler": "identity"}}, 9),
    ("model.client.num_instances", "model.clients", None, {"town0": {"cluster": {"eps": 0.5}}}, 9),
    ("model.bn_stats", "model.method", part("fedsim.methods.FedProto"), part("fedsim.methods.FedPav"), "pooled"),
    ("model.bn_stats", "model.method", "fedsim.methods.GPerXAN", part("fedsim.methods.SKA"), "pooled"),
    ("model.bn_stats", "data.partition", "union", "by_camera", "mean"),
    ("model.server_optimizer", "model.method", "fedsim.methods.FedProto", "mine.Method", "fedsim.FedAdam"),
    ("model.aggregation", "model.method", "fedsim.methods.FedProto", "fedsim.methods.FedPav", "Median"),
    ("model.privacy", "model.method", "fedsim.methods.Local", "fedsim.methods.FedPav", part("WhiteNoise", beta=0.1)),
    (
        "trainer.min_epochs",
        "trainer.callbacks",
        [],
        [part(f"{LIGHTNING}.callbacks.EarlyStopping", monitor="val/mAP")],
        3,
    ),
    ("model.objective.triplet", "model.client.cluster", {"eps": 0.5}, None, 1.0),
]


@pytest.mark.parametrize(("option", "other", "idle", "active", "value"), CONDITIONS)
def test_a_setting_without_effect_beside_the_others_is_no_difference_that_counts(option, other, idle, active, value):
    row = row_of()
    without, alone = with_value(other, idle, row), with_value(other, active, row)
    assert differing(without, with_value(option, value, without), ["results"]) == []
    assert differing(without, with_value(option, value, without)) == [option]
    assert fingerprint_of(without) == fingerprint_of(with_value(option, value, without))
    assert differing(alone, with_value(option, value, alone), ["results"]) == [option]
    assert fingerprint_of(alone) != fingerprint_of(with_value(option, value, alone))
    # in one of two configurations it has an effect
    both = differing(without, with_value(option, value, alone), ["results"])
    assert {o for o in both if not o.startswith(f"{other}.")} >= {option}
    assert any(o.startswith(other) for o in both)


def test_a_client_of_its_own_makes_settings_of_all_count():
    """The others' batches may have another size."""
    row = with_value("model.client.batch_size", None)
    alone = with_value("model.clients", {"town0": {"batch_size": 8}}, row)
    for option, value in (("model.client.drop_partial", False), ("model.client.accumulate", 2)):
        assert differing(row, with_value(option, value, row), ["results"]) == []
        assert differing(alone, with_value(option, value, alone), ["results"]) == [option]


LINKS = {"up_mbit": 10, "images_per_second": 30}


@pytest.mark.parametrize(
    ("beside", "effect"),
    [
        ({}, "seconds"),
        ({"selection": "RandomFraction"}, "seconds"),
        ({"selection": "mine.Fast"}, "results"),
        ({"method": "mine.Method"}, "results"),
        ({"timing": "mine.Timing"}, "results"),
        ({"timing": part("Deadline", first=2)}, "results"),
        ({"method": part("WeightedPav", weighting="performance")}, "results"),
    ],
)
def test_simulated_hardware_makes_another_experiment(beside, effect):
    none = {"model": {"method": "FedPav"} | beside}
    slow, fast = ({"model": none["model"] | {"hardware": LINKS | {"images_per_second": n}}} for n in (30, 3000))
    assert [d.effect for d in compare(flat(slow), flat(fast))] == [effect]
    assert {d.effect for d in compare(flat(none), flat(slow))} == {effect}
    assert len({fingerprint_of(config) for config in (none, slow, fast)}) == 3
    [change] = changes_between(slow, fast, 8)
    assert change.counts
    assert list(idle_settings(flat(slow))) == []


def test_a_part_without_effect_has_none_in_any_field():
    row = with_value("model.module", part("mine.Module"))
    config = with_value("model.neck.dim", 99, row)
    assert differing(row, config, ["results"]) == []
    assert differing(row, config) == ["model.neck.dim"]


# -- a new setting -----------------------------------------------------------------------------------------------------


@pytest.fixture
def with_new_setting(monkeypatch):
    """A later version, whose models have a setting of which it says nothing but its default."""
    content = copy.deepcopy(dict(table._content()))
    settings = content["classes"][content["sections"]["model"]]["arguments"]
    settings["newest"] = {"default": 3}
    monkeypatch.setattr(table, "_content", lambda: content)
    table.class_at.cache_clear()
    yield
    table.class_at.cache_clear()


@pytest.mark.usefixtures("with_new_setting")
def test_a_setting_that_says_nothing_is_compared_and_told_apart():
    old, at_default, other = row_of(), with_value("model.newest", 3), with_value("model.newest", 4)
    assert differing(old, at_default) == []
    assert fingerprint_of(old) == fingerprint_of(at_default) != fingerprint_of(other)
    assert differing(old, other, ["results"]) == ["model.newest"]
    assert missing_settings(flat(old)) == ["model.newest"]
    [change] = changes_between(at_default, other, 8)
    assert str(change) == "changed since round 8: model.newest 3 -> 4"
    assert change.counts


def test_missing_settings_are_named_once_by_their_section():
    row = row_of()
    assert missing_settings(flat(row)) == []
    del row["model"]["evaluation"], row["model"]["client"]["batch_size"], row["model"]["threads"], row["data"]["cache"]
    assert missing_settings(flat(row)) == ["model.client.batch_size", "model.evaluation"]
    del row["data"]
    assert "data.source" in missing_settings(flat(row)) or "data" in missing_settings(flat(row))


# -- a default that a function makes -----------------------------------------------------------------------------------

USUAL = {"lr": 0.005, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
SPELLED = [
    None,
    "fedsim.training.settings._default_optimizer",
    {"class_path": "torch.optim.SGD", "init_args": USUAL},
    {"class_path": "torch.optim.sgd.SGD", "init_args": USUAL | {"dampening": 0}},
]


def with_optimizer(optimizer, **model):
    return {"model": model | {"client": {"optimizer": optimizer} if optimizer else {}}}


def test_a_default_is_one_however_it_is_spelled():
    assert len({fingerprint_of(with_optimizer(optimizer)) for optimizer in SPELLED}) == 1
    rates = with_optimizer({"class_path": "torch.optim.SGD", "init_args": USUAL | {"lr": 0.1}})
    assert [d.option for d in compare(flat(with_optimizer(SPELLED[1])), flat(rates))] == ["model.client.optimizer.lr"]


BACKBONE, SELECTION = "fedsim.models", "fedsim.federation.components.selection"
LINES = [  # a setting and a value, settings beside which it has no effect, and others beside which it has one
    ("model.client.drop_partial", True, {"sampler": "people"}, {"sampler": "shuffle"}),
    ("model.client.drop_partial", True, {"cluster": {}}, {"bottom_up": {}}),
    ("model.client.drop_partial", True, {"batch_size": None}, {"batch_size": 8}),
    ("model.client.optimizer_state", "keep", {"optimizer": part("torch.optim.SGD", lr=0.1)},
     {"optimizer": part("torch.optim.SGD", lr=0.1, momentum=0.9)}),
    ("model.client.optimizer_state", "keep", {"optimizer": part("torch.optim.SGD", lr=0.1)},
     {"optimizer": part("torch.optim.Adam", lr=0.1)}),
    ("model.client.local_epochs", 2, {"model.method": "FedSGD"},
     {"model.method": "FedSGD", "model.availability.straggle": 0.5}),
    ("model.client.local_epochs", 2, {"model.method": "FedSGD"},
     {"model.method": "FedSGD", "model.module": "mine.Net"}),
    ("model.client.accumulate", 2, {"batch_size": None}, {"batch_size": None, "model.module": "mine.Net"}),
    ("model.client.sampler", "people", {"bottom_up": {}}, {"bottom_up": {}, "drop_partial": True}),
    ("trainer.min_epochs", 3, {}, {"max_time": "00:00:01:00"}),
    ("model.clients.town0.drop_partial", True, {"model.client": {"sampler": "people"}}, {}),
    ("model.clients.town0.drop_partial", True, {"sampler": "identity"}, {}),
    ("model.clients.town0.accumulate", 2, {"model.client": {"batch_size": None}}, {"batch_size": 8}),
    ("model.method.weighting", "uniform", {"data.partition": "union"}, {"data.partition": "by_camera"}),
    ("model.method.attn_local", True, {"model.backbone": "fedsim.models.ResNet"},
     {"model.backbone": part(f"{BACKBONE}.ResNet", norm="se")}),
    ("model.method.attn_local", True, {"model.backbone": f"{BACKBONE}.SmallCNN"}, {"model.backbone": "mine.Net"}),
    ("model.method.attn_local", True, {"model.backbone": f"{BACKBONE}.SmallCNN"},
     {"model.backbone": part(f"{BACKBONE}.SmallCNN", style={"kind": "snr"})}),
    ("model.selection.among", "architecture", {"reward": "argmin"}, {"reward": "soft"}),
    ("model.selection.among", "architecture", {},
     {"model.clients": {"town0": {"backbone": f"{BACKBONE}.SmallCNN"}}}),
]  # fmt: skip
CLASSES = {"weighting": "fedsim.methods.FedPav", "attn_local": "fedsim.methods.SKA", "among": f"{SELECTION}.UCB"}


@pytest.mark.parametrize(("option", "value", "idle", "active"), LINES)
def test_a_setting_without_effect_is_told_at_the_start(option, value, idle, active):
    section, _, name = option.rpartition(".")

    def line_beside(others):
        content = {name: value} | {n: v for n, v in others.items() if "." not in n}
        config = nested(section, part(CLASSES[name], **content) if name in CLASSES else content)
        for other, inner in others.items():
            config = with_value(other, inner, config) if "." in other else config
        return line_of_idle(config)

    assert f" {option} " in line_beside(idle)
    assert f" {option} " not in line_beside(active)


def test_weights_of_a_single_client_are_told_for_all_methods():
    for cls in (c for c in table.classes_below("fedsim.methods.base.Method") if "weighting" in c.arguments):
        value = {"uniform": "size"}.get(cls.arguments["weighting"].default, "uniform")
        config = {"model": {"method": part(cls.path, weighting=value)}, "data": {"partition": "union"}}
        if "data.partition" in cls.arguments["weighting"].facts.needs:
            assert " model.method.weighting " in line_of_idle(config), cls.path


def test_an_own_loss_beside_an_own_module_is_told():
    loss = {"method": "FedPav", "module": "mine.Module", "objective": {"metric": part("mine.Loss", a=1)}}
    assert list(idle_settings(flat({"model": loss}))) == ["model.objective.metric"]


@pytest.mark.parametrize("optimizer", SPELLED)
def test_a_default_without_effect_is_not_told(optimizer):
    own = {"module": {"class_path": "mine.Module"}}
    assert list(idle_settings(flat(with_optimizer(optimizer, **own)))) == []
    for other in ({"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}, "torch.optim.Adam"):
        assert list(idle_settings(flat(with_optimizer(other, **own)))) == ["model.client.optimizer"]
