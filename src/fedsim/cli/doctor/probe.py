"""The processes of :mod:`fedsim.cli.doctor.facts`: ``python -m fedsim.cli.doctor.probe FUNCTION ARGUMENTS``.

Each function returns plain values, and imports the library that it tests itself.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.core.errors import first_line

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from fedsim.functional.neighbours import Neighbours, Search

    Doubles = NDArray[np.float64]

_PACKAGES = ("faiss-gpu", "faiss-gpu-cuvs", "faiss-gpu-cu12", "faiss-gpu-cu11", "faiss-cpu")
_CLOSE = 1e-5  # similarities are float32 sums of 256 products, which differ by less between orders of summation
_TRIED = (64, 4096, 256, 50)  # queries, gallery, features, neighbours


def torch_and_plan(requested: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts of torch and its GPUs, and the ranks of a fit according to Lightning and the launcher."""
    return {"torch": torch_facts(), "plan": plan(requested)}


def torch_facts() -> dict[str, Any]:
    """Return the fields of :class:`fedsim.cli.doctor.facts.TorchFacts`."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"problem": f"torch cannot be imported: {first_line(error)}"}
    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda}
    with suppress(AttributeError):  # where torch is built without it
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    gpus = torch.cuda.device_count()
    if gpus == 0 and torch.version.cuda is not None:
        try:
            torch.cuda.init()
            facts["why_no_gpu"] = "no GPU was found"
        except (RuntimeError, AssertionError) as error:
            facts["why_no_gpu"] = first_line(error)
    return facts | {"gpus": [gpu_facts(torch.device("cuda", index)) for index in range(gpus)]}


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """Return the fields of :class:`fedsim.cli.doctor.facts.Gpu`."""
    import torch

    facts: dict[str, Any] = {"name": "", "total": 0, "free": 0}
    try:
        facts["name"] = torch.cuda.get_device_name(device)
        facts["free"], facts["total"] = torch.cuda.mem_get_info(device)
        small = torch.arange(256, dtype=torch.float32).reshape(16, 16) % 7  # integers: the product is exact
        if not torch.equal((small.to(device) @ small.to(device)).cpu(), small @ small):
            facts["problem"] = "a product of two matrices is wrong"
    except (RuntimeError, AssertionError) as error:
        facts["problem"] = first_line(error)
    return facts


def plan(requested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of :class:`fedsim.cli.doctor.facts.FitDevices`; ``requested``: those of ``RequestedFit``."""
    try:
        from lightning import Trainer

        from fedsim.core.devices import check_accelerator
        from fedsim.core.errors import FedSimError
        from fedsim.core.shared import memory_folder
        from fedsim.federation.checks.compatibility import naming_the_field
        from fedsim.strategy.launch import find_launch, follow_launcher
        from fedsim.strategy.sharing import gpus_for
        from fedsim.strategy.strategy import FederatedStrategy
    except (ImportError, OSError) as error:
        return {"problem": f"a library cannot be imported: {first_line(error)}"}
    try:
        launch = find_launch()
        on_each, backend = requested["ranks_per_device"], requested["process_group_backend"]
        devices, num_nodes = follow_launcher(requested["devices"], requested["num_nodes"], ranks_per_device=on_each)
        gpus = gpus_for(devices, on_each)
        check_accelerator(requested["accelerator"], warns=False)
        options = {"accelerator": requested["accelerator"], "devices": gpus, "num_nodes": num_nodes}
        with naming_the_field(options):
            trainer = Trainer(
                **options, logger=False, enable_progress_bar=False,
                strategy=FederatedStrategy(ranks_per_device=on_each, process_group_backend=backend),
                enable_checkpointing=False, enable_model_summary=False, use_distributed_sampler=False,
            )  # fmt: skip
            strategy = trainer.strategy
            assert isinstance(strategy, FederatedStrategy)
            strategy.check()
            strategy.check_device()
    except FedSimError as error:
        return {"refusal": str(error), "shared": str(memory_folder())}
    names = [str(device) for device in strategy.parallel_devices or [strategy.root_device]]
    facts = {"devices": names, "world": trainer.world_size, "shared": str(memory_folder())}
    return facts | {"launcher": launch.launcher if launch else "", "by": backend or ""}


