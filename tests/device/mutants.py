"""Mistakes that a CPU does not show: text replacements in our own source, each with the run that finds it."""

import ast
import functools
import importlib
import inspect
import logging
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from mmap import PAGESIZE
from pathlib import Path
from types import CodeType, FunctionType
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import fedsim
import simulated
import small
from budgets import MOST, counted_waits, kernels_of_a_step
from failing import run_on_ranks
from fedsim.__main__ import main
from fedsim.core import devices
from fedsim.core.errors import ConfigError
from fedsim.core.nvidia import Unseen
from fedsim.core.store import make_store
from fedsim.federation.components.attacks import GaussianNoise
from fedsim.federation.scheduling import scheduler
from fedsim.federation.scheduling.plan import RoundPlan
from fedsim.methods import SSCU, FedPav
from fedsim.models import ResNet, SmallCNN, StyleLayers
from fedsim.strategy import FederatedStrategy
from fedsim.training.settings import LocalTraining
from fedsim.training.uploads import Uploads
from living import counted
from map_orders import orders
from own_parts import LogsOnTheCPU, trained
from runs import differences, fit, fit_module, judged_in_two_steps, learnt, options
from small_generators import STEPS, WIDTHS

SOURCE = Path(fedsim.__file__).parent


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    file: str
    old: str
    """must be there exactly once"""
    new: str
    run: str
    """of :data:`RUNS`"""

    def __str__(self):
        where = self.file.removesuffix(".py").replace("/", ".")
        return f"{where}: {self.old.strip().splitlines()[0][:60]}"

    def texts(self):
        """Return the file without and with the mistake."""
        text = (SOURCE / self.file).read_text()
        assert text.count(self.old) == 1, f"{self}: {text.count(self.old)} places"
        return text, text.replace(self.old, self.new)

    @contextmanager
    def made(self):
        """Make the mistake in this process until the end of the block."""
        module = importlib.import_module(f"fedsim.{self.file.removesuffix('.py').replace('/', '.')}")
        right, wrong = self.texts()
        codes = dict(
            zip(
                *(_codes(compile(text, module.__file__, "exec", dont_inherit=True)) for text in (right, wrong)),
                strict=True,
            )
        )
        with ExitStack() as stack:
            for function in _functions(vars(module), module.__name__):
                # whoever knows the function has it with the mistake, too
                stack.callback(setattr, function, "__code__", function.__code__)
                function.__code__ = codes.get(function.__code__, function.__code__)
            for name, value in _constants(wrong).items() - _constants(right).items():
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
            yield


