"""Methods that are wrong in one way each; a checker must refuse all of them, and name the fault."""

import functools
import os
import random
import time
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from fedsim.functional.weighting import uniform_weights
from fedsim.methods.base import InitialState, Method, Payload, Weights
from fedsim.models.groups import BODY
from fedsim.training.messages import Measured, Upload

CACHE = {}
ROUNDS_SEEN = []
LAST = None


class Plain(Method):
    """FedPav in its plainest form: nothing is wrong with it."""

    shared_groups = BODY


class PlainWithControl(Plain):
    """Sends and uploads a tensor that it declares: nothing is wrong with it either."""

    server_every = 1

    def initial_state(self, model):
        return InitialState(server={"control": torch.zeros(3)})

    def payload(self, server, arch, round_):
        return Payload(down=("control",), up={"change": (3,)})

    def upload(self, client):
        return Upload(client.model.shared, {"change": client.received.extras["control"] + 1})

    def server_step(self, server):
        for arch, answers in server.answers.items():
            server.keep(arch, "control", answers.extras["change"])


class PlainWithPersonal(Plain):
    """Keeps a model, moves toward it, and delivers it: nothing is wrong."""

    delivers = "personalised"

    def upload(self, client):
        client.keep("personal", client.model.whole)
        return super().upload(client)

    def personalise(self, client):
        super().personalise(client)
        if "personal" in client.kept:
            client.model.whole.copy_(client.kept["personal"])


# -- state outside of the checkpoint -----------------------------------------------------------------------------------


class OnItself(Plain):
    """Pulls toward the last client's model, which it keeps on itself."""

    def loss(self, client, batch):
        loss = super().loss(client, batch)
        if hasattr(self, "last"):
            loss = loss + 0.1 * (self.last - client.model.shared).square().mean()
        return loss

    def upload(self, client):
        self.last = client.model.shared.detach().clone()
        return super().upload(client)


@dataclass(frozen=True, kw_only=True)
class InADictOfItself(Plain):
    """Keeps a number for each client in a dictionary that is its setting."""

    seen: dict = None

    def __post_init__(self):
        object.__setattr__(self, "seen", {})

    def take_step(self, client, loss):
        self.seen[client.client_name] = self.seen.get(client.client_name, 0) + 1
        client.step(loss * (1 + 0.1 * self.seen[client.client_name]))


class OnTheClass(Plain):
    count = 0

    def upload(self, client):
        OnTheClass.count += 1
        return Upload(client.model.shared * (1 + OnTheClass.count * 1e-3))


class InAGlobal(Plain):
    def download(self, client):
        super().download(client)
        if client.client_name in CACHE:
            client.model.shared.lerp_(CACHE[client.client_name], 0.1)

    def upload(self, client):
        CACHE[client.client_name] = client.model.shared.clone()
        return super().upload(client)


class InAGlobalThatIsSet(Plain):
    def upload(self, client):
        global LAST
        scale = 1.0 if LAST is None else 1.001
        LAST = client.model.shared.clone()
        return Upload(client.model.shared * scale)


class InADefaultValue(Plain):
    def upload(self, client, seen=[]):  # noqa: B006 - the fault
        seen.append(client.client_name)
        return Upload(client.model.shared * (1 + len(seen) * 1e-3))


class OnAFunction(Plain):
    def upload(self, client):
        count = OnAFunction.upload.__dict__.setdefault("count", [0])
        count[0] += 1
        return Upload(client.model.shared * (1 + count[0] * 1e-3))


class InACache(Plain):
    """A cache of a function whose result is not of its arguments alone."""

    def upload(self, client):
        return Upload(client.model.shared * _first_factor(client.client_name, client))


@functools.cache
def _first_factor(name, client):
    return 1 + 1e-3 * float(client.model.shared.abs().mean())


class OnTheClient(Plain):
    def upload(self, client):
        client.sessions = getattr(client, "sessions", 0) + 1
        return Upload(client.model.shared * (1 + client.sessions * 1e-3))


class OnTheServer(Plain):
    server_every = 1

    def server_step(self, server):
        server.momentum = getattr(server, "momentum", 0.0) + 1.0
        for arch in server.vectors:
            server.vector(arch).mul_(1 - 1e-3 * server.momentum)


