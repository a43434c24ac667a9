"""Mistakes that a CPU does not show: text replacements in our own source, each with the run that finds it."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "fedsim"


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

    def apply(self, folder):
        """Write a copy of the package with the mistake to a folder."""
        shutil.copytree(SOURCE, folder / "fedsim", ignore=shutil.ignore_patterns("__pycache__"))
        path = folder / "fedsim" / self.file
        path.write_text(self.mutated())

    def mutated(self):
        """Return the file with the mistake."""
        text = (SOURCE / self.file).read_text()
        assert text.count(self.old) == 1, f"{self}: {text.count(self.old)} places"
        return text.replace(self.old, self.new)


MUTANTS = [
    # -- a device that is left out
    Mutant("core/flat.py", "dtype=torch.float32, device=device)", "dtype=torch.float32)", "fit"),
    Mutant("training/client.py", "bound.to(self.device) for part", "bound.to('cpu') for part", "fit"),
    Mutant("training/client.py", "t.to(self.device, non_blocking=True, copy=True)", "t.clone()", "host store"),
    Mutant("training/server.py", "tensor.detach().to(self.models[arch].device, copy=True)", "tensor.detach().cpu()",
           "control"),
    Mutant("training/batch.py", "send(self.labels[part], self.device)", "self.labels[part]", "head accuracy"),
    Mutant("training/visit.py", "send(labels.index_select(0, index), images.device)", "labels.index_select(0, index)",
           "fit"),
    Mutant("training/public.py", "send(self.images[index], self._device)", "self.images[index]", "distil"),
    Mutant("training/public.py", "send(batch, self._device)", "batch", "recalibrate"),
    Mutant("training/labels/proxies.py", "send(kinds.T.contiguous(), device)", "kinds.T.contiguous()", "clusters"),
    Mutant("training/labels/source.py", "model.network.num_features, device=model.device)",
           "model.network.num_features)", "bottom up"),
    Mutant("training/labels/bottom_up.py", "labels.argsort(stable=True).to(device)]",
           "labels.argsort(stable=True)].cpu()", "bottom up"),
    Mutant("training/labels/bottom_up.py", "sizes.to(device)", "sizes", "bottom up"),
    Mutant("federation/assembly.py", "how.objective.head_std).to(device)", "how.objective.head_std)", "fit"),
    Mutant("federation/aggregation.py", "tensor.to(total.device).flatten()", "tensor.flatten()", "distil"),
    Mutant("federation/masked.py", "dtype=torch.bool, device=total.device)", "dtype=torch.bool)", "prune"),
    Mutant("federation/privacy.py", "return noise.mul_(std).to(flat.buffer.device)", "return noise.mul_(std)", "noise"),
    Mutant("functional/losses.py", "dtype=torch.bool, device=labels.device)", "dtype=torch.bool)", "triplets"),
    Mutant("functional/losses.py", "dtype=torch.long, device=features.device)", "dtype=torch.long)", "moon"),
    Mutant("functional/retrieval.py", "len(groups) + 1, device=device)", "len(groups) + 1)", "prune"),
    Mutant("methods/scaffold.py", "num_shared_parameters, device=client.device)", "num_shared_parameters)", "control"),
    Mutant("methods/pruned.py", "dtype=torch.bool, device=model.device)", "dtype=torch.bool)", "new mask"),
    Mutant("methods/fedpav.py", "teacher.network.num_features, device=client.device)",
           "teacher.network.num_features)", "distil"),
    Mutant("methods/fedpav.py", "features[send(index, client.device)]", "features.cpu()[send(index, client.device)]",
           "distil"),
    Mutant("data/augmentation.py", "generator=generator, device=images.device)", "generator=generator)", "fit"),
    Mutant("data/augmentation.py", "    column = torch.arange(width, device=x.device)\n",
           "    column = torch.arange(width)\n", "fit"),
    Mutant("data/pixels.py", "yield send(self.pixels.index_select(0, where), self.device)",
           "yield self.pixels.index_select(0, where)", "host cache"),
    Mutant("evaluation/backends.py", "dtype=torch.int64, device=keys.device)", "dtype=torch.int64)", "fit"),
    Mutant("evaluation/feature_file.py", "query=query.cpu().numpy()", "query=query.numpy()", "predict"),
    Mutant("evaluation/reranking.py", "torch.as_tensor(found.similarity, device=query.device)",
           "torch.as_tensor(found.similarity)", "rank"),
    Mutant("generation/training.py", "draw.lenders.to(self.device)", "draw.lenders", "augment"),
    # -- a generator of the wrong device
    Mutant("training/client.py", 'self.generator(f"dropout{role}", device=self.device)',
           'self.generator(f"dropout{role}")', "dropout"),
    Mutant("training/client.py", 'self.client_name, purpose, device=device)', "self.client_name, purpose)", "fit"),
    Mutant("training/public.py", '"public augment", device=self._device)', '"public augment")', "distil"),
    Mutant("methods/fedpav.py", 'client.generator("cdw augment", device=client.device)',
           'client.generator("cdw augment")', "distil"),
    Mutant("training/visit.py", "self._stream(purpose, self._images.device)", 'self._stream(purpose, "cpu")', "fit"),
    # -- waits and races
    Mutant("training/tally.py", "self._losses.append(loss)", "self._losses.append(loss.cpu())", "waits"),
    Mutant("core/transfer.py", "tensor.to(device, non_blocking=True)", "tensor.to(device)", "waits"),
    Mutant("training/tally.py", "self._guesses.append(guesses)", "self._guesses.append(guesses)\n        loss.item()",
           "waits"),
    Mutant("functional/losses.py", "if values.is_cpu:", "if True:", "waits for cameras"),
    Mutant("evaluation/backends.py", "zip(ranks.cpu().numpy(), counts, strict=True)",
           'zip(ranks.to("cpu", non_blocking=True).numpy(), counts, strict=True)', "fit"),
    Mutant("strategy/checkpoint_files.py", "tensor.detach().cpu().contiguous()",
           'tensor.detach().to("cpu", non_blocking=True).contiguous()', "control"),
    Mutant("evaluation/backends.py", "with torch.cuda.device(query.device):", "if True:", "rank"),
    # -- recorded steps
    Mutant("training/graphs.py", "            mine.copy_(given)", "            mine", "graph"),
    Mutant("training/graphs.py", "tally.add(loss.clone(), guesses.clone(),", "tally.add(loss, guesses,", "graph"),
    Mutant("training/graphs.py", "WARM_UP = 3\n", "WARM_UP = 0\n", "graph"),
    Mutant("training/graphs.py", "optimizer.num_steps += steps", "optimizer.num_steps += 0", "graph control"),
    Mutant("training/graphs.py", "[(o.rates, o.num_resets)", "[o.num_resets", "graph rates"),
    Mutant("training/graphs.py", "tally, visit.report = noted, losses.append", "report = losses.append", "graph"),
    Mutant("core/allocator.py", "graph.register_generator_state(generator)", "graph.pool", "graph"),
    Mutant("core/allocator.py", "        self._stream.wait_stream(around)\n", "", "graph"),
    Mutant("core/allocator.py", "        around.wait_stream(self._stream)\n", "", "graph, last batches"),
    Mutant("training/optimizer.py", 'group["capturable"] = True', 'group["capturable"] = False', "graph Adam"),
    Mutant("training/client.py", "self.visit.report(loss.detach())", "self.visit.report(loss.item())", "graph"),
    # -- copies on a stream of their own
    Mutant("core/transfer.py", "        work.wait_event(arrived)\n", "", "prefetch"),
    Mutant("core/transfer.py", "tensor.record_stream(work)", "tensor", "prefetch"),
    Mutant("core/transfer.py", "return next(tensors, None), copies.record_event()",
           "event = copies.record_event()\n            return next(tensors, None), event", "prefetch"),
    # -- what has no deterministic form
    Mutant("functional/retrieval.py", "found.cumsum(1).double()", "hits.cumsum(1)", "prune"),
    Mutant("training/labels/bottom_up.py",
           'of_clusters = torch.segment_reduce(similarity.block(rows), "max", lengths=widths[clusters])',
           'of_clusters = similarity.block(rows).cumsum(1)', "bottom up"),
    # -- collectives
    Mutant("strategy/strategy.py", "self._wait(dist.all_reduce(payload, group=self._patient, async_op=True))",
           "self._wait(dist.all_reduce(payload, async_op=True))", "two GPUs"),
    Mutant("strategy/strategy.py", "self._wait(dist.all_reduce(tensor, async_op=True))",
           "self._wait(dist.all_reduce(tensor.cpu(), async_op=True))", "two GPUs"),
    Mutant("federation/round.py", "axis.begin(round_)\n",
           "axis.begin(round_)\n        if self.strategy.global_rank:\n            self.strategy.barrier()\n",
           "two GPUs"),
    Mutant("strategy/strategy.py", 'return "gloo" if self.ranks_per_device > 1 else str(', "return str(",
           "shared GPUs"),
    Mutant("strategy/sharing.py", "dist.all_reduce(tensor, group=self._among",
           "dist.all_reduce(host, group=self._among", "shared GPUs"),
]  # fmt: skip

# -- runs that find them, each in a process of its own, which imports the package with the mistake ---------------------


def _fit(folder, name, *options, waits=None, **settings):
    """Fit on a pretended GPU, deterministically; more than ``waits`` per visit are a mistake."""
    import pretend
    from runs import fit

    with pretend.cuda(1) as gpu:
        if waits is None:
            fit(folder / "run", name, "--trainer.deterministic=true", *options, gpus=1, **settings)
        else:
            from budgets import counted_waits

            with counted_waits(gpu) as found:
                fit(folder / "run", name, *options, gpus=1, **settings)
            assert max(found.of_visits) <= waits, f"waits of visits: {found}"
            assert not found.between_batches, f"waits of visits: {found}"


def _graph(folder, name, *options):
    """Fit with graphs, all of whose steps but the first ones are replayed, and without: the bits must be equal."""
    import pretend
    from runs import differences, fit

    found, more = [], ["--model.client.batch_size=4", "--data.limit_client_batches=6", *options]
    for graph in ("true", "false"):
        with pretend.cuda(1) as gpu:
            found.append(fit(folder / graph, name, f"--model.client.graph={graph}", *more, gpus=1, rounds=1))
        replays = gpu.kernels["replay"]
        clients = 2
        assert graph == "false" or replays >= 3 * clients, f"steps stay plain: only {replays} were replayed"
    assert not (different := differences(*found)), f"other bits: {different}"


def _prefetch(folder):
    """Fit with copies ahead, of images in the host's memory; the bits must be those without."""
    import pretend
    from runs import differences, fit

    found, far = [], ["--data.cache=host", "--data.size=[128,64]", "--data.limit_client_batches=5"]
    for prefetch in ("true", "false"):
        with pretend.cuda(1):
            more = [*far, f"--model.client.prefetch={prefetch}"]
            found.append(fit(folder / prefetch, "fedpav", *more, gpus=1, rounds=1))
    assert not (different := differences(*found)), f"other bits: {different}"