def _codes(code):
    """Yield the codes of all functions and methods in order; functions in functions are parts of them."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from [inner] if inner.co_flags & inspect.CO_OPTIMIZED else _codes(inner)


def _functions(names, module):
    """Yield all functions of a module and its classes, those in decorators and properties included."""
    for value in list(names.values()):
        if inspect.isclass(value) and value.__module__ == module:
            yield from _functions(vars(value), module)
        elif isinstance(value, property):
            yield from (f for f in (value.fget, value.fset) if f is not None)
        else:
            inner = inspect.unwrap(getattr(value, "func", getattr(value, "__func__", value)))
            if isinstance(inner, FunctionType) and inner.__module__ == module:
                yield inner


def _constants(text):
    """Return name -> value of the numbers of a module."""
    lines = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    return {line.targets[0].id: line.value.value for line in lines if isinstance(line.value, ast.Constant)}


MUTANTS = [
    # -- a device that is left out
    Mutant("core/flat.py", "dtype=torch.float32, device=device)", "dtype=torch.float32)", "fit"),
    Mutant("training/client.py", "bound.to(self.device) for part", "bound.to('cpu') for part", "fit"),
    Mutant("training/private_state.py", "t.to(self.model.device, non_blocking=True, copy=True)", "t.clone()",
           "host store"),
    Mutant("training/server.py", "tensor.detach().to(self.models[arch].device, copy=True)", "tensor.detach().cpu()",
           "control"),
    Mutant("training/batch.py", "= send(torch.stack([self.labels[part], self.cameras[part], part]), self.device)",
           "= torch.stack([self.labels[part], self.cameras[part], part])", "head accuracy"),
    Mutant("training/session.py", "send(on_host, images.device)", "on_host", "fit"),
    Mutant("training/public.py", "send(self.images[index], self._device)", "self.images[index]", "distil"),
    Mutant("training/public.py", "send(batch, self._device)", "batch", "recalibrate"),
    Mutant("training/proxies.py", "send(kinds.T.contiguous(), device)", "kinds.T.contiguous()", "clusters"),
    Mutant("training/labels/labeller.py", "model.network.num_features, device=model.device)",
           "model.network.num_features)", "bottom up"),
    Mutant("training/labels/bottom_up.py", "labels.argsort(stable=True).to(device)]",
           "labels.argsort(stable=True)].cpu()", "bottom up"),
    Mutant("training/labels/bottom_up.py", "sizes.to(device)", "sizes", "bottom up"),
    Mutant("federation/assembly.py", "network = network.to(device)", "pass", "fit"),
    Mutant("federation/aggregation/sums.py", "tensor.to(total.device).flatten()", "tensor.flatten()", "distil"),
    Mutant("federation/aggregation/masked.py", "dtype=torch.bool, device=total.device)", "dtype=torch.bool)", "prune"),
    Mutant(
        "federation/components/privacy.py",
        "return noise.mul_(std).to(flat.buffer.device)",
        "return noise.mul_(std)",
        "noise",
    ),
    Mutant("functional/losses.py", "dtype=torch.bool, device=labels.device)\n    positive = ",
           "dtype=torch.bool)\n    positive = ", "triplets"),
    Mutant("functional/losses.py", "dtype=torch.long, device=features.device)", "dtype=torch.long)", "moon"),
    Mutant("functional/retrieval.py", "matches.shape[1] + 1, device=matches.device)", "matches.shape[1] + 1)", "prune"),
    Mutant("methods/base.py", "num_shared_parameters, device=client.device)", "num_shared_parameters)", "control"),
    Mutant("methods/pruned.py", "dtype=torch.bool, device=model.device)", "dtype=torch.bool)", "new mask"),
    Mutant("methods/fedpav.py", "teacher.network.num_features, device=client.device)",
           "teacher.network.num_features)", "distil"),
    Mutant("methods/fedpav.py", "features[send(index, client.device)]", "features.cpu()[send(index, client.device)]",
           "distil"),
    Mutant("data/augmentation.py", "generator=generator, device=images.device)", "generator=generator)", "fit"),
    Mutant("data/augmentation.py", "    column = torch.arange(width, device=x.device)\n",
           "    column = torch.arange(width)\n", "fit"),
    Mutant("data/pixels.py", "yield send(self.pixels.index_select(0, rows), self.device)",
           "yield self.pixels.index_select(0, rows)", "host cache"),
    Mutant("evaluation/backends.py", "dtype=torch.int64, device=keys.device)", "dtype=torch.int64)", "fit"),
    Mutant("evaluation/feature_file.py", "query=query.cpu().numpy()", "query=query.numpy()", "predict"),
    Mutant("evaluation/reranking.py", "torch.as_tensor(neighbours.similarity, device=query.device)",
           "torch.as_tensor(neighbours.similarity)", "rank"),
    Mutant("generation/training.py", "sampled.lenders.to(self.device)", "sampled.lenders", "augment"),
    # -- a generator of the wrong device
    Mutant("training/client.py", 'self.generator(f"dropout{role}", device=self.device)',
           'self.generator(f"dropout{role}")', "dropout"),
    Mutant("training/client.py", 'self.client_name, purpose, device=device)', "self.client_name, purpose)", "fit"),
    Mutant("training/public.py", '"public augment", device=self._device)', '"public augment")', "distil"),
    Mutant("methods/fedpav.py", 'client.generator("cdw augment", device=client.device)',
           'client.generator("cdw augment")', "distil"),
    Mutant("training/session.py", "self._stream(purpose, self._images.device)", 'self._stream(purpose, "cpu")', "fit"),
    # -- numbers that users compute on the CPU
    Mutant("training/own_module/inner_trainer.py", "[number for number in numbers if not number.is_cpu]", "[*numbers]",
           "own module"),
    Mutant("training/objective.py", "term.to(labels.device)", "term", "own loss"),
    Mutant("training/client.py", "values.to(self.device, torch.float64, non_blocking=True)",
           "values.to(torch.float64)", "own signal"),
    # -- streams of a device that something else seeds
    Mutant("core/seeding.py", "torch.cuda.manual_seed_all(seed)", "pass", "own module"),
    # -- a driver that does not start
    Mutant("core/devices.py", "(failure := why_cuda_fails(torch.version.cuda))", "(failure := None)", "old driver"),
    # -- waits and races
    Mutant("training/running_metrics.py", "self._losses.append(loss)", "self._losses.append(loss.cpu())", "waits"),
    Mutant("core/transfer.py", "tensor.to(device, non_blocking=True)", "tensor.to(device)", "waits"),
    Mutant("training/running_metrics.py", "self._guesses.append(guesses)",
           "self._guesses.append(guesses)\n        loss.item()", "waits"),
    Mutant("functional/losses.py", "if values.is_cpu:", "if True:", "waits for cameras"),
    Mutant("evaluation/backends.py", "zip(ranks.cpu().numpy(), counts, strict=True)",
           'zip(ranks.to("cpu", non_blocking=True).numpy(), counts, strict=True)', "fit"),
    Mutant("strategy/checkpoint_files.py", "tensor.detach().cpu().contiguous()",
           'tensor.detach().to("cpu", non_blocking=True).contiguous()', "control"),
    Mutant("evaluation/backends.py", "with torch.cuda.device(query.device):", "if True:", "rank"),
    Mutant("training/own_module/module_client.py", "self._client.has_losses &= loss is not self._no_loss",
           "self._client.has_losses &= not loss.isnan()", "own module"),
    Mutant("training/own_module/inner_trainer.py", ".to(torch.float64, copy=True)", ".cpu().double()", "own module"),
    # -- what a batch costs
    Mutant("functional/memory.py", "if most is None else min(most, len(labels))", "", "launches"),
    Mutant("models/memory_order.py", "return x.contiguous(memory_format=torch.channels_last if is_last else "
           "torch.contiguous_format)", "return x", "order of maps"),
    # -- padding of flat buffers
    Mutant("federation/components/attacks.py", "flat.clear_gaps(drawn)", "drawn", "gaps"),
    # -- rules on the device
    Mutant("federation/aggregation/gathered.py", "return strategy.sum_(rows).add_(0.0)",
           "return strategy.sum_(rows).add_(0.0).cpu()", "rule"),
    Mutant("training/uploads.py", "device=self._device)\n        for _, span", ")\n        for _, span", "rule"),
    # -- memory
    Mutant("federation/memory.py", "copies * 4 * self._model(name).flat.num_model", "0", "memory"),
    Mutant("federation/root.py", "        server.trained = {}  # the last round's gives its memory back\n", "",
           "memory of a rule"),
    Mutant("core/store.py", 'locked_like(tensor, "model.client_store").copy_(tensor)',
           "torch.empty_like(tensor, device=self.device, pin_memory=True).copy_(tensor)", "locked memory"),
    # -- captured steps
    Mutant("training/graphs.py", "            static.copy_(tensor)", "            static", "graph"),
    Mutant("training/graphs.py", "metrics.add(loss.clone(), guesses.clone(),", "metrics.add(loss, guesses,", "graph"),
    Mutant("training/graphs.py", "WARM_UP = 3\n", "WARM_UP = 0\n", "graph"),
    Mutant("training/graphs.py", "optimizer.num_steps += steps", "optimizer.num_steps += 0", "graph control"),
    Mutant("training/graphs.py", "self._model.add_work(captured.work)", "pass", "graph"),
    Mutant("training/graphs.py", "[(o.rates, o.num_resets)", "[o.num_resets", "graph rates"),
    Mutant("training/graphs.py", "metrics, session.report = captured, losses.append", "report = losses.append",
           "graph"),
    Mutant("core/allocator.py", "graph.register_generator_state(generator)", "graph.pool", "graph"),
    Mutant("core/allocator.py", "        self._stream.wait_stream(caller_stream)\n", "", "graph"),
    Mutant("core/allocator.py", "        caller_stream.wait_stream(self._stream)\n", "", "graph, last batches"),
    Mutant("training/optimizer.py", 'group["capturable"] = True', 'group["capturable"] = False', "graph Adam"),
    Mutant("training/client.py", "self.session.report(loss.detach())", "self.session.report(loss.item())", "graph"),
    Mutant("models/style.py", "validate_args=False", "validate_args=True", "graph styles"),
    Mutant("models/style.py", "ones = torch.ones(2, size, device=device)", "ones = torch.ones(2, size)",
           "graph styles"),
    Mutant("models/style.py", "torch.stack(bounds).index_select(1, first)", "torch.stack(bounds)[:, first.item()]",
           "graph styles"),
    # -- steps that cannot be recorded
    Mutant("training/graphs.py", "self._memory.gave_up = True", "self._memory.gave_up = False", "graph that fails"),
    Mutant("training/graphs.py", "while error.__context__ is not None:", "while False:", "graph that fails"),
    Mutant("training/graphs.py", "                optimizer.forget_gradients()", "                pass",
           "graph that fails"),
    Mutant("core/allocator.py", "            work()\n        self.last = graph",
           "            try:\n                work()\n            except RuntimeError:\n                pass\n"
           "        self.last = graph", "graph that fails"),
    # -- copies on a stream of their own
    Mutant("core/transfer.py", "        work.wait_event(arrived)\n", "", "prefetch"),
    Mutant("core/transfer.py", "tensor.record_stream(work)", "tensor", "prefetch"),
    Mutant("core/transfer.py", "return next(tensors, None), copies.record_event()",
           "event = copies.record_event()\n            return next(tensors, None), event", "prefetch"),
    # -- what has no deterministic form
    Mutant("functional/retrieval.py", "matches.cumsum(1).double()", "hits.cumsum(1)", "prune"),
    Mutant("training/labels/bottom_up.py",
           'of_clusters = torch.segment_reduce(similarity.block(rows), "max", lengths=widths[clusters])',
           'of_clusters = similarity.block(rows).cumsum(1)', "bottom up"),
    Mutant("evaluation/triggered.py", 'torch.segment_reduce(by_group, "max", lengths=sizes, unsafe=True).T',
           'values.new_zeros(len(values), count).scatter_reduce(1, groups.expand(len(values), -1), values, "amax")',
           "backdoor"),
    # -- collectives
    Mutant("strategy/strategy.py", "self._wait(dist.all_reduce(payload, group=self._patient, async_op=True))",
           "self._wait(dist.all_reduce(payload, async_op=True))", "two GPUs"),
    Mutant("strategy/strategy.py", "self._wait(dist.all_reduce(tensor, async_op=True))",
           "self._wait(dist.all_reduce(tensor.cpu(), async_op=True))", "two GPUs"),
    Mutant("federation/round.py", "listener.begin(round_)\n",
           "listener.begin(round_)\n        if self.strategy.global_rank:\n            self.strategy.barrier()\n",
           "two GPUs"),
    Mutant("strategy/strategy.py", 'return "gloo" if self.ranks_per_device > 1 or is_alone else str(', "return str(",
           "shared GPUs"),
    Mutant("strategy/sharing.py", "dist.all_reduce(tensor, group=self.among",
           "dist.all_reduce(host, group=self.among", "shared GPUs"),
    Mutant("strategy/sharing.py", "dist.group.WORLD.bound_device_id = None", "pass", "shared GPUs"),
    Mutant("strategy/sharing.py", "dist.group.WORLD.bound_device_id = None", "pass", "rank groups"),
    Mutant("strategy/strategy.py", "            work.wait()  #", "            self._wait(work)  #", "rank groups"),
    Mutant("strategy/strategy.py", 'for ranks in groups if (ranks, "cpu") not in self._groups]', "for ranks in groups]",
           "rank groups"),
    Mutant("strategy/strategy.py", 'list(ranks), timeout=self.round_timeout, backend="gloo"',
           'list(ranks), timeout=self.timeout, backend="gloo"', "rank groups"),
    Mutant("strategy/strategy.py", "timeout=self.timeout, backend=self.process_group_backend",
           "timeout=self.round_timeout, backend=self.process_group_backend", "rank groups"),
    Mutant("strategy/sharing.py", "Multiple Ranks are using the same GPU/Partition", "Several ranks have one GPU",
           "one GPU for two"),
    Mutant("strategy/strategy.py", " or is_alone else", " else", "alone"),
]  # fmt: skip

# -- runs that find them -----------------------------------------------------------------------------------------------


def _fit(folder, name, *options, waits=None, scored=False, **settings):
    """Fit on a simulated GPU, deterministically; more than ``waits`` per session are a mistake."""
    with simulated.cuda(1) as gpu, counted_waits(gpu) as found:
        fit(folder / "run", name, *options, gpus=1, scored=scored, deterministic=waits is None, **settings)
    if waits is not None:
        assert max(found.of_sessions) <= waits, f"waits of sessions: {found}"
        assert not found.between_batches, f"waits of sessions: {found}"


def _graph(folder, name, *options):
    """Fit with graphs, all of whose steps but the first ones are replayed, and without: the bits must be equal."""
    found, more = [], ["--model.client.batch_size=4", "--data.limit_client_batches=6", *options]
    for graph in ("true", "false"):
        with simulated.cuda(1) as gpu:
            words = [f"--model.client.graph={graph}", *more]
            found.append(fit(folder / graph, name, *words, gpus=1, rounds=1, scored=False))
        replays = gpu.kernels["replay"]
        clients = 2
        assert graph == "false" or replays >= 3 * clients, f"steps stay plain: only {replays} were replayed"
    assert not (different := differences(*found)), f"other bits: {different}"


def _graph_that_fails(folder):
    """Fit with steps that wait for their gradients: one capture is tried, and the bits are those of plain steps.

    The capture fails after the backward pass, so it leaves gradients, which must not count.
    """
    left, said = [], []
    log, handler = logging.getLogger("fedsim.training.graphs"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())

    def waiting(_, client, loss):
        client.step(loss, lambda: client.optimizer.parameters[0].grad.sum().item())

    log.addHandler(handler)
    try:
        for graph in ("true", "false"):
            with mock.patch.object(FedPav, "take_step", waiting), simulated.cuda(1) as gpu:
                words = [f"--model.client.graph={graph}", "--data.limit_client_batches=6"]
                left.append(fit(folder / graph, "fedpav", *words, gpus=1, rounds=1, scored=False))
            assert graph == "false" or gpu.captures == [False], f"captures of a step that fails: {gpu.captures}"
    finally:
        log.removeHandler(handler)
    [line] = said
    assert "not permitted when stream is capturing" in line, f"captures of a step that fails: {line}"
    assert not (different := differences(*left)), f"other bits: {different}"


def _prefetch(folder):
    """Fit with copies ahead, of images in the host's memory; the bits must be those without."""
    found, far = [], ["--data.cache=host", "--data.size=[128,64]", "--data.limit_client_batches=5"]
    for prefetch in ("true", "false"):
        with simulated.cuda(1):
            more = [*far, f"--model.client.prefetch={prefetch}"]
            found.append(fit(folder / prefetch, "fedpav", *more, gpus=1, rounds=1, scored=False))
    assert not (different := differences(*found)), f"other bits: {different}"


