"""What a run sends and how long that takes: counted from models, against plain loops, on any number of ranks."""

import csv
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning import Callback

from failing import finish, fit, resume
from fedsim.cli.describe import describe_federation
from fedsim.core.errors import ConfigError
from fedsim.data import SyntheticReID
from fedsim.evaluation.summary import MAX_NAMES
from fedsim.federation.components.hardware import ClientHardware, Hardware
from fedsim.federation.components.ledger import Accounting, Ledger, Traffic
from fedsim.federation.components.listener import RoundRecord
from fedsim.federation.components.selection import Availability, RandomFraction
from fedsim.functional.encodings import bitmap_bytes, dense_bytes, index_bytes, sparse_bytes
from fedsim.methods import FedAvg, FedDIP, FedPav, Local, LotteryFL, Scaffold
from fedsim.methods.base import InitialState, Method, Payload
from fedsim.models import Neck, ResNet
from fedsim.models.groups import BACKBONE, Group
from fedsim.report import Run, RunGroup, traffic
from fedsim.training.messages import Report, Upload
from fedsim.training.settings import ClientOverride
from small import fit as fit_here
from small import make_data, make_model

# -- payloads of the papers' models ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sharing(Method):
    """Shares the groups that it is told to."""

    groups: frozenset[Group]

    @property
    def shared_groups(self):
        return self.groups


def nine_clients(method, bn_stats="mean"):
    """The ledger of nine clients with the network of the papers' settings: ResNet-50, neck of 512."""
    model = make_model(method, backbone=ResNet(depth=50), neck=Neck(kind="linear", dim=512), bn_stats=bn_stats)
    model.assemble(make_data(SyntheticReID(clients=9, unseen=0, scale=0.3)), 0, 1, torch.device("cpu"))
    return model.parts.ledger


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (FedPav(), 98_449_152),  # backbone and neck
        (FedAvg(share_head=False), 98_449_152),
        (Sharing(groups=BACKBONE), 94_244_608),  # FedAvg+D of papers 000 and 001
        (Sharing(groups=frozenset({Group.CONV})), 93_819_648),  # FedBN
        (Local(), 0),
    ],
    ids=["FedPav", "FedAvg, private heads", "backbone", "convolutions", "Local"],
)
def test_payloads_are_those_of_the_papers_models(method, expected):
    ledger = nine_clients(method)
    assert set(ledger.expected(0, ["town0", "town8"]).values()) == {Traffic(expected, expected)}


def test_control_variates_are_as_long_as_the_parameters_and_go_both_ways():
    [traffic_] = nine_clients(Scaffold()).expected(0, ["town0"]).values()
    parameters = 98_449_152 - 4 * 2 * (26_560 + 512)  # all but running means and variances, backbone and neck
    assert traffic_ == Traffic(98_449_152, 98_449_152, parameters, parameters)


def test_statistics_that_stay_local_are_not_sent():
    [backbone] = nine_clients(FedPav(), bn_stats="local").expected(0, ["town0"]).values()
    assert (
        backbone.down == backbone.up == 98_449_152 - 4 * (53_120 + 1_024)
    )  # running means and variances, backbone and neck


def test_paper_003_s_300_rounds_of_9_clients_come_to_531_6_gb():
    ledger, names = nine_clients(FedPav()), [f"town{i}" for i in range(9)]
    for round_ in range(300):
        ledger.observe(RoundRecord(round_, 0, names, {name: Report(1, {}, images=1.0) for name in names}))
    assert ledger.totals == {
        "down": 300 * 9 * 98_449_152, "up": 300 * 9 * 98_449_152, "extra": 0, "formula": 2 * 98_449_152 * 9 * 300,
    }  # fmt: skip
    metrics = ledger.metrics()
    assert metrics["comm/total_bytes"] == metrics["comm/formula_bytes"] == 531_625_420_800
    assert f"{metrics['comm/total_bytes'] / 1e9:.1f} GB" == "531.6 GB"