def _commands(folder, *commands):
    """Fit, then call other commands on the pretended GPU."""
    import pretend
    from fedsim.__main__ import main
    from runs import options

    with pretend.cuda(2):
        for words in (options(folder / "run", "fedpav", gpus=1, rounds=1), *commands):
            assert main([str(word) for word in words]) == 0


def _predict(folder):
    run = folder / "run"
    where = ["--trainer.accelerator=gpu", "--trainer.devices=1"]
    _commands(folder, ["predict", "--config", run / "config.yaml", "--ckpt_path", "last", "--run_dir", run, *where])


def _rank(folder):
    import numpy as np

    rng = np.random.default_rng(0)
    pids, cameras = np.arange(12) % 4, np.arange(12) % 3
    arrays = {"query": rng.normal(size=(12, 8)), "gallery": rng.normal(size=(12, 8))}
    labels = {f"{part}_{what}": values for part in arrays for what, values in (("pids", pids), ("camids", cameras))}
    features = {part: values.astype(np.float32) for part, values in arrays.items()}
    np.savez(folder / "features.npz", **features, **labels)
    options = ["--device", "cuda:1", "--backend", "faiss", "--expand", 2, "--alpha", 1.0]
    _commands(folder, ["rank", folder / "features.npz", *options])


def _augment(folder):
    from small_generators import STEPS, WIDTHS

    (folder / "data.yaml").write_text(
        "data: {source: {class_path: SyntheticReID, init_args: {clients: 1, unseen: 1, scale: 0.2}}, size: [32, 16], "
        "val: none}\n"
    )
    where = ["--config", folder / "data.yaml", "--output", folder / "generators", "--device", "cuda"]
    _commands(folder, ["augment", "fit", *where, *STEPS, *WIDTHS])


