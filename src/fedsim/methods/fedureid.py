"""Joint Optimization in Edge-Cloud Continuum for Federated Unsupervised Person Re-identification (FedUReID).

W. Zhuang, Y. Wen, S. Zhang. ACM Multimedia 2021; a baseline of paper 004. Its text was not available: this file follows
its public code (EasyFL's application ``fedureid``) and the description in paper 004.

| hook     | code                                                                                        |
|----------|---------------------------------------------------------------------------------------------|
| download | personalised update: alpha times the client's last model + (1 - alpha) times the global one |
| train    | personalised epoch: no further local epoch after one that predicts its clusters well enough |
| upload   | the model, which is kept for the next update                                                |
| weights  | n_k / n                                                                                     |

Clients grow clusters from round to round with ``model.client.bottom_up``, which any method can, and train on the
exclusive loss. "Personalised clustering" is ``merge`` of single clients: (n - identities) / (rounds n) in the code,
which takes the number of identities from the labels; here it is a constant of the config.

Deviations and silences:

- Clusters merge before local training, by the features of the received model, as in the code with ``--relabel
  global``. Its default is after local training, by those of the trained model. A client that is not selected does
  not merge.
- The code's first round has 20 local epochs at rate 0.1, from the 17th on 0.01, the others one at 0.01:
  ``model.client.long_round`` and ``schedule``. After the first round, ``dynamic`` ends them early: after
  an epoch in which all images of a batch were nearest to their clusters, or in which the share of such images exceeded
  0.95 after a batch. With one local epoch it has no effect.
- The code's memory compares the output of an embedding layer of 2048 with dropout 0.5; the config has a bnneck.
- alpha is in no public code: ``update`` is 0, the plain download, unless it is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedsim.core.checks import within
from fedsim.methods.base import KeptModels, Method
from fedsim.models.groups import BODY
from fedsim.settings.facts import Facts
from fedsim.training.client import Client
from fedsim.training.messages import Upload


@dataclass(frozen=True, kw_only=True)
class FedUReID(Method):
    """Averaging of clients that begin with a mixture of two models, and end when they predict their clusters well."""

    shared_groups = BODY  # the memory is no part of the model
    requires = frozenset({"built_in_model"})  # for the guesses that end local training
    has_own_models = True

    dynamic: bool = True
    """whether local training may end early, after the first round; waits for the device once in an epoch"""
    precision: Annotated[float, Facts(needs="dynamic")] = 0.95
    """share of an epoch's images that are nearest to their own clusters, above which local training ends"""
    update: float = 0.0
    """alpha, weight of the client's own last model"""

    def __post_init__(self) -> None:
        within("model.method", "[0, 1]", precision=self.precision, update=self.update)

    @property
    def keeps(self) -> KeptModels:
        """The client's last model, if it is mixed with the global one."""
        return {"previous": "shared"} if self.update > 0 else {}

    def download(self, client: Client) -> None:
        """Mix the global model with the client's last one."""
        super().download(client)
        if "previous" in client.kept:
            client.model.shared.lerp_(client.kept["previous"], self.update)

    def train(self, client: Client) -> None:
        """Train to the end of an epoch in which the clusters are predicted well, at most for all local epochs."""
        for epoch in range(client.local_epochs):
            done = 0
            for batch in client.batches(epoch):
                client.train_on(batch, self)
                done += 1
            is_last = epoch == client.local_epochs - 1
            if self.dynamic and client.round > 0 and done and not is_last and self._predicts_clusters(client, done):
                return

    def _predicts_clusters(self, client: Client, batches: int) -> bool:
        """Whether one of an epoch's ``batches`` had no wrong guess, or too few wrong ones up to it in the epoch."""
        right = images = 0
        for hits, size in client.session.metrics.hits(batches):
            right, images = right + hits, images + size
            if hits == size or right / images > self.precision:
                return True
        return False

    def upload(self, client: Client) -> Upload:
        """Return the model, and keep it for the next time."""
        if self.update > 0:
            client.keep("previous", client.model.shared)
        return super().upload(client)