def _commands(*commands):
    """Call commands on the simulated GPU."""
    with simulated.cuda(2):
        for words in commands:
            assert main([str(word) for word in words]) == 0


def _predict(folder):
    run = folder / "run"
    where = ["--trainer.accelerator=gpu", "--trainer.devices=1"]
    words = ["predict", "--config", run / "config.yaml", "--ckpt_path", "last", "--run_dir", run, *where]
    _commands(options(run, "fedpav", gpus=1, rounds=1), words)


def _rank(folder):
    rng = np.random.default_rng(0)
    pids, cameras = np.arange(12) % 4, np.arange(12) % 3
    arrays = {"query": rng.normal(size=(12, 8)), "gallery": rng.normal(size=(12, 8))}
    labels = {f"{part}_{what}": values for part in arrays for what, values in (("pids", pids), ("camids", cameras))}
    features = {part: values.astype(np.float32) for part, values in arrays.items()}
    np.savez(folder / "features.npz", **features, **labels)
    options = ["--device", "cuda:1", "--backend", "faiss", "--expand", 2, "--alpha", 1.0]
    _commands(["rank", folder / "features.npz", *options])


def _augment(folder):
    (folder / "data.yaml").write_text(
        "data: {source: {class_path: SyntheticReID, init_args: {clients: 1, unseen: 1, scale: 0.2}}, size: [32, 16], "
        "val: none}\n"
    )
    where = ["--config", folder / "data.yaml", "--output", folder / "generators", "--device", "cuda"]
    with judged_in_two_steps():
        _commands(["augment", "fit", *where, *STEPS, *WIDTHS])