def faiss() -> dict[str, Any]:
    """Return the fields of :class:`fedsim.cli.doctor.facts.FaissFacts`; torch is loaded first, as in a run."""
    facts = faiss_package()
    try:
        import torch

        from fedsim.evaluation.backends import make_search
    except (ImportError, OSError) as error:
        return facts | {"problem": f"torch cannot be imported: {first_line(error)}"}
    try:
        import faiss as library
    except Exception as error:  # it raises RuntimeError, too, where its CUDA libraries are missing
        return facts | {"problem": first_line(error)}
    facts["for_gpu"] = hasattr(library, "StandardGpuResources")
    facts["sees"] = library.get_num_gpus() if facts["for_gpu"] else 0
    usable = min(torch.cuda.device_count(), facts["sees"])
    trials = {}
    for device in [torch.device("cpu"), *(torch.device("cuda", index) for index in range(usable))]:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # as in a rank of a fit
            trials[str(device)] = disagreement(*neighbours_on(device, make_search("faiss", device)))
        except Exception as error:  # any error of the library is a result of the trial
            trials[str(device)] = first_line(error)
    return facts | {"trials": trials}


def faiss_package() -> dict[str, Any]:
    """Return version and CUDA libraries of the installed FAISS, from the metadata of its package."""
    for name in _PACKAGES:
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        needs = " ".join(package.requires or ())
        cuda = re.search(r"nvidia-cuda-runtime(?:-cu(\d+))?", needs)
        return {"version": f"{name} {package.version}", "cuda": "" if cuda is None else cuda[1] or "13"}
    return {}


def neighbours_on(device: torch.device, search: Search) -> tuple[Neighbours, Neighbours, Doubles]:
    """Return torch's neighbours, those of ``search``, and all similarities [64, 4096] in float64."""
    import torch

    from fedsim.functional.neighbours import nearest

    num_queries, num_gallery, features, k = _TRIED
    stream = torch.Generator().manual_seed(0)
    query, gallery = (
        torch.nn.functional.normalize(torch.randn(n, features, generator=stream)) for n in (num_queries, num_gallery)
    )
    lists = (find(query.to(device), gallery.to(device), k) for find in (nearest, search))
    return next(lists), next(lists), (query.double() @ gallery.double().T).numpy()


def disagreement(ours: Neighbours, theirs: Neighbours, similarity: Doubles) -> str:
    """Return the difference of two lists of neighbours as a text; empty if only equally similar images are exchanged.

    ``similarity`` [Q, G] are those of all images, float64.
    """
    import numpy as np

    similarity_ours, similarity_theirs = (np.take_along_axis(similarity, lists.index, 1) for lists in (ours, theirs))
    gap = max(np.abs(similarity_ours - similarity_theirs).max(), np.abs(theirs.similarity - similarity_theirs).max())
    return "" if gap <= _CLOSE else f"its neighbours are not those of torch: similarities differ by {gap:.1e}"


def sums(rank: int, devices: list[str], store: str, seconds: float) -> dict[str, Any]:
    """Take part in a sum over ranks; see :func:`fedsim.strategy.trial.try_sum`."""
    import torch

    from fedsim.strategy.trial import try_sum

    try:
        try_sum(rank, [torch.device(device) for device in devices], Path(store), seconds=seconds)
    except RuntimeError as error:
        return {"problem": first_line(error)}
    return {}


def readers(workers: int) -> dict[str, Any]:
    """Let reading processes hand over batches, in the TMPDIR and /dev/shm of this machine."""
    from fedsim.data.pixels import problem_of_readers

    return {"problem": problem_of_readers(workers)}


def main() -> None:
    """Call the function that the command line names; write its result as JSON in the last line."""
    name, arguments = sys.argv[1:]
    functions: dict[str, Callable[..., dict[str, Any]]] = {
        "torch_and_plan": torch_and_plan,
        "faiss": faiss,
        "sums": sums,
        "readers": readers,
    }
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    result = functions[name](*json.loads(arguments))
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