class InAReplica(Plain):
    """Reads a replica's weights, which are those of the client before."""

    def download(self, client):
        super().download(client)
        replica = client.model.replica("teacher")
        client.model.shared.lerp_(replica.shared, 0.1)
        replica.shared.copy_(client.received.vector)

    def upload(self, client):
        client.model.replica("teacher").shared.copy_(client.model.shared)
        return super().upload(client)


class InTheImages(Plain):
    """Darkens the client's own images a bit in each round."""

    def train(self, client):
        client.images.labels = client.images.labels.roll(1)
        super().train(client)


class InAFile(Plain):
    """Counts rounds in a file."""

    def upload(self, client):
        path = f"/tmp/fedsim-faulty-{os.getpgrp()}"
        with open(path, "a+") as file:
            file.write("x")
            return Upload(client.model.shared * (1 + file.tell() * 1e-3))


# -- what a hook reads and changes -------------------------------------------------------------------------------------


class ReadsUndeclared(PlainWithControl):
    def payload(self, server, arch, round_):
        return Payload(up={"change": (3,)})


class AsksForUndeclared(PlainWithControl):
    """Goes on without the tensor if it is not there."""

    def payload(self, server, arch, round_):
        return Payload(up={"change": (3,)})

    def upload(self, client):
        return Upload(client.model.shared, {"change": client.received.extras.get("control", torch.zeros(3))})


class DeclaresUnkept(Plain):
    def payload(self, server, arch, round_):
        return Payload(down=("control",))


class SendsUnread(Plain):
    def initial_state(self, model):
        return InitialState(server={"control": torch.zeros(3)})

    def payload(self, server, arch, round_):
        return Payload(down=("control",))


class UploadsUnread(PlainWithControl):
    def server_step(self, server):
        for arch in server.answers:
            server.keep(arch, "control", server.kept[arch]["control"] + 1)


class UploadsUndeclared(PlainWithControl):
    def payload(self, server, arch, round_):
        return Payload(down=("control",))


class ReadsTheServerFromAGlobal(PlainWithControl):
    """Has a way to the server beside the message."""

    def payload(self, server, arch, round_):
        CACHE["server"] = server
        return Payload(up={"change": (3,)})

    def upload(self, client):
        return Upload(client.model.shared, {"change": CACHE["server"].kept["smallcnn"]["control"] + 1})


class ReadsAnotherClient(Plain):
    def download(self, client):
        super().download(client)
        for name in ("town0", "town1", "town2"):
            if name != client.client_name and client.store.read(name):
                client.model.shared.mul_(1 + 1e-3 * float(client.store.read(name)["state"].abs().mean()))


class MutatesTheServer(Plain):
    def download(self, client):
        client.model.shared.copy_(client.received.vector.mul_(0.999))


class MutatesTheControl(PlainWithControl):
    def upload(self, client):
        return Upload(client.model.shared, {"change": client.received.extras["control"].add_(1)})


class EvaluationMovesState(PlainWithPersonal):
    def personalise(self, client):
        super().personalise(client)
        client.store.write(client.client_name, {n: t + 1 for n, t in client.private_state().items()})


class PersonalisesSecretly(PlainWithPersonal):
    delivers = "global"


class OtherRanksLackIt(Plain):
    """What aggregate reads is kept by server_step on rank 0 alone, and is not declared."""

    server_every = 1
    requires = frozenset({"uploads"})

    def initial_state(self, model):
        return InitialState(server={"center": model.shared})

    def aggregate(self, server, arch, uploads, reports):
        mean = uploads.combine(lambda rows: rows.mean(0))
        return mean.lerp(server.kept[arch]["center"], 0.1)

    def server_step(self, server):
        for arch in server.vectors:
            server.keep(arch, "center", server.vector(arch) * 0.9)


# -- chance, rank and clock --------------------------------------------------------------------------------------------


class DrawsFromTorch(Plain):
    def upload(self, client):
        return Upload(client.model.shared + 1e-3 * torch.randn_like(client.model.shared))


class DrawsInTheLoss(Plain):
    def loss(self, client, batch):
        return super().loss(client, batch) * (1 + torch.rand(()))