def _own_module(folder):
    """Fit a module that draws from the device's stream, and logs: the bits must be those of the CPU."""
    expected = learnt(fit_module(1, "cpu", module=LogsOnTheCPU))
    with simulated.cuda(1) as gpu, counted_waits(gpu) as waits:
        left = learnt(fit_module(1, module=LogsOnTheCPU))
    assert not (different := differences((left, []), (expected, []))), f"other bits: {different}"
    assert not waits.between_batches, f"waits of sessions: {waits}"


def _own_part(name):
    with simulated.cuda(1):
        trained(name, accelerator="gpu", rounds=1)


def _launches(folder):
    training = LocalTraining(batch_size=32, optimizer=functools.partial(torch.optim.SGD, lr=1e-3))
    with simulated.cuda(1) as gpu:
        found = kernels_of_a_step(gpu, SSCU(), backbone=SmallCNN(width=8), client=training)
    assert found <= MOST[SSCU], f"launches of a batch: {found}"


def _order_of_maps(folder):
    network = ResNet(18, style=StyleLayers(kind="snr", after=("layer1",)))
    lost = orders(network).count(False)
    assert not lost, f"maps lose their order: {lost}"


def _gaps(folder):
    with simulated.cuda(1):
        model = small.fit(small.make_model(FedPav(), attack=GaussianNoise(["town0"])), accelerator="gpu", rounds=1)
        [layout] = (one.flat for one in model.parts.models.values())
        vector = small.vector(model)
        assert torch.equal(layout.clear_gaps(vector.clone()), vector), "numbers in the padding"


