"""A method of your own: clients are pulled towards the mean of their own earlier models, and the server averages."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsim.core.checks import not_negative
from fedsim.methods.base import KeptModels, Method
from fedsim.models import BODY
from fedsim.training.batch import Batch
from fedsim.training.client import Client
from fedsim.training.messages import Upload


@dataclass(frozen=True, kw_only=True)
class PullHome(Method):
    """FedPav with the penalty (mu / 2) * mean of (w - h)^2; h is the client's running mean model."""

    shared_groups = BODY  # backbone and neck are averaged; heads are private
    keeps: ClassVar[KeptModels] = {"home": "shared"}

    mu: float = 0.1
    """weight of the penalty"""

    def __post_init__(self) -> None:
        not_negative("model.method", mu=self.mu)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the supervised loss with the penalty; at first, the global model is home."""
        moved = [p for p in client.model.network.parameters() if p.requires_grad]
        home = client.kept.get("home", client.received.vector)
        place_of = client.model.flat.place_of  # of a tensor in the flat vector
        pairs = [(p, home[place_of(p) : place_of(p) + p.numel()].view_as(p)) for p in moved]
        return super().loss(client, batch) + self.mu / 2 * sum((p - h).square().mean() for p, h in pairs)

    def upload(self, client: Client) -> Upload:
        """Keep the new home, and send the model."""
        client.keep("home", client.kept.get("home", client.model.shared).lerp(client.model.shared, 0.5))
        return super().upload(client)
