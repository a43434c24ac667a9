"""A method whose hooks are watched: what they are given, what they return, and what they leave behind."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedsim.core.errors import FedSimError
from fedsim.methods.base import InitialState, Method, Payload, Weights
from fedsim.testing.findings import described
from fedsim.testing.fingerprint import changed, global_settings, global_streams, modes_of, moved, shape_of, state_of
from fedsim.training.client import Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.messages import Report, Upload
from fedsim.training.server import Server

Note = Callable[[str], None]
_REMEDY_OF_STATE = "keep tensors by client.keep or server.keep: checkpoints and other ranks have nothing else"


class Received(Mapping[str, Tensor]):
    """The tensors of a message, by name; it notes which are read, and asks for others."""

    def __init__(self, tensors: Mapping[str, Tensor], read: set[str], missed: Callable[[str], None]) -> None:
        self._tensors, self._read, self._missed = tensors, read, missed

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            self._missed(name)
        self._read.add(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        self._read |= self._tensors.keys()
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class OwnStore:
    """A client's view of the store; it notes reads of other clients' states."""

    def __init__(self, store: Any, client: str, watch: Watch) -> None:
        self._store, self._client, self._watch = store, client, watch

    def read(self, client: str) -> dict[str, Tensor]:
        """Return a client's tensors."""
        sentence = f"reads the private state of another client ({client}), which no server would have"
        self._watch.expect(client == self._client, sentence)
        tensors: dict[str, Tensor] = self._store.read(client)
        return tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Watch:
    """A record of ``watched_copy``, a copy of a method, while it runs: its hook, its messages, and its state.

    ``note`` gets a sentence for each fault of its hooks. The copy's results have the same bits as those of the method.
    ``free_streams``: the libraries whose global streams the network may draw from, so that the method's draws do not
    show there.
    """

    def __init__(self, method: Method, note: Note, free_streams: frozenset[str] = frozenset()) -> None:
        self.method, self.watched_copy, self.free_streams = method, copy.copy(method), free_streams
        self._note, self._said = note, set[str]()
        self.server: Server | None = None
        self.hook = ""
        self.sent, self.read, self.uploaded, self.answered = set[str](), set[str](), set[str](), set[str]()
        self.is_server_step_seen = self.prunes = False
        self._shapes = WeakKeyDictionary[nn.Module, Mapping[str, str]]()
        method_class = type(method)
        hooks = {name: _hook(method_class, name, self) for name in _WRAPPERS}
        label = {"__module__": method_class.__module__, "__qualname__": method_class.__qualname__, "_watched": True}
        label["sees_steps"] = self.watched_copy.sees_steps  # by its own hooks, and not by those of the watch
        object.__setattr__(self.watched_copy, "__class__", type(method_class.__name__, (method_class,), label | hooks))
        self._state: Mapping[str, str] = state_of(self.watched_copy)

    def say(self, sentence: str, key: str | None = None) -> None:
        """Note a finding; one for each ``key``."""
        if (key or sentence) not in self._said:
            self._said.add(key or sentence)
            self._note(sentence)

    def expect(self, holds: bool, sentence: str) -> None:
        """Note a finding about the current hook unless something holds."""
        if not holds:
            self.say(f"{self.hook} {sentence}")

    @contextmanager
    def during(
        self, hook: str, *, may_change: bool = False, free: frozenset[str] = frozenset(), owner: Any = None
    ) -> Iterator[None]:
        """Watch a hook: whether it raises, draws from global streams, or changes the server, or state of its own.

        ``may_change``: the server's model and tensors; ``free``: the libraries from whose global streams it
        may draw; ``owner``: the client.
        """
        outer, self.hook = self.hook, hook
        streams, settings = global_streams(), global_settings()
        before, names = self._server_content(), self._names(owner)
        try:
            yield
        except BaseException as error:
            if not isinstance(error, FedSimError):
                self.say(f"{hook} raises {described(error)}", f"raised {error!r}")
            raise
        finally:
            self.hook = outer
        self._compare_streams(hook, streams, free)
        for setting in moved(settings, global_settings()):
            self.say(f"{hook} changes {setting}, which all clients of the rank share; {_REMEDY_OF_STATE}", setting)
        self._compare_state(hook)
        if not may_change:
            self._compare_server(hook, before)
        for attribute in sorted(self._names(owner) - names):
            self.say(
                f"{hook} sets the attribute {attribute}, which ends with the process; {_REMEDY_OF_STATE}", attribute
            )

    def _compare_streams(self, hook: str, streams: Mapping[str, bytes], free: frozenset[str]) -> None:
        for library in (name for name, now in global_streams().items() if now != streams[name] and name not in free):
            self.say(
                f"{hook} draws from the global random stream of {library}, whose state depends on what ran before on "
                "the rank; use client.generator(purpose), or fedsim.core.seeding.torch_generator(server.seed, round, "
                "purpose)",
                f"{library} stream",
            )

    def _compare_state(self, hook: str) -> None:
        state = state_of(self.watched_copy)
        for state_name in changed(self._state, state):
            self.say(f"{hook} changes {state_name}: {_REMEDY_OF_STATE}", f"state {state_name}")
        self._state = state

    def _server_content(self) -> dict[str, Tensor]:
        if (server := self.server) is None:
            return {}
        kept = {f"tensor {n} ({a})": t for a, tensors in server.kept.items() for n, t in tensors.items()}
        models = {f"model ({arch})": server.vector(arch) for arch in server.vectors}
        return {name: tensor.clone() for name, tensor in (models | kept).items()}

    def _compare_server(self, hook: str, before: Mapping[str, Tensor]) -> None:
        after = self._server_content() if before else {}
        for name in after.keys() | before.keys():
            if name not in before or name not in after or not torch.equal(before[name], after[name]):
                self.say(
                    f"{hook} changes the server's {name} in place; it may only read the message: copy the tensor first",
                    f"server {name}",
                )

    def _names(self, owner: Any) -> set[str]:
        """Return the names of attributes of a client, its model, its data and the server."""
        if owner is None:
            return {f"server.{name}" for name in vars(self.server)} if self.server is not None else set()
        owners = {"client": owner, "client.images": owner.images, "client.data": owner.data}
        owners |= {"client.model.network": owner.model.network, "client.training_settings": owner.training_settings}
        names = {f"{label}.{name}" for label, held in owners.items() for name in vars(held)}
        return names - {"client.received", "client.session", "client.optimizer"} | self._names(None)

    def prepare(self, client: Client) -> None:
        """Let the watch see what a client's hooks read."""
        extras = client.received.extras
        if not isinstance(extras, Received):
            assert self.server is not None, "the server sends before a client receives"
            payload = type(self.method).payload(self.watched_copy, self.server, client.model.arch, client.round)
            self.sent |= {*payload.down, *payload.tables} & extras.keys()
            client.received = replace(client.received, extras=Received(extras, self.read, self.misses))
        if not isinstance(client.store, OwnStore):
            store: Any = OwnStore(client.store, client.client_name, self)
            client.store = store

    def compare_network(self, network: nn.Module) -> None:
        """Note what an earlier session has left on the rank's network."""
        shape = shape_of(network)
        for place in changed(self._shapes.setdefault(network, shape), shape):
            self.say(
                f"a session leaves the rank's network with {place} changed, which the next client gets; undo it at the "
                "session's end",
                f"network {place.rpartition(' ')[0]}",
            )

    def misses(self, name: str, owner: str = "the server's", place: str = "down or known") -> None:
        """Note that the current hook asks for a tensor that no message has."""
        self.say(f"{self.hook} asks for {owner} tensor {name}, which payload does not declare in {place}")

    def end(self) -> None:
        """Note what was declared and never used."""
        for name in sorted(self.sent - self.read):
            self.say(f"payload sends the tensor {name} to clients, and no hook of a client reads it")
        for name in sorted(self.uploaded - self.answered) if self.is_server_step_seen else ():
            self.say(f"payload has clients upload the tensor {name}, and server_step does not read it")