def _rule(folder):
    combine = Uploads.combine

    def watched(uploads, rule, *vectors):
        found = combine(uploads, lambda chunk: _on_gpu(rule(_on_gpu(chunk))), *vectors)
        return _on_gpu(found)

    with simulated.cuda(1), mock.patch.object(Uploads, "combine", watched):
        fit(folder / "run", "fedavg", "--model.aggregation=Median", gpus=1, rounds=1, scored=False)


def _on_gpu(tensor):
    assert tensor.is_cuda, "a rule on the host"
    return tensor


def _memory(folder, *options):
    seen = counted(folder / "run", *options)
    described = seen.described.lasting
    assert abs(described / seen.step - 1) <= 0.1, f"memory that describe does not count: {described}, {seen.step}"


def _locked_memory(folder):
    device = torch.device("cuda", 0)
    with simulated.cuda(1):
        store = make_store("host", device, ["a"])
        store.write("a", {"vector": torch.zeros(2**16 + 1, device=device)})
        locked = simulated.locked_bytes()
    assert locked == 2**18 + PAGESIZE, f"locked memory: {locked}"


def _old_driver(folder):
    failure = Unseen("the driver is too old", "update it")
    words = options(folder / "run", "fedpav", gpus=1, rounds=1)
    with (
        simulated.cuda(1), mock.patch.object(devices, "why_cuda_fails", return_value=failure),
        mock.patch.object(torch.version, "cuda", "13.2"),
    ):  # fmt: skip
        assert main(words) == 2, "a fit on a driver that is too old"


