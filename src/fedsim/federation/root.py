"""The server's own training, on labelled images, for rules that compare uploads with its model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.core.errors import BadUpdateError, ConfigError, TrainingError
from fedsim.data.federated import ClientData, FederatedData
from fedsim.federation.aggregation.forms import check_form
from fedsim.federation.rank_worker import RankWorker
from fedsim.federation.settings import Settings
from fedsim.methods.declared import message_to
from fedsim.training.client import Client

_FIELD = "model.aggregation"


def root_of(settings: Settings, federated: FederatedData) -> list[ClientData]:
    """Return the images on which the server trains, as those of one client; none unless the rule needs them.

    Raises:
        ConfigError: if there are none, or the server cannot train on them as a client does.
    """
    if settings.aggregation is None or not settings.aggregation.trains_on_server:
        return []
    if settings.module is not None:
        raise ConfigError(f"{_FIELD}: the server trains fedsim's own model; set model.module to null")
    if settings.client.clusters:
        raise ConfigError(f"{_FIELD}: the server trains with identities; leave model.client.cluster out")
    if "held_out" in settings.method.requires:
        name = type(settings.method).__name__
        raise ConfigError(f"{_FIELD}: {name} needs held-out images, and the server has none; choose another method")
    if federated.root is None:
        has_none = "has none" if federated.public_name is None else f"{federated.public_name} has none"
        raise ConfigError(
            f"{_FIELD}: the server trains on labelled images, and data.public {has_none}; name a data set of "
            "data.source with training images of two identities or more"
        )
    name = f"{federated.root.name} on the server"
    if name in {client.name for client in federated.clients}:
        raise ConfigError(f"data.public: a client is called {name!r}, as the server's images are; rename the client")
    return [replace(federated.root, name=name)]


@dataclass(frozen=True)
class RootTraining:
    """Trains the server's model on rank 0, as though its images were a client's."""

    client: Client
    """has the server's images; only rank 0 opens them"""
    worker: RankWorker
    """of this rank"""

    def train(self, round_: int) -> None:
        """Set ``server.trained`` on all ranks, and count the work as the server's: a collective of all ranks."""
        server, strategy, arch = self.worker.parts.server, self.worker.strategy, self.client.model.arch
        server.trained = {}  # the last round's gives its memory back
        trained = torch.empty_like(server.vector(arch))
        with strategy.together():
            if strategy.global_rank == 0:
                strategy.describe_activity(f"round {round_ + 1}, the server's images")
                trained.copy_(self._session(round_))
                counts = self.client.work.values()
                server.work = (sum(images for images, _ in counts), sum(steps for _, steps in counts))
        strategy.broadcast_(trained)
        server.work = strategy.broadcast(server.work)
        server.trained = {arch: trained}

    def _session(self, round_: int) -> Tensor:
        """Return the model [num_shared] after a session from the global model, like a client's."""
        client, method = self.client, self.worker.settings.method
        client.model.flat.check()
        client.begin_round(round_, 1.0, self.worker.precision, self.worker.on_batch)
        try:
            client.received = message_to(method, self.worker.parts.server, client.model.arch)
            method.download(client)
            method.train(client)
            client.end_training()
            upload = check_form(method, client, method.upload(client), {}, tables={})
            client.end_round([(upload.vector, math.inf)])
            return upload.vector.clone()
        except BadUpdateError as error:
            raise TrainingError(
                f"round {round_ + 1}: {client.client_name}: loss or weights are not finite after training on the "
                "images of data.public; lower model.client.optimizer's lr, or choose another data set"
            ) from error
        except (RuntimeError, MemoryError) as error:
            if (explained := client.out_of_memory(error)) is not None:
                raise explained from error
            raise
        finally:
            client.leave()
