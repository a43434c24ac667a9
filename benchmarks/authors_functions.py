"""Sessions of SSCU beside the functions of its authors, and of FedBPrompt's copy, run unchanged.

Both train two clients (drawn images, six people each) for three rounds on the same batches, with a small network
without kinks. The releases have no licence, so nothing of them is here: the functions are cut out of checkouts by the
syntax tree. Replaced are the network, data loaders, calls of ``.cuda()``, evaluations, and an old order of ``addmm_``'s
arguments. The memory takes each round's features, which the releases decide by a target.

    git clone https://github.com/Renchaoyue111/SSCU ../sscu               # 00d029b
    git clone https://github.com/leavlong/FedBPrompt ../fedbprompt        # a92c23c
    PYTHONPATH=tests python benchmarks/authors_functions.py --sscu ../sscu --fedbprompt ../fedbprompt

It prints the largest difference of a shared parameter or statistic after each round, of fedsim (float32), of the
release in float32, and of the release from parameters moved by 1e-7 of their size, each from the release in float64.
The last two are what rounding alone does. fedsim agrees in a round with at most 1e-5, or ten times the larger of the
two: they differ from each other by such factors, too. A round in which the larger is above 1e-2 is not judged: nothing
is left of the start there, and any two trainings would agree.
"""

from __future__ import annotations

import argparse
import ast
import copy
import io
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from fedsim.core.seeding import torch_generator
from fedsim.data import SyntheticReID
from fedsim.data.batches import people_batches
from fedsim.methods import SSCU
from fedsim.training.objective import Causality, Objective
from fedsim.training.settings import LocalTraining
from plain_loops import NECK, Federation, Participant, Separating, Smooth, separated, shares, stage_heads_of
from small import fit, make_data, make_model, vector

ROUNDS, BATCH, MARGIN = 3, 8, 0.3
SGD = {"lr": 0.005, "momentum": 0.9, "weight_decay": 5e-4}
SNR_WEIGHTS = (0.01, 0.01)
SMALL, FACTOR, LIMIT = 1e-5, 10, 1e-2
"""bars of the file's text"""
SLIPS: dict[str, Any] = {"memory_gradient": "after", "own_pass": True}
COPY: dict[str, Any] = {"statistics": "image", "triplet_on_images": True, "judge": "training", "lam_au": 5.0}
State = dict[str, Tensor]


class Setting(NamedTuple):
    """Sessions of one function."""

    function: str
    tau: float
    triplet: float = 0.0
    people: bool = True
    """whether a batch has four images of each of its people; else it is drawn from all images"""
    passes: int = 2
    leaves_out_lone_images: bool = False
    """whether the release's triplet loss is replaced by fedsim's, without images that are alone of their person"""

    @property
    def name(self) -> str:
        """The settings in words."""
        words = [self.function, f"tau {self.tau}"] + ["triplet"] * bool(self.triplet) + ["shuffled"] * (not self.people)
        return ", ".join(words + ["its triplet without lone images"] * self.leaves_out_lone_images)

    @property
    def is_copy(self) -> bool:
        """Whether the function is FedBPrompt's."""
        return self.function == "train_dacs_IL_VIT"

    @property
    def has_snr(self) -> bool:
        """Whether the network has SNR layers."""
        return self.function == "train_resnetsnr"


SETTINGS = [
    Setting("train_resnet", 0.5),
    Setting("train_resnet", 0.05),
    Setting("train_resnet", 0.5, 1.0),
    Setting("train_resnet", 0.05, 1.0),
    Setting("train_resnet", 0.5, 1.0, people=False, passes=1),
    Setting("train_resnet", 0.5, 1.0, people=False, passes=1, leaves_out_lone_images=True),
    Setting("train_resnetsnr", 0.5),
    Setting("train_resnetsnr", 0.5, 1.0),
    Setting("train_resnetsnr", 0.05, 1.0),
    Setting("train_dacs_IL_VIT", 0.5),
    Setting("train_dacs_IL_VIT", 0.5, 1.0),
    Setting("train_dacs_IL_VIT", 0.05, 1.0),
]