# -- encodings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "density"), [(1, 1.0), (7, 0.5), (64, 0.3), (1000, 0.0), (1025, 0.1), (4099, 0.97)])
def test_encodings_are_as_long_as_what_loops_write(size, density):
    rng = np.random.default_rng(size)
    values = np.where(rng.random(size) < density, rng.normal(size=size), 0).astype(np.float32)
    positions = [i for i in range(size) if values[i] != 0]
    kept = b"".join(values[i].tobytes() for i in positions)
    flags = "".join("1" if value else "0" for value in values)
    assert dense_bytes(size) == len(values.tobytes())
    assert bitmap_bytes(size, len(positions)) == len(kept) + len(in_bytes(flags))
    assert index_bytes(size, len(positions)) == len(kept) + len(np.array(positions, dtype=np.int32).tobytes())


def in_bytes(bits):
    return bytes(int(bits[i : i + 8].ljust(8, "0"), 2) for i in range(0, len(bits), 8))


def test_where_one_encoding_becomes_shorter_than_another():
    n = 3200
    assert bitmap_bytes(n, n - n // 32) == dense_bytes(n)
    assert bitmap_bytes(n, n // 32) == index_bytes(n, n // 32)
    assert bitmap_bytes(n, n - n // 32 - 1) < dense_bytes(n)
    assert bitmap_bytes(n, n // 32 + 1) < index_bytes(n, n // 32 + 1)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("nonzero", [0, 5, 100, 1600, 3150, 3200])
def test_the_shortest_encoding_is_the_shortest(nonzero, known):
    lengths = {
        encoding: sparse_bytes(3200, nonzero, encoding, known) for encoding in ("dense", "bitmap", "index", "min")
    }
    assert lengths["dense"] == 4 * 3200
    if known:
        assert lengths["bitmap"] == lengths["index"] == lengths["min"] == 4 * nonzero
    else:
        assert lengths["bitmap"] == 400 + 4 * nonzero
        assert lengths["index"] == 8 * nonzero
        assert lengths["min"] == min(4 * 3200, 400 + 4 * nonzero, 8 * nonzero)


@pytest.mark.parametrize("encode", [bitmap_bytes, index_bytes])
def test_more_than_all_elements_is_a_mistake(encode):
    with pytest.raises(ValueError, match="5 is not between 0 and num_elements"):
        encode(4, 5)


# -- pruned models, against plain loops --------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["dense", "bitmap", "index", "min"])
@pytest.mark.parametrize("when", ["changed", "every_upload"])
def test_bytes_of_clients_that_prune_are_those_of_a_loop(encoding, when):
    masks = {}

    class Looking(LotteryFL):
        def upload(self, client):
            upload = super().upload(client)
            masks[client.round, client.client_name] = upload.mask.clone()
            return upload

    rows, method = Rows(), Looking(start_accuracy=0.0, step=0.4, target=0.6)
    options = {"selection": RandomFraction(0.5), "availability": Availability(drop=0.3)}
    accounting = Accounting(encoding=encoding, masks=when, first_download=False)
    model = fit_here(make_model(method, accounting=accounting, **options), rounds=6, callbacks=[rows])
    flat = model.parts.models["smallcnn"].flat
    n = sum(entry.numel for entry in flat.shared_parameters)
    rest = sum(entry.numel for entry in flat.shared_entries) - n
    last, news, downloads = {}, [], []
    unpruned = {"dense": 4 * n, "bitmap": 4 * n + -(-n // 8), "index": 8 * n}  # with a mask of which nothing is pruned
    unpruned["min"] = min(unpruned.values())
    for t, row in enumerate(rows.rows):
        chosen = model.settings.selection.select(t, list(NAMES), 0)
        for name in NAMES:
            known = last.get(name)
            left = n if known is None else n - int((~known).sum())
            down = 4 * rest + 4 * (n if encoding == "dense" else left)
            mask = masks.get((t, name))
            up = 0
            if mask is not None:
                left = n - int((~mask).sum())
                is_new = bool((~mask).any()) if known is None else not torch.equal(mask, known)
                news.append(is_new)
                sends_mask = is_new or when == "every_upload"
                lengths = {"dense": 4 * n, "bitmap": 4 * left + -(-n // 8), "index": 8 * left}
                lengths["min"] = min(lengths.values())
                up = 4 * rest + (lengths[encoding] if sends_mask or encoding == "dense" else 4 * left)
                last[name] = mask
            assert row[f"comm/{name}/up_bytes"] == up
            assert row[f"comm/{name}/down_bytes"] == (down if name in chosen and t > 0 else 0)
            most = model.parts.ledger.at_most(t, [name])[name]  # what describe predicts
            assert up <= most.up == 4 * rest + unpruned[encoding]
            assert row[f"comm/{name}/down_bytes"] <= most.down
            downloads.append(name in chosen and mask is None)
            if name in last:
                assert row[f"comm/{name}/density"] == (n - int((~last[name]).sum())) / n
    assert len(set(news)) == 2  # masks that change, and masks that do not
    assert any(downloads)  # somebody did not answer


def test_bytes_of_a_server_that_prunes_are_those_of_a_loop():
    rows, method = Rows(), FedDIP(rounds=4, target=0.8, reconfig_interval=2, initial=0.2)
    model = fit_here(make_model(method), rounds=4, callbacks=[rows])
    flat = model.parts.models["smallcnn"].flat
    n = sum(entry.numel for entry in flat.shared_parameters)
    rest = sum(entry.numel for entry in flat.shared_entries) - n
    prunable = sum(flat.module.get_parameter(e.name).numel() for e in flat.shared_parameters if "conv" in e.name)
    for t, row in enumerate(rows.rows):
        reconfigured = (t - 1) // 2 * 2  # the last round with a new mask before this one
        s = 0.2 if t == 0 else 0.8 + (0.2 - 0.8) * (1 - reconfigured / 4) ** 3
        pruned = int(s * prunable + 1e-9)
        assert row["comm/town0/up_bytes"] == 4 * (rest + n)
        assert row["comm/town0/down_bytes"] == 4 * rest + 4 * (n - pruned) + -(-n // 8)
        most = model.parts.ledger.at_most(t, ["town0"])["town0"]
        assert (most.down, most.up) == (4 * (rest + n) + -(-n // 8), 4 * (rest + n))


# -- rounds, against plain loops ---------------------------------------------------------------------------------------

HARDWARE = Hardware(
    down_mbit=8.0, up_mbit=2.0, latency_ms=30.0, images_per_second=500.0,
    clients={"town1": ClientHardware(up_mbit=0.5), "town2": ClientHardware(images_per_second=25.0, latency_ms=0.0)},
)  # fmt: skip
NAMES = ("town0", "town1", "town2")


@dataclass(frozen=True, kw_only=True)
class Counting(FedPav):
    """Counts the images that it sees, and sends more than the model."""

    seen: tuple[dict[tuple[int, str], int], ...] = ({},)  # in a tuple: a method has settings only
    measures = {"one": "client", "two": "client"}  # noqa: RUF012 - a property of methods

    def loss(self, client, batch):
        key = (client.round, client.client_name)
        self.seen[0][key] = self.seen[0].get(key, 0) + len(batch.labels)
        return super().loss(client, batch)

    def initial_state(self, model):
        shapes = {"variates": (50, 5), "odd": (7,), "first": (11,)}
        return InitialState(server={name: torch.zeros(shape) for name, shape in shapes.items()})

    def payload(self, server, arch, round_):
        down = ("variates", "odd") if round_ % 2 else ("variates",)
        return Payload(down, known=("first",), up={"labels": (5, round_), "images": (server.num_public,)})

    def upload(self, client):
        assert client.received.extras.keys() == {"variates", "first"} | ({"odd"} if client.round % 2 else set())
        extras = {"labels": torch.zeros(5, client.round), "images": torch.zeros(num_public())}
        return Upload(super().upload(client).vector, extras, {"one": 1.0, "two": 2.0})


@cache
def num_public():
    """How many public images the federation below has."""
    return len(make_data(public="new0").federated.public.images)


class Rows(Callback):
    """What is logged about each round."""

    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.rows.append(dict(pl_module.round_metrics))


@pytest.fixture(scope="module")
def counted():
    """A method with extra payloads, drop-outs and stragglers: (model, images seen, logged rows)."""
    method, rows = Counting(seen=({},)), Rows()
    model = make_model(
        method, hardware=HARDWARE, availability=Availability(drop=0.3, straggle=0.5),
        clients={"town0": ClientOverride(local_epochs=3)},
    )  # fmt: skip
    fit_here(model, make_data(public="new0"), rounds=6, callbacks=[rows])
    answers = [{name for t, name in method.seen[0] if t == round_} for round_ in range(6)]
    assert {len(names) for names in answers} >= {2, 3}  # else nothing below would be about drop-outs
    return model, method.seen[0], rows.rows


def test_bytes_are_those_of_a_plain_loop(counted):
    model, seen, rows = counted
    state = model.parts.models["smallcnn"].network.state_dict()
    size = sum(4 * tensor.numel() for tensor in state.values() if tensor.is_floating_point())  # heads are elsewhere
    assert num_public()
    total = formula = 0
    for round_, row in enumerate(rows):
        down = up = extra = 0
        for name in NAMES:
            answered = (round_, name) in seen
            own_extra = 1000 + 28 * (round_ % 2) + (20 * round_ + 4 * num_public() + 4 + 4 if answered else 0)
            assert row[f"comm/{name}/down_bytes"] == size
            assert row[f"comm/{name}/up_bytes"] == (size if answered else 0)
            assert row[f"comm/{name}/extra_bytes"] == own_extra
            down, up, extra = down + size, up + (size if answered else 0), extra + own_extra
        total, formula = total + down + up + extra, formula + 2 * size * len(NAMES)
        assert (row["comm/down_bytes"], row["comm/up_bytes"], row["comm/extra_bytes"]) == (down, up, extra)
        assert (row["comm/total_bytes"], row["comm/formula_bytes"]) == (total, formula)


def test_simulated_seconds_are_those_of_a_plain_loop(counted):
    _, seen, rows = counted
    slowest = set()
    for round_, row in enumerate(rows):
        longest = 0.0
        for name in NAMES:
            answered = (round_, name) in seen
            seconds = 0.0 if name == "town2" else 0.030
            down = row[f"comm/{name}/down_bytes"] + row[f"comm/{name}/extra_bytes"]
            if answered:
                sent = 20 * round_ + 4 * num_public() + 8
                down -= sent
                seconds += (row[f"comm/{name}/up_bytes"] + sent) * 8 / (0.5e6 if name == "town1" else 2e6)
                seconds += seen[round_, name] / (25.0 if name == "town2" else 500.0)
            seconds += down * 8 / 8e6
            if seconds > longest:
                longest, last = seconds, name
        slowest.add(last)
        assert row["time/simulated_seconds"] == pytest.approx(longest, rel=1e-12)
    assert len(slowest) > 1  # not always the same client's time
    assert len({row["time/simulated_seconds"] for row in rows}) > 1


def test_stragglers_take_the_time_of_what_they_do():
    seconds = []
    for availability in (Availability(), Availability(straggle=1.0, straggler_work=0.5)):
        free = Hardware(down_mbit=float("inf"), up_mbit=float("inf"), images_per_second=1.0)
        model = fit_here(make_model(FedPav(), hardware=free, availability=availability), rounds=1)
        seconds.append(model.round_metrics["time/simulated_seconds"])
    whole, half = seconds
    assert whole == max(c.num_images for c in model.parts.federated.clients)  # one image a second, one epoch
    assert 0.4 * whole < half <= 0.5 * whole


def test_a_round_without_any_answer_costs_its_downloads():
    rows = Rows()
    fit_here(make_model(FedPav(), hardware=HARDWARE, availability=Availability(drop=1.0)), rounds=1, callbacks=[rows])
    [row] = rows.rows
    assert row["comm/up_bytes"] == 0
    assert row["comm/total_bytes"] == row["comm/down_bytes"] == row["comm/formula_bytes"] / 2 > 0
    assert row["time/simulated_seconds"] == pytest.approx(0.030 + row["comm/town0/down_bytes"] * 8 / 8e6)


def test_nothing_is_said_about_time_without_hardware_or_about_extras_without_any():
    row = fit_here(make_model(FedPav()), rounds=1).round_metrics
    assert "time/simulated_seconds" not in row
    assert not [name for name in row if "extra" in name]


def test_only_few_clients_are_logged_by_name():
    model = make_model(FedPav())
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    for number, named in ((MAX_NAMES, True), (MAX_NAMES + 1, False)):
        names = [f"town{i}" for i in range(number)]
        ledger = Ledger(model.settings.method, model.server, dict.fromkeys(names, "smallcnn"), None, Accounting())
        ledger.observe(RoundRecord(0, 0, names[:2], {"town0": Report(1, {}, images=1.0)}))
        assert ("comm/town0/up_bytes" in ledger.metrics()) is named
        assert ledger.metrics()["comm/down_bytes"] == 2 * ledger.metrics()["comm/up_bytes"]


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"down_mbit": 0.0}, "model.hardware.down_mbit: 0.0"),
        ({"images_per_second": -1.0}, "model.hardware.images_per_second: -1.0"),
        ({"latency_ms": -1.0}, "model.hardware.latency_ms: -1.0"),
        ({"up_mbit": float("nan")}, "model.hardware.up_mbit: nan"),
        ({"clients": {"town1": ClientHardware(up_mbit=0.0)}}, "model.hardware.clients.town1.up_mbit: 0.0"),
        ({"up_mbit": 1e-300}, "model.hardware.up_mbit: 1e-300 is not in [1e-6, 1e12]; use .inf for no time"),
        ({"images_per_second": 1e300}, "model.hardware.images_per_second: 1e+300 is not in"),
        ({"latency_ms": 1e300}, "model.hardware.latency_ms: 1e+300 is not in [0, 1e9]"),
    ],
)
def test_impossible_hardware_is_refused(options, field):
    with pytest.raises(ConfigError, match=re.escape(field)):
        Hardware(**{"down_mbit": 1.0, "up_mbit": 1.0, "images_per_second": 1.0} | options)


def test_hardware_of_unknown_clients_is_refused():
    hardware = Hardware(down_mbit=1.0, up_mbit=1.0, images_per_second=1.0, clients={"twon1": ClientHardware()})
    with pytest.raises(ConfigError, match=r"model\.hardware\.clients: there is no client twon1; choose from town0"):
        make_model(FedPav(), hardware=hardware).assemble(make_data(), 0, 1, torch.device("cpu"))


# -- ranks, resuming, clients that are left out ------------------------------------------------------------------------

OPTIONS = [
    "--model.hardware={down_mbit: 8, up_mbit: 2, images_per_second: 100, clients: {town2: {up_mbit: 0.1}}}",
    "--model.availability.straggle=0.4",
    "--model.method=failing.Raising", "--model.method.kind=nan", "--model.on_bad_update=skip_client",
]  # fmt: skip


def read_traffic(folder):
    """Return what is logged of each round, by round: a continued run has another file for its first rounds."""
    rows = {}
    for path in sorted(folder.glob("metrics*.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                rows[row["round"]] = {k: v for k, v in row.items() if "comm/" in k or "simulated" in k}
    return rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(fit(folder, *OPTIONS))
    return folder


@pytest.mark.dist
def test_a_run_killed_and_continued_on_two_ranks_counts_what_an_uninterrupted_one_does(whole, tmp_path):
    folder = tmp_path / "run"
    assert fit(folder, *OPTIONS, ranks=2, fail="mid-client@3/1").wait()[1]
    finish(resume(folder, ranks=2))
    expected = read_traffic(whole)
    assert sorted(expected) == ["1.0", "2.0", "3.0"]
    assert read_traffic(folder) == expected
    ours, theirs = (json.loads((path / "summary.json").read_text()) for path in (folder, whole))
    sums = [name for name in theirs if name.startswith(("bytes_", "simulated_"))]
    assert len(sums) == 5
    assert {name: ours[name] for name in sums} == {name: theirs[name] for name in sums}
    assert theirs["bytes_down"] + theirs["bytes_up"] == float(expected["3.0"]["comm/total_bytes"])


def test_a_client_that_is_left_out_has_downloaded_but_not_uploaded(whole):
    row = read_traffic(whole)["2.0"]
    size = float(row["comm/town0/up_bytes"])
    assert (float(row["comm/town1/down_bytes"]), float(row["comm/town1/up_bytes"])) == (size, 0)
    assert (float(row["comm/down_bytes"]), float(row["comm/up_bytes"])) == (3 * size, 2 * size)


def test_a_checkpoint_without_sums_is_told(caplog):
    model = make_model(FedPav())
    model.assemble(make_data(), 0, 1, torch.device("cpu"))
    model.parts.ledger.load_state_dict({})
    assert "comm/total_bytes restarts at 0" in caplog.text
    assert model.parts.ledger.total == 0


# -- what people see ---------------------------------------------------------------------------------------------------


def test_describe_predicts_what_a_run_without_drop_outs_logs():
    options = {"selection": RandomFraction(0.5), "hardware": HARDWARE}
    method, rows = Counting(seen=({},)), Rows()
    fit_here(make_model(method, **options), make_data(public="new0"), rounds=4, callbacks=[rows])
    text = describe_federation(make_model(method, **options), make_data(public="new0"), 1, 4)
    assert [line.split()[0] for line in text.splitlines() if line.endswith(" public")] == ["new0"]
    assert number(text, "bytes of 4 rounds, both ways, without drop-outs") == rows.rows[-1]["comm/total_bytes"]
    assert number(text, "of these, in addition to shared tensors") == sum(row["comm/extra_bytes"] for row in rows.rows)
    seconds = [row["time/simulated_seconds"] for row in rows.rows]
    assert number(text, "simulated seconds of 4 rounds, at most") == pytest.approx(sum(seconds), abs=0.051)
    for name in NAMES:
        line = next(line for line in text.splitlines() if re.match(rf"{name} .*,", line))
        both = float(line.split()[-1].replace(",", ""))
        columns = [key for key in rows.rows[-1] if key.startswith(f"comm/{name}/")]
        assert both == sum(row[key] for row in rows.rows for key in columns)


def number(text, label):
    return float(re.search(rf"{re.escape(label)} +([\d,.]+)", text)[1].replace(",", ""))


def test_the_line_about_traffic_names_each_group_of_runs():
    one = {"bytes_down": 300_000_000_000, "bytes_up": 200_000_000_000, "bytes_extra": 31_625_420_800}
    two = {"bytes_down": 60_000_000, "bytes_up": 18_800_000}  # a run without extras
    slow = two | {"bytes_up": 28_800_000, "simulated_seconds": 12.34}
    one, two, slow = (Run(Path(), summary) for summary in (one, two, slow))
    groups = [RunGroup("FedPav", (one,)), RunGroup("Local", (two, slow))]
    expected = "sent by server and clients: FedPav 531.6 GB, Local 0.0788 to 0.0888 GB in 12.3 simulated seconds"
    assert traffic(groups) == expected