def _alone(folder):
    """Fit on a single rank, which has nobody to sum with."""
    strategy = FederatedStrategy()
    with simulated.cuda(1):
        fit(folder / "run", "fedpav", gpus=1, rounds=1, scored=False, strategy=strategy)
    assert strategy.process_group_backend == "gloo", "NCCL of a rank that is alone"


RUNS = {
    "augment": _augment,
    "backdoor": lambda folder: _fit(
        folder, "fedavg", "--model.attack=Backdoor", "--model.attack.attackers=[town0]", "--model.attack.patch=4",
        rounds=1, scored=True,
    ),
    "bottom up": lambda folder: _fit(folder, "fedureid"),
    "clusters": lambda folder: _fit(folder, "fedcapr", rounds=1),
    "control": lambda folder: _fit(folder, "scaffold"),
    "distil": lambda folder: _fit(
        folder, "fedpav_kd_cdw", "--model.method.distillation.view=seeded_train", "--model.method.weighting=cdw",
        "--model.server_optimizer=null", rounds=1,
    ),
    "dropout": lambda folder: _fit(folder, "fedpav", "--model.neck={kind: linear, dim: 8, dropout: 0.5}", rounds=1),
    "fit": lambda folder: _fit(folder, "fedpav", rounds=1, scored=True),
    "graph": lambda folder: _graph(folder, "fedpav"),
    "graph, last batches": lambda folder: _graph(
        folder, "fedpav", "--data.limit_client_batches=null", "--model.client.batch_size=7"
    ),
    "graph Adam": lambda folder: _graph(
        folder, "fedavg", "--model.client.optimizer=AdamW", "--model.client.optimizer.lr=0.001"
    ),
    "graph control": lambda folder: _graph(folder, "scaffold"),
    "graph styles": lambda folder: _graph(
        folder, "fedpav", "--model.backbone.init_args.style={kind: cross, crop: both, after: [input, layer1]}"
    ),
    "graph rates": lambda folder: _graph(
        folder, "fedavg", "--model.client.long_round={round: 1, local_epochs: 3, schedule: {kind: step, step: 1}}"
    ),
    "graph that fails": _graph_that_fails,
    "head accuracy": lambda folder: _fit(folder, "lotteryfl", rounds=1),
    "host cache": lambda folder: _fit(folder, "fedpav", "--data.cache=host", rounds=1),
    "host store": lambda folder: _fit(folder, "scaffold", "--model.client_store=host"),
    "moon": lambda folder: _fit(folder, "moon"),
    "new mask": lambda folder: _fit(folder, "feddip", rounds=1),
    "noise": lambda folder: _fit(
        folder, "fedpav", "--model.privacy=WhiteNoise", "--model.privacy.beta=0.001", rounds=1
    ),
    "gaps": _gaps,
    "launches": _launches,
    "locked memory": _locked_memory,
    "memory": lambda folder: _memory(folder, "fedsam"),
    "memory of a rule": lambda folder: _memory(
        folder, "fedavg", "--model.aggregation=FLTrust", "--data.public=town2", "--data.source.init_args.clients=3"
    ),
    "old driver": _old_driver,
    "order of maps": _order_of_maps,
    "own loss": lambda folder: _own_part("a loss on the host"),
    "own module": _own_module,
    "own signal": lambda folder: _own_part("a signal on the host"),
    "predict": _predict,
    "prefetch": _prefetch,
    "prune": lambda folder: _fit(folder, "fedklpr"),
    "rank": _rank,
    "rule": _rule,
    "recalibrate": lambda folder: _fit(
        folder, "fedavg", "--model.bn_stats=recalibrate", "--data.public=new0", rounds=1
    ),
    "triplets": lambda folder: _fit(
        folder, "fedpav", "--model.objective.triplet=0.5", "--model.client.sampler=identity", rounds=1
    ),
    "waits": lambda folder: _fit(folder, "fedpav", waits=2, scored=True),
    "waits for cameras": lambda folder: _fit(
        folder, "fedcapr", "--model.method.reg_last_camera_only=true", "--model.method.reg_from=1", waits=14,
        scored=True,
    ),
    "alone": _alone,
}  # fmt: skip
"""Run -> what it does in a folder"""
SUM, ROUND = timedelta(minutes=7), timedelta(hours=3)
"""longest waits of groups; neither is a default"""
MICRO_BATCHES = ("--model.client.micro_batch=4", "--data.source.init_args.clients=3")
ON_RANKS = {
    "one GPU for two": ("fedpav", (), 2, 1),
    "rank groups": ("fedavg", MICRO_BATCHES, 3, 1),
    "shared GPUs": ("fedpav", (), 4, 2),
    "two GPUs": ("fedpav_cdw", (), 2, 1),
}
"""Run of several ranks -> config, options, number of ranks, ranks on each GPU"""