# -- one wrapper for each hook -----------------------------------------------------------------------------------------


def _hook(method_class: type[Method], name: str, watch: Watch) -> Callable[..., Any]:
    plain, wrapper = getattr(method_class, name), _WRAPPERS[name]

    def hook(method: Method, *args: Any) -> Any:
        return wrapper(watch, lambda *arguments: plain(method, *arguments), *args)

    return hook


def _payload(watch: Watch, plain: Callable[..., Any], server: Server, arch: str, round_: int) -> Any:
    watch.server = server
    with watch.during("payload"):
        payload = plain(server, arch, round_)
        watch.expect(isinstance(payload, Payload), f"returns {_named(payload)}, not a Payload")
        watch.expect(plain(server, arch, round_) == payload, "returns something else when it is asked twice")
        watch.prunes |= payload.mask is not None
        names = {*payload.down, *payload.known, *([payload.mask] if payload.mask else [])}
        for name in sorted(names - server.kept[arch].keys()):
            watch.say(
                f"payload declares the tensor {name}, which the server does not keep; give it in initial_state, or "
                "declare it from the round on in which server_step has kept it"
            )
    return payload


def _initial_state(watch: Watch, plain: Callable[..., Any], model: FlatModel) -> Any:
    before = model.flat.buffer.clone()
    with watch.during("initial_state"):
        state = plain(model)
        watch.expect(isinstance(state, InitialState), f"returns {_named(state)}, not an InitialState")
        watch.expect(torch.equal(before, model.flat.buffer), "changes the model, which is only there to be read")
        for name, tensor in {**state.client, **state.server}.items():
            watch.expect(isinstance(tensor, Tensor), f"returns {name} as {_named(tensor)}, not a tensor")
    return state