# -- the releases ------------------------------------------------------------------------------------------------------


def names_of(checkout: Path) -> dict[str, Any]:
    """Return the functions and classes of a release that a session uses, by name, compiled from its text."""
    space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "copy": copy, "time": time, "autograd": torch.autograd}
    wanted = {
        "utils/tools.py": {"get_entropy", "get_auth_loss", "freeze_model"},
        "models/memory.py": {"MC", "mc", "MemoryClassifier"},
        "models/style_mod.py": {"AugMod"},
        "loss/triplet.py": {"TripletLoss"},
        "user.py": {setting.function for setting in SETTINGS},
    }
    for file, names in wanted.items():
        for node in ast.walk(ast.parse((checkout / "reid" / file).read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
                exec(compile(ast.Module([node], []), f"{checkout.name}/{file}", "exec"), space)
    return space


class Net(nn.Module):
    """The small network with the outputs of a release's, in training and in evaluation mode."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        super().__init__()
        self.model, self.setting = model, setting

    def forward(self, x: Tensor) -> Any:
        """Return the features z [B, D]; in training mode with whatever else the release returns."""
        z = self.model(x).neck
        unit = F.normalize(z)
        if not self.training:
            return unit if self.setting.has_snr else z
        if not self.setting.has_snr:
            return z, unit
        of_layers = [part for layer in separated(self.model.backbone, x) for part in layer]
        return z, unit, *of_layers, *(torch.zeros(len(x), 1, dtype=x.dtype),) * 3  # theirs has a third layer


class Wrapped(nn.Module):
    """A memory as DataParallel would hold it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        """Return what the module does."""
        return self.module(*arguments)


def batches_of(client: Participant, round_: int, setting: Setting) -> list[tuple[Tensor, Tensor]]:
    """Return a client's batches as fedsim draws them."""
    if not setting.people:
        return client.batches(round_, setting.passes)
    generator = torch_generator(0, round_, client.name, "batches")
    order = [index for _ in range(setting.passes) for index in people_batches(client.y, BATCH, 4, generator)]
    return [(client.x[index], client.y[index]) for index in order]


def without_lone(features: Tensor, labels: Tensor) -> Tensor:
    """Return the batch-hard triplet loss of the images with another one of their person, a scalar."""
    distance = (features[:, None] - features).square().sum(2).clamp_min(1e-12).sqrt()
    of_person = labels[:, None] == labels
    positives = of_person & ~torch.eye(len(labels), dtype=torch.bool)
    hardest = distance.masked_fill(~positives, -torch.inf).amax(1), distance.masked_fill(of_person, torch.inf).amin(1)
    has_one = positives.any(1)
    terms = (MARGIN + hardest[0] - hardest[1])[has_one].clamp_min(0)
    return terms.mean() if len(terms) else features.sum() * 0


class Theirs:
    """The clients of a release, in a precision, and the rounds of a server around them."""

    def __init__(self, space: dict[str, Any], setting: Setting, heads: list[Any], dtype: torch.dtype) -> None:
        federation = Federation(make_data(towns()), Separating if setting.has_snr else Smooth)
        self.space, self.setting, self.dtype = space, setting, dtype
        self.server, self.clients = Net(federation.model, setting).to(dtype), federation.clients
        self.heads = [client.head.to(dtype) for client in self.clients]
        self.stage_heads = [self._stage_heads(heads, client.head.out_features) for client in self.clients]
        self.triplet = space["TripletLoss"](MARGIN)

    def rounds(self, moved: float = 0.0) -> Iterator[State]:
        """Yield the server's state after each round; parameters start off by about ``moved`` of their size."""
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in self.server.parameters():
                p.mul_(1 + moved * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(self.dtype))
        experts = [copy.deepcopy(self.server) for _ in self.clients]
        styles = [self._style(client) for client in self.clients]
        memories = [Wrapped(self._memory(client)) for client in self.clients]
        weights = shares(self.clients)
        for round_ in range(ROUNDS):
            features: list[list[Tensor]] = [[] for _ in self.clients]
            labels: list[list[Tensor]] = [[] for _ in self.clients]
            states = []
            for k in range(len(self.clients)):
                self_ = self._self(k, round_, memories)
                models = experts[k], copy.deepcopy(self.server), styles[k]
                kept = self.heads[k], *self.stage_heads[k], features, labels
                state = self.space[self.setting.function](self_, *models, round_, k, *kept)
                states.append(copy.deepcopy(state[0] if self.setting.is_copy else state))
            for memory, z, y in zip(memories, features, labels, strict=True):
                for of_batch in zip(z, y, strict=True):
                    memory.module.MomentumUpdate(*of_batch)
            mean = {n: sum(w * s[n] for w, s in zip(weights, states, strict=True)) for n in floats(states[0])}
            self.server.load_state_dict(mean, strict=False)
            yield {name.removeprefix("model."): tensor.double() for name, tensor in mean.items()}

    def _self(self, k: int, round_: int, memories: Sequence[nn.Module]) -> SimpleNamespace:
        """Return an object with what a session reads of itself."""
        batches = batches_of(self.clients[k], round_, self.setting)
        loader = iter([(x.to(self.dtype), None, y, None, None) for x, y in batches])
        triplet = without_lone if self.setting.leaves_out_lone_images else self.triplet
        return SimpleNamespace(
            memory=memories, max_iter=len(batches), ce_loss=nn.CrossEntropyLoss(),
            local_train=SimpleNamespace(new_epoch=lambda: None, next=lambda: next(loader)),
            tri_loss=lambda z, y: self.setting.triplet * triplet(z, y) if self.setting.triplet else 0.0,
            args=SimpleNamespace(lam=5 if self.setting.is_copy else 1, epochs=ROUNDS, use_prompt=False,
                                 print_freq=10**9, batch_size=BATCH),
            get_optimizer=lambda nets, **_: torch.optim.SGD([p for net in nets for p in net.parameters()], **SGD),
        )  # fmt: skip

    def _style(self, client: Participant) -> nn.Module:
        std, mean = torch.randn((2, *client.x.shape[1:]), generator=torch_generator(0, client.name, "style"))
        style: nn.Module = self.space["AugMod"](3, client.x.shape[3], client.x.shape[2])
        with torch.no_grad():
            style.get_parameter("shift_std").copy_(1 + 0.1 * std)
            style.get_parameter("shift_mean").copy_(0.1 * mean)
        return style.to(self.dtype)

    def _memory(self, client: Participant) -> nn.Module:
        z = self.server.eval()(client.x.to(self.dtype)).detach()
        people = client.head.out_features
        memory: nn.Module = self.space["MemoryClassifier"](z.shape[1], people, temp=self.setting.tau, momentum=0.9)
        memory.features = F.normalize(torch.stack([z[client.y == person].mean(0) for person in range(people)]))
        return memory

    def _stage_heads(self, heads: list[Any], people: int) -> list[nn.Linear]:
        """Return the classifiers of SNR's layers of a client, of which the release has three; the last has no input."""
        if not heads:
            return []
        layers = [nn.Linear(weight.shape[1], people) for weight, _ in heads]
        for layer, (weight, bias) in zip(layers, heads, strict=True):
            layer.weight.data, layer.bias.data = weight[:people].clone(), bias[:people].clone()
        return [layer.to(self.dtype) for layer in (*layers, nn.Linear(1, people))]


def floats(state: State) -> list[str]:
    """Return the names of a state's tensors without counters."""
    return [name for name, tensor in state.items() if tensor.is_floating_point()]


# -- fedsim ------------------------------------------------------------------------------------------------------------


def towns() -> SyntheticReID:
    """Return two drawn towns."""
    return SyntheticReID(clients=2, unseen=1, scale=0.2)


def ours(setting: Setting) -> tuple[list[State], list[Any]]:
    """Return fedsim's global model after each round, and the first classifiers of SNR's layers."""
    optimizer = partial(torch.optim.SGD, **SGD)
    sampler: dict[str, Any] = {"sampler": "people", "num_instances": 4} if setting.people else {}
    training = LocalTraining(batch_size=BATCH, local_epochs=setting.passes, optimizer=optimizer, **sampler)
    causality = Causality(form="entropy", weights=SNR_WEIGHTS) if setting.has_snr else None
    objective = Objective(triplet=setting.triplet, margin=MARGIN, causality=causality)
    options = SLIPS | (COPY if setting.is_copy else {"judge": "itself"} if setting.has_snr else {})
    if not setting.triplet:
        options |= {"triplet_on_images": False}
    states = []
    for rounds in range(1, ROUNDS + 1):
        backbone = Separating() if setting.has_snr else Smooth()
        method = SSCU(temperature=setting.tau, **options)
        model = make_model(method, backbone=backbone, neck=NECK, client=training, objective=objective)
        fit(model, make_data(towns()), rounds=rounds)
        [(arch, flat_model)] = model.parts.models.items()
        entries = flat_model.flat.shared_entries
        states.append({e.name: vector(model, arch)[e.span].view(e.shape).double() for e in entries})
    return states, stage_heads_of(model) if setting.has_snr else []


def differences(setting: Setting, space: dict[str, Any]) -> list[list[float]]:
    """Return three differences from the release in float64 after each round; see the file's text."""
    states_here, heads = ours(setting)
    exact = [*Theirs(space, setting, heads, torch.float64).rounds()]
    rounded = [*Theirs(space, setting, heads, torch.float32).rounds()]
    moved = [*Theirs(space, setting, heads, torch.float64).rounds(moved=1e-7)]
    return [[largest(a, b) for a, b in zip(states, exact, strict=True)] for states in (states_here, rounded, moved)]


def largest(a: State, b: State) -> float:
    """Return the largest difference of two states."""
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def verdict(differences_here: list[float], rounded: list[float], moved: list[float]) -> str:
    """Return the rounds that are judged, from 1, and whether fedsim agrees in them.

    >>> verdict([1e-7, 3e-5, 0.5], [1e-7, 5e-6, 0.4], [2e-7, 2e-6, 0.1])
    '1, 2: yes'
    """
    bars = [max(pair) for pair in zip(rounded, moved, strict=True)]
    judged = [round_ for round_, bar in enumerate(bars) if bar <= LIMIT]
    agrees = all(differences_here[round_] <= max(SMALL, FACTOR * bars[round_]) for round_ in judged)
    return f"{', '.join(str(round_ + 1) for round_ in judged)}: {'yes' if agrees else 'no'}"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sscu", type=Path, required=True, help="checkout of Renchaoyue111/SSCU")
    parser.add_argument("--fedbprompt", type=Path, required=True, help="checkout of leavlong/FedBPrompt")
    parser.add_argument("--only", default="", help="part of the names of the settings to run")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)  # of F.softmax without a dimension, in the releases
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    addmm = torch.Tensor.addmm_
    torch.Tensor.addmm_ = lambda tensor, *args, **named: (
        addmm(tensor, *args[2:], beta=args[0], alpha=args[1]) if len(args) == 4 else addmm(tensor, *args, **named)
    )
    spaces = {True: names_of(options.fedbprompt), False: names_of(options.sscu)}
    rows = []
    for setting in (setting for setting in SETTINGS if options.only in setting.name):
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            columns = differences(setting, spaces[setting.is_copy])
        shown = [", ".join(f"{value:.1e}" for value in column) for column in columns]
        rows.append([setting.name, *shown, verdict(*columns)])
    headers = ["function and settings", "fedsim", "release in float32", "release moved by 1e-7", "agrees in rounds"]
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