class DrawsFromNumpy(Plain):
    def take_step(self, client, loss):
        client.step(loss * float(np.random.rand()))  # noqa: NPY002 - the fault


class DrawsFromRandom(Plain):
    def weights(self, reports):
        numbers = {name: random.random() for name in reports}
        return Weights({name: number / sum(numbers.values()) for name, number in numbers.items()})


class DrawsAtTheStart(Plain):
    def initial_state(self, model):
        return InitialState(client={"direction": torch.randn(3)})

    def upload(self, client):
        return Upload(client.model.shared * (1 + 1e-3 * client.kept["direction"].mean()))


class SeedsByTheClock(Plain):
    def upload(self, client):
        generator = torch.Generator().manual_seed(time.time_ns())
        return Upload(client.model.shared + 1e-3 * torch.randn(len(client.model.shared), generator=generator))


class DependsOnTheRank(Plain):
    def upload(self, client):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return Upload(client.model.shared * (1 + rank * 1e-3))


class DependsOnTheProcess(Plain):
    def upload(self, client):
        return Upload(client.model.shared * (1 + os.getpid() % 7 * 1e-3))


class DependsOnSeconds(Plain):
    measures = MappingProxyType({"seconds": "client"})

    def upload(self, client):
        return Upload(client.model.shared, signals={"seconds": time.perf_counter() % 10 + 1})

    def weights(self, reports):
        total = sum(report.signals["seconds"] for report in reports.values())
        return Weights({name: report.signals["seconds"] / total for name, report in reports.items()})


# -- shapes, dtypes and sums -------------------------------------------------------------------------------------------


class ShortVector(Plain):
    def upload(self, client):
        return Upload(client.model.shared[:-1])


class DoubleVector(Plain):
    def upload(self, client):
        return Upload(client.model.shared.double())


class WrongShape(PlainWithControl):
    def upload(self, client):
        client.received.extras["control"]
        return Upload(client.model.shared, {"change": torch.ones(4)})


class WrongDtype(PlainWithControl):
    def upload(self, client):
        return Upload(client.model.shared, {"change": client.received.extras["control"].double() + 1})


class ShapeGrows(PlainWithControl):
    def payload(self, server, arch, round_):
        return Payload(down=("control",), up={"change": (3 + round_,)})

    def upload(self, client):
        longer = torch.cat([client.received.extras["control"], torch.ones(1)])
        return Upload(client.model.shared, {"change": longer[: 3 + client.round]})


class LossOfEachImage(Plain):
    def loss(self, client, batch):
        return super().loss(client, batch).expand(len(batch.images))


class LossWithoutGradient(Plain):
    def loss(self, client, batch):
        return super().loss(client, batch).detach()


class WeightsOfHalf(Plain):
    def weights(self, reports):
        return Weights({name: 0.5 / len(reports) for name in reports})


class WeightsOfOthers(Plain):
    def weights(self, reports):
        return Weights({"town0": 1.0})


class UndeclaredSignal(Plain):
    def upload(self, client):
        return Upload(client.model.shared, signals={"norm": Measured(client.model.shared.norm())})


class UndeclaredMask(Plain):
    def upload(self, client):
        mask = torch.ones(client.model.flat.num_shared_parameters, dtype=torch.bool)
        return Upload(client.model.shared, mask=mask)


class WrongNeed(Plain):
    requires = frozenset({"gpu"})


class WrongDelivery(Plain):
    delivers = "server"


class RaisesInTheSecondRound(Plain):
    def download(self, client):
        super().download(client)
        if client.round == 1:
            raise ZeroDivisionError("no rounds left")


class AggregateInDouble(Plain):
    requires = frozenset({"uploads"})

    def aggregate(self, server, arch, uploads, reports):
        return uploads.combine(lambda rows: rows.mean(0)).double()


class Shrinks(Plain):
    """Equal uploads are no fixed point."""

    def upload(self, client):
        return Upload(client.model.shared * 0.99)


class ForgetsItsWeights(Plain):
    """Depends on the number of the call, not of the round."""

    def __init__(self):
        self.calls = iter(range(1000))

    def weights(self, reports):
        number = next(self.calls)
        weights = uniform_weights(reports)
        first = min(weights)
        return Weights(weights if number % 2 else {name: float(name == first) for name in weights})