def _server_tensors(watch: Watch, plain: Callable[..., Any], server: Server, arch: str) -> Any:
    with watch.during("server_tensors"):
        tensors = plain(server, arch)
        declared = {entry.name: f"float32 {[*entry.shape]}" for entry in server.models[arch].flat.entries}
        for name, tensor in tensors.items():
            expected = declared.get(name, "no such tensor")
            watch.expect(_named(tensor) == expected, f"returns {name} as {_named(tensor)}; the model has {expected}")
    return tensors


def _acting(hook: str) -> Callable[..., None]:
    """Return the wrapper of a client's hook that returns nothing."""

    def act(watch: Watch, plain: Callable[..., Any], client: Client, *args: Any) -> None:
        watch.prepare(client)
        if hook == "download":
            watch.compare_network(client.model.network)
        with watch.during(hook, owner=client, free=watch.free_streams):
            plain(client, *args)

    return act


def _loss(watch: Watch, plain: Callable[..., Any], client: Client, batch: Any) -> Any:
    watch.prepare(client)
    modes = modes_of(client.model.network)
    with watch.during("loss", owner=client, free=watch.free_streams):
        loss = plain(client, batch)
        for place in changed(modes, modes_of(client.model.network)):
            watch.say(f"loss changes {place}, in which the session goes on; set it back", "modes")
        is_scalar = isinstance(loss, Tensor) and loss.dim() == 0
        watch.expect(is_scalar, f"returns {_named(loss)}, not a scalar tensor")
        module = getattr(client.model.network, "module", None)  # a user's that optimizes by itself need not return it
        if is_scalar and (module is None or module.automatic_optimization):
            watch.expect(loss.requires_grad, "returns a tensor without gradient: nothing would be trained")
            watch.expect(loss.dtype is torch.float32, f"returns {loss.dtype}, not torch.float32")
            watch.expect(bool(loss.isfinite()), "returns a loss that is not finite")
    return loss


def _upload(watch: Watch, plain: Callable[..., Any], client: Client) -> Any:
    watch.prepare(client)
    with watch.during("upload", owner=client, free=watch.free_streams):
        upload = plain(client)
        watch.expect(isinstance(upload, Upload), f"returns {_named(upload)}, not an Upload")
        if isinstance(upload, Upload):
            _check_upload(watch, client, upload)
            watch.expect(bool(upload.vector.isfinite().all()), "sends a vector with values that are not finite")
    for name, tensor in client.kept.items():
        watch.expect(tensor.device == client.device, f"keeps {name} on {tensor.device}")
    return upload


def _check_upload(watch: Watch, client: Client, upload: Upload) -> None:
    shared = client.model.shared
    sentence = f"sends a vector {_named(upload.vector)}, and the model has {len(shared)} shared float32 values"
    watch.expect(_named(upload.vector) == _named(shared), sentence)
    assert watch.server is not None, "the server sends before a client uploads"
    declared = type(watch.method).payload(watch.watched_copy, watch.server, client.model.arch, client.round).up
    watch.uploaded |= upload.extras.keys()
    for name, tensor in upload.extras.items():
        if name not in declared:
            watch.say(f"upload sends the tensor {name}, which payload does not declare in up")
        elif tuple(tensor.shape) != tuple(declared[name]) or tensor.dtype is not torch.float32:
            watch.say(f"upload sends {name} as {_named(tensor)}; payload declares float32 {list(declared[name])}")
    for name in sorted(declared.keys() - upload.extras.keys()):
        watch.say(f"upload does not send the tensor {name}, which payload declares in up")
    measures = watch.method.measures
    for name in sorted(upload.signals.keys() ^ measures.keys()):
        verb = "sends the signal" if name in upload.signals else "does not send the signal"
        watch.say(f"upload {verb} {name}, and measures {'lacks' if name not in measures else 'has'} it")
    if upload.mask is not None:
        expected = f"bool [{client.model.flat.num_shared_parameters}]"
        watch.expect("masks" in watch.method.requires, "sends a mask, and requires does not have masks")
        watch.expect(_named(upload.mask) == expected, f"sends a mask {_named(upload.mask)}, not {expected}")