def play(folder, run, mutant=None):
    """Let a run take place, with a mistake or without."""
    if run in ON_RANKS:
        on_a_rank = _on_a_rank_without_a_gpu if run == "one GPU for two" else _on_a_rank
        run_on_ranks(functools.partial(on_a_rank, mutant, run), folder, ranks=ON_RANKS[run][2], timeout=60)
    else:
        with nullcontext() if mutant is None else mutant.made():
            RUNS[run](folder)


def _first_two_together(tasks, num_ranks):
    """A plan in which two ranks of three share the first client."""
    first, *others = [task.client for task in tasks]
    return RoundPlan([(first, range(2))], others, 0.0)


def _on_a_rank(mutant, run, folder):
    name, more, ranks, share = ON_RANKS[run]
    board = folder / "board"
    with (
        simulated.cuda(ranks // share, board=board) as gpu, counted_waits(gpu) as waits, _opened_groups() as opened,
        nullcontext() if mutant is None else mutant.made(),
        mock.patch.object(scheduler, "make_plan", _first_two_together) if more else nullcontext(),
    ):  # fmt: skip
        strategy = FederatedStrategy(ranks_per_device=share, timeout=SUM, round_timeout=ROUND)
        fit(folder / "run", name, *more, gpus=ranks, rounds=1 + bool(more), scored=False, strategy=strategy)
    assert not waits.between_batches, f"waits of sessions: {waits}"
    if more:
        wanted = [("gloo", ROUND), ("nccl", SUM)]
        assert opened == wanted, f"groups of ranks: {opened}"


@contextmanager
def _opened_groups():
    """Yield a list of the groups of some ranks that are opened: backend and timeout."""
    opened, new_group = [], dist.new_group

    def note(ranks=None, *, backend, timeout):
        opened.extend([(backend, timeout)] if ranks else [])
        return new_group(ranks, backend=backend, timeout=timeout)

    with mock.patch.object(dist, "new_group", note):
        yield opened


def _on_a_rank_without_a_gpu(mutant, run, folder):
    """Ranks of which two have one GPU, by mistake: a line with the setting that allows it, in place of NCCL's."""
    name, more, ranks, _ = ON_RANKS[run]
    with (
        simulated.cuda(ranks, board=folder / "board", buses=[3] * ranks),
        nullcontext() if mutant is None else mutant.made(), suppress(ConfigError),
    ):  # fmt: skip
        fit(folder / "run", name, *more, gpus=ranks, rounds=1, scored=False, strategy=FederatedStrategy())
        raise AssertionError("two ranks have trained on one GPU")