class UploadsNoNumber(Plain):
    def upload(self, client):
        return Upload(client.model.shared * float("nan"))


class InTheEnvironment(Plain):
    def take_step(self, client, loss):
        os.environ["FAULTY_STEPS"] = os.environ.get("FAULTY_STEPS", "") + "x"
        client.step(loss / len(os.environ["FAULTY_STEPS"]))


class StepIsNeverCalled(Plain):
    """server_every is 0, as in Method."""

    def server_step(self, server):
        for arch in server.vectors:
            server.vector(arch).mul_(0.99)


class AggregateIsNeverCalled(Plain):
    """It does not require single uploads."""

    def aggregate(self, server, arch, uploads, reports):
        raise AssertionError


class MisspeltHook(Plain):
    """The hook is personalise."""

    def personalize(self, client):
        raise AssertionError


class EvaluatesInTraining(Plain):
    """It leaves the network in evaluation mode."""

    def loss(self, client, batch):
        client.model.network.eval()
        return super().loss(client, batch)


class PlainWithHelper(Plain):
    """It calls a function of its own that has almost the name of a hook."""

    def uploads(self, client):
        return client.model.shared

    def upload(self, client):
        return Upload(self.uploads(client))


SOUND = [Plain, PlainWithControl, PlainWithPersonal, PlainWithHelper]
FAULTS = {  # a method -> a word of the sentence that must name its fault
    OnItself: "self.last",
    InADictOfItself: "self.seen",
    OnTheClass: "OnTheClass.count",
    InAGlobal: "CACHE",
    InAGlobalThatIsSet: "LAST",
    InADefaultValue: "InADefaultValue.upload",
    OnAFunction: "OnAFunction.upload",
    InACache: "differ",
    OnTheClient: "client.sessions",
    OnTheServer: "server.momentum",
    InAReplica: "differ",
    InTheImages: "resumed",
    InAFile: "differ",
    ReadsUndeclared: "payload does not declare",
    AsksForUndeclared: "payload does not declare",
    DeclaresUnkept: "the server does not keep",
    SendsUnread: "no hook of a client reads it",
    UploadsUnread: "server_step does not read it",
    UploadsUndeclared: "payload does not declare in up",
    ReadsTheServerFromAGlobal: "CACHE",
    ReadsAnotherClient: "another client",
    MutatesTheServer: "the server's model",
    MutatesTheControl: "the server's tensor control",
    EvaluationMovesState: "stored state",
    PersonalisesSecretly: "has_own_models",
    OtherRanksLackIt: "center",
    DrawsFromTorch: "random stream of torch",
    DrawsInTheLoss: "random stream of torch",
    DrawsFromNumpy: "random stream of numpy",
    DrawsFromRandom: "random stream of random",
    DrawsAtTheStart: "random stream of torch",
    SeedsByTheClock: "differ",
    DependsOnTheRank: "differ",
    DependsOnTheProcess: "differ",
    DependsOnSeconds: "differ",
    ShortVector: "sends a vector",
    DoubleVector: "sends a vector",
    WrongShape: "payload declares float32 [3]",
    WrongDtype: "payload declares float32 [3]",
    ShapeGrows: "control",
    LossOfEachImage: "not a scalar",
    LossWithoutGradient: "without gradient",
    WeightsOfHalf: "sum to 0.5",
    WeightsOfOthers: "exactly the clients",
    UndeclaredSignal: "signal norm",
    UndeclaredMask: "masks",
    WrongNeed: "requires has gpu",
    WrongDelivery: "delivers is server",
    RaisesInTheSecondRound: "ZeroDivisionError",
    AggregateInDouble: "float64",
    Shrinks: "no fixed point",
    ForgetsItsWeights: "asked twice",
    UploadsNoNumber: "not finite",
    InTheEnvironment: "changes the environment",
    StepIsNeverCalled: "server_step is never called",
    AggregateIsNeverCalled: "aggregate is never called",
    MisspeltHook: "personalise is one",
    EvaluatesInTraining: "loss changes the mode",
}