def _weights(watch: Watch, plain: Callable[..., Any], reports: Mapping[str, Report]) -> Any:
    with watch.during("weights"):
        weights = plain(reports)
        watch.expect(isinstance(weights, Weights), f"returns {_named(weights)}, not a Weights")
        if not isinstance(weights, Weights):
            return weights
        watch.expect(plain(reports) == weights, "returns something else when it is asked twice")
        watch.expect(weights.clients.keys() == reports.keys(), "must weigh exactly the clients of the reports")
        total = sum(weights.clients.values())
        watch.expect(abs(total - 1) < 1e-9, f"returns weights that sum to {total:.6g}, not to 1")
        watch.expect(min(weights.clients.values(), default=0) >= 0, "returns a negative weight")
        watch.expect(math.isfinite(weights.step_size), f"returns the step size {weights.step_size}")
    return weights


def _aggregate(
    watch: Watch, plain: Callable[..., Any], server: Server, arch: str, uploads: Any, reports: Mapping[str, Report]
) -> Any:
    before = server.vector(arch).clone()
    with watch.during("aggregate", may_change=True):
        mean = plain(server, arch, uploads, reports)
        watch.expect(_named(mean) == _named(before), f"returns {_named(mean)}, not {_named(before)}")
        watch.expect(torch.equal(before, server.vector(arch)), "changes the server's model; return the mean instead")
    return mean


def _server_step(watch: Watch, plain: Callable[..., Any], server: Server) -> None:
    watch.is_server_step_seen = True
    missed = partial(watch.misses, owner="the clients'", place="up")
    server.answers = {
        arch: replace(answers, extras=Received(answers.extras, watch.answered, missed))
        for arch, answers in server.answers.items()
    }
    shapes = _shapes(server)
    with watch.during("server_step", may_change=True, free=frozenset({"torch"})):
        plain(server)
    for key, shape in shapes.items():
        new = _shapes(server).get(key, "nothing")
        watch.expect(new == shape, f"turns {key}, {shape}, into {new}; checkpoints need one shape and dtype")
    for arch in server.vectors:
        watch.expect(bool(server.vector(arch).isfinite().all()), "leaves a global model that is not finite")


def _personalise(watch: Watch, plain: Callable[..., Any], client: Client) -> None:
    watch.prepare(client)
    stored = {name: tensor.clone() for name, tensor in client.store.read(client.client_name).items()}
    with watch.during("personalise", owner=client, free=watch.free_streams):
        plain(client)
        first = client.model.whole.clone()
        client.load()
        plain(client)
        watch.expect(torch.equal(first, client.model.whole), "loads another model when it is called again")
        after = client.store.read(client.client_name)
        is_equal = after.keys() == stored.keys() and all(torch.equal(t, after[name]) for name, t in stored.items())
        watch.expect(is_equal, "changes the client's stored state; an evaluation must change nothing")
        is_global = watch.method.has_own_models or torch.equal(client.model.shared, client.received.vector)
        watch.expect(is_global, "loads another model than the global one; let has_own_models return True")


def _shapes(server: Server) -> dict[str, str]:
    return {
        f"{name} ({arch})": f"{list(t.shape)} {t.dtype}" for arch, ts in server.kept.items() for name, t in ts.items()
    }


def _named(value: Any) -> str:
    """Describe a value in a few words."""
    is_tensor = isinstance(value, Tensor)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" if is_tensor else type(value).__name__


_WRAPPERS: Mapping[str, Callable[..., Any]] = {
    **{hook: _acting(hook) for hook in ("download", "train", "take_step")},
    "payload": _payload, "initial_state": _initial_state, "server_tensors": _server_tensors, "loss": _loss,
    "upload": _upload, "weights": _weights, "aggregate": _aggregate, "server_step": _server_step,
    "personalise": _personalise,
}  # fmt: skip