def two_ranks(folder):
    """What each of two ranks does."""
    import pretend
    from runs import fit

    with pretend.cuda(2, board=folder / "board"):
        fit(folder / "run", "fedpav_cdw", gpus=2, rounds=1)


def _two_gpus(folder):
    from failing import run_on_ranks

    run_on_ranks(two_ranks, folder, timeout=60)


def four_ranks(folder):
    """What each of four ranks does, two on each GPU."""
    import pretend
    from runs import fit

    with pretend.cuda(2, board=folder / "board"):
        fit(folder / "run", "fedpav", "--trainer.strategy.ranks_per_device=2", gpus=4, rounds=1)


def _shared_gpus(folder):
    from failing import run_on_ranks

    run_on_ranks(four_ranks, folder, ranks=4, timeout=60)


RUNS = {
    "augment": _augment,
    "bottom up": lambda folder: _fit(folder, "fedureid"),
    "clusters": lambda folder: _fit(folder, "fedcapr", rounds=1),
    "control": lambda folder: _fit(folder, "scaffold"),
    "distil": lambda folder: _fit(
        folder, "fedpav_kd_cdw", "--model.method.distillation.view=seeded_train", "--model.method.weighting=cdw",
        "--model.server_optimizer=null", rounds=1,
    ),
    "dropout": lambda folder: _fit(folder, "fedpav", "--model.neck={kind: linear, dim: 8, dropout: 0.5}", rounds=1),
    "fit": lambda folder: _fit(folder, "fedpav", rounds=1),
    "graph": lambda folder: _graph(folder, "fedpav"),
    "graph, last batches": lambda folder: _graph(
        folder, "fedpav", "--data.limit_client_batches=null", "--model.client.batch_size=7"
    ),
    "graph Adam": lambda folder: _graph(
        folder, "fedavg", "--model.client.optimizer=AdamW", "--model.client.optimizer.lr=0.001"
    ),
    "graph control": lambda folder: _graph(folder, "scaffold"),
    "graph rates": lambda folder: _graph(
        folder, "fedavg", "--model.client.long_round={round: 1, local_epochs: 3, schedule: {kind: step, step: 1}}"
    ),
    "head accuracy": lambda folder: _fit(folder, "lotteryfl", rounds=1),
    "host cache": lambda folder: _fit(folder, "fedpav", "--data.cache=host", rounds=1),
    "host store": lambda folder: _fit(folder, "scaffold", "--model.client_store=host"),
    "moon": lambda folder: _fit(folder, "moon"),
    "new mask": lambda folder: _fit(folder, "feddip", rounds=1),
    "noise": lambda folder: _fit(
        folder, "fedpav", "--model.privacy=WhiteNoise", "--model.privacy.beta=0.001", rounds=1
    ),
    "predict": _predict,
    "prefetch": _prefetch,
    "prune": lambda folder: _fit(folder, "fedklpr"),
    "rank": _rank,
    "recalibrate": lambda folder: _fit(
        folder, "fedavg", "--model.bn_stats=recalibrate", "--data.public=new0", rounds=1
    ),
    "triplets": lambda folder: _fit(
        folder, "fedpav", "--model.objective.triplet=0.5", "--model.client.sampler=identity", rounds=1
    ),
    "shared GPUs": _shared_gpus,
    "two GPUs": _two_gpus,
    "waits": lambda folder: _fit(folder, "fedpav", waits=2),
    "waits for cameras": lambda folder: _fit(
        folder, "fedcapr", "--model.method.reg_last_camera_only=true", "--model.method.reg_from=1", waits=23, rounds=1
    ),
}  # fmt: skip


def play(folder, run, log):
    """Call a run with the package in ``folder``, in a process that has not imported fedsim yet."""
    with open(log, "wb", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    tests = Path(__file__).parent
    sys.path[:0] = [str(folder), str(tests), str(tests.parent)]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])  # for processes that this one starts
    import torch

    import fedsim

    assert fedsim.__file__.startswith(str(folder)), fedsim.__file__
    torch.set_num_threads(1)
    RUNS[run](folder)
