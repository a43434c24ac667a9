"""``fedsim describe``: the shared tensors, the clients' data and the cost of a run. Nothing is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from lightning import Trainer
from tabulate import tabulate

from fedsim.core.placement import Placement, by_device
from fedsim.data.datamodule import FederatedDataModule
from fedsim.data.federated import FederatedData
from fedsim.data.identity import ROLES
from fedsim.evaluation.summary import MAX_LISTED, MAX_NAMES
from fedsim.federation.aggregation.masked import clients_prune
from fedsim.federation.components.ledger import Ledger, Traffic
from fedsim.federation.components.timing import Synchronous
from fedsim.federation.events import num_rounds, strategy_of
from fedsim.federation.federation import Federation, clock_of
from fedsim.federation.memory import DeviceMemory, device_memory, most_of_a_rank, placement_of, training_pixels
from fedsim.federation.parts import Parts
from fedsim.federation.scheduling.plan import Task, make_plan
from fedsim.federation.scheduling.replay import replay, synchronous_rate
from fedsim.models.groups import Group
from fedsim.models.weights import without_downloads
from fedsim.parsing.output import print_text
from fedsim.training.flat_model import FlatModel
from fedsim.training.timetable import Timetable

_ASSUMED = "assumed gain: rounds will measure it"
_NAMES = [0]  # columns of tables with names, which may look like numbers


def describe_federation(
    model: Federation,
    data: FederatedDataModule,
    world_size: int,
    rounds: int | None,
    per_machine: int = 1,
    *,
    ranks_per_device: int = 1,
    precision: str = "32-true",
) -> str:
    """Return a report on a federation that is configured, but not set up; its data files are listed, not read.

    Without a number of ``rounds`` (None: there is no last one) it has the cost of one round.
    """
    model.assemble(data, 0, world_size, torch.device("cpu"))
    placement = placement_of(model.settings, model.parts, world_size, per_machine)
    method, layer = model.settings.method, model.settings.evaluation.layer
    length = "no last round (costs are those of the first)" if rounds is None else f"{rounds} rounds"
    parts = [f"{type(model.settings.method).__name__}, {length}, {world_size} rank{'s' * (world_size > 1)}"]
    rounds = 1 if rounds is None else rounds
    for arch, flat in model.parts.models.items():
        parts += [f"\nShared tensors: {arch}, bn_stats {model.settings.bn_stats}", group_table(flat)]
        if not flat.serves(layer, method.server_tensors(model.parts.server, arch)):
            scorers = "all clients' models together" if method.delivers == "ensemble" else "the clients' own models"
            parts.append(f"While the server has no complete model, unseen domains are scored by {scorers}.")
    parts += ["\nData sets, as they are listed", _data_table(data.identity(MAX_LISTED), data.federated.public_name)]
    parts += ["\nData of the clients", _client_table(model, placement)]
    tables = list(clock_of(model.listeners).timetables(rounds))
    traffic = [_traffic_of(model.parts.ledger, t, table) for t, table in enumerate(tables)]
    if model.settings.selection.learns:
        parts.append(
            "\nThe selection of clients depends on the run's results. The numbers below are without this feedback."
        )
    if len(model.parts.archs) <= MAX_NAMES:
        parts += ["\nBytes that clients receive and send", _traffic_table(model, traffic)]
    memory = device_memory(model.settings, model.parts, data, placement, precision)
    devices = _device_rows(memory, per_machine, ranks_per_device)
    parts += [
        "\nCost of a run",
        _cost_table(model, data, placement, traffic, [*devices, *_state_rows(memory, placement)]),
    ]
    if tables and tables[0].seconds is not None:
        timing = type(model.settings.pace).__name__
        parts += [f"\nSimulated time, with {timing}", _timing_table(model, placement, tables)]
    return "\n".join(parts)


def _traffic_of(ledger: Ledger, round_: int, table: Timetable) -> dict[str, Traffic]:
    """Return the largest traffic of a round; of a synchronous one, as if all clients answered."""
    if table.seconds is None:
        return ledger.at_most(round_, table.called)
    answers = [*table.work, *table.too_old]
    traffic = ledger.at_most(round_, [*dict.fromkeys([*table.called, *answers])])
    called, answered = {*table.called}, {*answers}
    traffic = {name: t if name in called else t._replace(down=0, extra_down=0) for name, t in traffic.items()}
    return {name: t if name in answered else t._replace(up=0, extra_up=0) for name, t in traffic.items()}


def group_table(model: FlatModel) -> str:
    """Return one line per parameter group of an architecture: tensors, elements, bytes, shared or private."""
    shared = {entry.name for entry in model.flat.shared_entries}
    state = model.network.state_dict()
    rows = []
    for group in Group:
        names = [name for name, g in model.groups.items() if g is group]
        if names:
            fixed = group is Group.FIXED
            uses = Counter("shared" if name in shared else "fixed" if fixed else "private" for name in names)
            elements = sum(state[name].numel() for name in names)
            size = sum(state[name].numel() * state[name].element_size() for name in names)
            rows.append([group.value, len(names), elements, size, " + ".join(sorted(uses))])
    if model.has_own_heads:
        rows.append([Group.HEAD.value, 2, "per client", "per client", "private"])
    return tabulate(rows, headers=["group", "tensors", "elements", "bytes", "use"], intfmt=",")


def _data_table(identity: Mapping[str, Any], public: str | None) -> str:
    """Return people, cameras and images of each data set, and its digest; of very many, only sums of images."""
    digest_line = f"Digest of all: {identity['digest']}" + ", of DRAWN STAND-INS" * ("dry_run" in identity)
    if generated := identity.get("generated"):
        digest_line += f", with {generated['images']:,} generated images"
    if "sets" not in identity:
        sums = ", ".join(f"{count:,} {role}" for role, count in identity["images"].items())
        return f"{identity['num_sets']:,} data sets; images: {sums}\n{digest_line}"
    rows = []
    for name, counts in identity["sets"].items():
        pool = f"first of {counts['splits']} splits of {_people_and_images(counts['pool'])}" if "pool" in counts else ""
        notes = ", ".join(filter(None, [pool, "public" if name == public else ""]))
        rows.append([name, *(_people_and_images(counts[role]) for role in ROLES), counts["digest"], notes])
    table = tabulate(rows, ["data set", *ROLES, "digest", ""], disable_numparse=True)
    return f"{table}\n{digest_line}; numbers are people / cameras / images"


def _people_and_images(counts: Mapping[str, int | None] | None) -> str:
    return "" if counts is None else " / ".join("?" if n is None else f"{n:,}" for n in counts.values())


def _client_table(model: Federation, placement: Placement) -> str:
    clients, archs = model.parts.federated.clients, model.parts.archs
    counts = {
        "images": [c.num_images for c in clients],
        "identities": [c.num_classes for c in clients],
        "cameras": [c.num_cameras for c in clients],
        "val queries": [len(c.val.query) if c.val else 0 for c in clients],
    }
    if len(clients) > MAX_LISTED:
        largest = max(clients, key=lambda c: c.num_images)
        table = f"{_quantiles('clients', counts)}\nThe largest is {largest.name}."
    else:
        if any(c.generated is not None for c in clients):
            counts["generated"] = [len(c.generated or ()) for c in clients]
        group_of = {n: number for number, ranks in enumerate(placement.groups) for n in placement.shared_by(ranks)}
        names = ([c.name, group_of[c.name], archs[c.name]] for c in clients)
        rows = [[*of_client, *numbers] for of_client, *numbers in zip(names, *counts.values(), strict=True)]
        owner = "rank" if placement.per_machine == 1 else "machine"
        table = tabulate(rows, ["client", owner, "architecture", *counts], intfmt=",", disable_numparse=_NAMES)
    return f"{table}\n\n{_test_table(model.parts.federated)}"


def _quantiles(subjects: str, counts: Mapping[str, list[int]]) -> str:
    """Return how many of something each of many ``subjects`` has; ``counts``: what is counted -> numbers."""
    number = len(next(iter(counts.values())))
    rows = [
        [name, *(int(value) for value in np.quantile(values, (0, 0.1, 0.5, 0.9, 1), method="lower")), sum(values)]
        for name, values in counts.items()
    ]
    headers = [f"of {number:,} {subjects}", "fewest", "10 %", "median", "90 %", "most", "all"]
    return tabulate(rows, headers, intfmt=",", disable_numparse=_NAMES)


def _test_table(federated: FederatedData) -> str:
    """Return one line per test set. A set with random splits takes the queries of each split from its gallery."""
    queries_of = {n: len(s.splits[0].query if s.splits else s.query) for n, s in federated.tests.items()}
    if len(queries_of) > MAX_LISTED:
        galleries = [len(sets.gallery) for sets in federated.tests.values()]
        return _quantiles("test sets", {"queries": list(queries_of.values()), "gallery": galleries})
    rows = []
    for name, sets in federated.tests.items():
        notes = [f"{len(sets.splits)} splits of the gallery"] if sets.splits else []
        notes += ["unseen"] if name in federated.unseen else []
        rows.append([name, queries_of[name], len(sets.gallery), ", ".join(notes)])
    return tabulate(rows, ["test set", "queries", "gallery", ""], intfmt=",", disable_numparse=_NAMES[: len(rows)])


def _traffic_table(model: Federation, traffic: Sequence[Mapping[str, Traffic]]) -> str:
    rows = []
    for name in model.parts.archs:
        transfers = [of_round[name] for of_round in traffic if name in of_round]
        down, up = [t.received for t in transfers], [t.sent for t in transfers]
        most = [max(down, default=0), max(up, default=0)]
        rows.append([name, len(transfers), *most, sum(down), sum(up), sum(down) + sum(up)])
    headers = ["client", "rounds", "down/round", "up/round", "down", "up", "both"]
    return tabulate(rows, headers, intfmt=",", disable_numparse=_NAMES)


def _cost_table(
    model: Federation,
    data: FederatedDataModule,
    placement: Placement,
    traffic: Sequence[Mapping[str, Traffic]],
    devices: Sequence[list[str]],
) -> str:
    clients = model.parts.federated.clients
    per_client = {c.name: model.parts.models[model.parts.archs[c.name]].shared_bytes for c in clients}
    owned = [placement.shared_by(ranks) for ranks in placement.groups]
    owner = "rank" if placement.per_machine == 1 else "machine"
    # ranks that share clients share the memory of their images, too
    is_held = data.cache == "host" or (data.cache == "device" and placement.per_machine > 1)
    images = most_of_a_rank(training_pixels(model.parts, data), model.parts, placement) if is_held else 0
    public = 3 * data.size[0] * data.size[1] * len(model.parts.federated.public or ())
    settings = model.settings
    waits = settings.method.measures or settings.on_bad_update == "skip_client" or model.parts.federated.has_unlabelled
    waits = waits or settings.needs_all_uploads
    if clients_prune(settings.method):  # the mask waits, too: a byte per parameter
        per_client = {name: size + size // 4 for name, size in per_client.items()}
    waiting = max(sum(per_client[name] for name in names) for names in owned) if waits else 0
    rounds = len(traffic)
    spent = settings.noise.metrics(rounds - 1, ()) if rounds else {}
    rows = [
        *_traffic_rows(model, traffic),
        *([f"{name} after {rounds} round{'s' * (rounds != 1)}", f"{value:.2f}"] for name, value in spent.items()),
        *_plan_rows(model.parts, placement),
        *devices,
        *([[f"host memory: training images of the busiest {owner}", _mib(images)]] if is_held else []),
        *([["host memory: public images, on each rank", _mib(public)]] if public else []),
        [f"host memory: uploads waiting on the busiest {owner}", _mib(waiting)],
    ]
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def _device_rows(memory: DeviceMemory, per_machine: int, ranks_per_device: int) -> list[list[str]]:
    """Return a rank's memory on its device; of ranks that share devices, also that of all on one, and the devices."""
    moments = round(memory.moments / max(memory.trained * memory.gradients, 1))
    models = "model, gradient" + f", {moments} optimizer moment{'s' * (moments > 1)}" * (moments > 0)
    models += f", of {memory.trained} models" * (memory.trained > 1)
    models += f", and {memory.frozen} frozen" * (memory.frozen > 0)
    sizes: dict[str, int | None] = {
        models: memory.models + memory.gradients + memory.moments,
        "global model, sums of uploads": memory.server + memory.sums,
        "private states of the busiest rank": memory.states if memory.states_place == "device" else 0,
        "tensors that a client keeps, and copies in its session": memory.kept,
        "training images of the busiest rank": memory.pixels,
        f"activations of {memory.images} images": memory.activations,
        "before these, what a client trains first": memory.stage,
        "after these, single uploads with copies": memory.uploads,
        "a captured step": memory.graphs,
        "together, with CUDA": memory.total,
    }
    rows = [
        [f"device memory: {name}", "unknown for this backbone" if size is None else _mib(size)]
        for name, size in sizes.items()
        if size != 0
    ]
    if ranks_per_device > 1:
        gpus = [f"cuda:{index}" for index in range(per_machine // ranks_per_device)] * ranks_per_device
        rows.append([f"device memory: {ranks_per_device} ranks, with CUDA", _mib(ranks_per_device * memory.total)])
        rows.append(["ranks that share a device", by_device(gpus)])
    return rows


def _state_rows(memory: DeviceMemory, placement: Placement) -> list[list[str]]:
    """Return the private states that are not on the device, if there are any."""
    if memory.states_place == "device" or not memory.states:
        return []
    storage = "host memory" if memory.states_place == "host" else "disk"
    busiest = "rank" if placement.per_machine == 1 else "machine"
    return [[f"{storage}: private states of the busiest {busiest}", _mib(memory.states)]]


def _plan_rows(parts: Parts, placement: Placement) -> list[list[str]]:
    """Return the speed-up of a round with all clients, its limit, and the clients that rank groups train."""
    costs, rank_groups, seconds = parts.costs, [], 0.0
    for ranks in placement.groups:
        tasks = [Task(name, costs[name], parts.micro_batches[name]) for name in placement.shared_by(ranks)]
        plan = make_plan(tasks, len(ranks))
        seconds = max(seconds, plan.seconds)
        rank_groups += [f"{name} on ranks {ranks[s.start]} to {ranks[s.stop - 1]}" for name, s in plan.rank_groups]
    total, largest = sum(costs.values()), max(costs, key=costs.__getitem__)
    on_server = 0.0 if parts.root is None else float(parts.root.data.num_images * parts.root.training_settings.passes)
    speedup = (total + on_server) / (seconds + on_server) if seconds else 1.0
    prediction = f"{speedup:.2f}x ({100 * speedup / len(placement.loads):.0f} % efficiency)"
    share = costs[largest] / max(total, 1)
    if len(placement.loads) > 1 and parts.micro_batches[largest] == 1:
        prediction += f"; {largest} has {100 * share:.0f} % of the work, so at most {1 / share:.2f}x"
        prediction += " unless model.client.micro_batch lets ranks share it" if placement.per_machine > 1 else ""
    elif len(placement.loads) > 1:
        count = parts.micro_batches[largest]
        prediction += f"; {largest} has {100 * share:.0f} % of the work, in batches of {count} micro-batches"
    if on_server:
        share = 100 * on_server / (total + on_server)
        prediction += f"; the server's images have {share:.0f} % of the work, while the other ranks wait"
    return [
        ["predicted speed-up over one rank (assumed: all images take equally long)", prediction],
        *([["clients that rank groups train", f"{', '.join(rank_groups)} ({_ASSUMED})"]] if rank_groups else []),
    ]


def _traffic_rows(model: Federation, traffic: Sequence[Mapping[str, Traffic]]) -> list[list[str]]:
    """Return bytes, and simulated seconds if hardware is set: of the most expensive round, and of the run."""
    ledger, costs = model.parts.ledger, model.parts.costs
    down = [sum(t.received for t in of_round.values()) for of_round in traffic]
    up = [sum(t.sent for t in of_round.values()) for of_round in traffic]
    extra = sum(t.extra for of_round in traffic for t in of_round.values())
    run = f"{len(traffic)} round{'s' * (len(traffic) != 1)}"
    is_synchronous = isinstance(model.settings.pace, Synchronous)  # others have a table of their own
    prunes = any(ledger.prunes(arch) for arch in model.parts.models)
    if is_synchronous:
        conditions = "without drop-outs" + " or pruning, with masks" * prunes
    else:
        conditions = "with drop-outs" + ", without pruning, with masks" * prunes
    method, server = model.settings.method, model.parts.server
    has_tables = any(method.payload(server, arch, 0).tables for arch in model.parts.models)
    bound = "but for the rows of clients' tables" if has_tables else "at most"
    rows = [
        [f"bytes down per round, {bound}", f"{max(down, default=0):,}"],
        [f"bytes up per round, {bound}", f"{max(up, default=0):,}"],
        [f"bytes of {run}, both ways, {conditions}", f"{sum(down) + sum(up):,}"],
    ]
    if extra:
        rows.append(["of these, in addition to shared tensors", f"{extra:,}"])
    seconds = (ledger.simulated_seconds(of_round, costs) for of_round in traffic if is_synchronous)
    if durations := [value for value in seconds if value is not None]:
        rows.append(["simulated seconds per round, at most", f"{max(durations):,.1f}"])
        rows.append([f"simulated seconds of {run}, at most", f"{sum(durations):,.1f}"])
    return rows


def _timing_table(model: Federation, placement: Placement, tables: Sequence[Timetable]) -> str:
    """Return a table of a run's simulated seconds, answers per client, staleness and memory, with drop-outs."""
    parts, rounds = model.parts, len(tables)
    run = replay(tables, parts.costs, parts.micro_batches, placement)
    size = sum(flat.shared_bytes for flat in parts.models.values())
    synchronous = synchronous_rate(clock_of(model.listeners).inputs, rounds)
    slow, fast = run.fewest, run.most
    rows = [
        [f"simulated seconds of {rounds} round{'s' * (rounds != 1)}", f"{run.seconds:,.1f}"],
        ["answers, and those that do not count: late, too old", f"{run.answers:,}, {run.late:,}, {run.too_old:,}"],
    ]
    if run.answers:
        if synchronous:
            factor = 1.0 if run.rate == synchronous else run.rate / synchronous  # both may be infinite
            rows.append(
                ["answers per second, over those of synchronous rounds of the same selection", f"{factor:.2f}x"]
            )
        rows += [
            ["fewest answers of a client", f"{run.count[slow]} of {slow}; most: {run.count[fast]} of {fast}"],
            ["staleness of answers: mean, largest", f"{run.mean_staleness:.1f}, {run.largest_staleness}"],
            [
                "host memory: models of earlier rounds, once per machine",
                f"{run.old_models} at once, in {run.slots} slots: {_mib(run.slots * size)}",
            ],
        ]
    if len(placement.loads) > 1:
        rows.append(["idle time of ranks (assumed: all images take equally long)", f"{100 * run.idle:.0f} %"])
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def weights_for(command: str, is_dry: bool) -> AbstractContextManager[None]:
    """Return the context for building networks: a description and a dry run need no pretrained weights."""
    return without_downloads() if command == "describe" or is_dry else nullcontext()


class FederatedTrainer(Trainer):
    """A Trainer that can also describe a run."""

    def describe(
        self,
        model: Federation,
        datamodule: FederatedDataModule,
        ckpt_path: Any = None,  # noqa: ARG002 - see below
        weights_only: Any = None,  # noqa: ARG002 - see below
    ) -> None:
        """Show the shared tensors, the clients' data and the cost of a run.

        The last two stand in the ``config.yaml`` of a run, which may be described again; nothing is read from them.
        """
        per_machine = max(self.world_size // self.num_nodes, 1)
        description = describe_federation(
            model, datamodule, self.world_size, num_rounds(self), per_machine,
            ranks_per_device=strategy_of(self).ranks_per_device, precision=str(self.precision),
        )  # fmt: skip
        print_text(description)
