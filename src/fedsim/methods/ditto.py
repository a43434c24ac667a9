"""Ditto: Fair and Robust Federated Learning Through Personalization.

T. Li, S. Hu, A. Beirami, V. Smith. ICML 2021. arXiv:2012.04221.

| hook        | Algorithm 1, with FedAvg as the solver of the global problem                 |
|-------------|------------------------------------------------------------------------------|
| train       | w_k^t: local training from w^t; then                                         |
|             | v_k <- v_k - eta (gradient of F_k(v_k) + lambda (v_k - w^t)), s times        |
| weights     | w^{t+1} <- the mean of w_k^t, by ``weighting``                               |
| personalise | the model of client k is v_k                                                 |

Deviations and silences:

- v_k is a whole model with its own running statistics and head. The pull towards w^t acts on shared parameters. v_k
  begins as the first model that the client receives, with its first head.
- The personal model trains after the other, E local epochs on further random batches, with a fresh optimizer of the
  client. So a round takes twice as long; loss and accuracy in the log are those of
  the first half.
- A client that has not taken part yet is scored with the global model.
- The authors' code takes the plain mean of w_k^t: ``weighting: uniform``. The default is FedAvg's, by size.
- lambda = 0 is local training, independent of FedAvg; the paper tunes lambda for each data set.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from fedsim.core.checks import not_negative
from fedsim.core.errors import ConfigError
from fedsim.methods.base import BodySharing, KeepsPersonal, Method, OtherSteps, WeightingChoice
from fedsim.training.client import Client
from fedsim.training.settings import LocalTraining


@dataclass(frozen=True, kw_only=True)
class Ditto(BodySharing, WeightingChoice, KeepsPersonal, Method):
    """Averaging, and a personal model of each client that is held near the global one."""

    session_copies = 1  # w_k^t, while v_k trains

    lam: float = 0.1
    """$\\lambda$, weight of the pull towards the global model"""

    def __post_init__(self) -> None:
        not_negative("model.method", lam=self.lam)

    def check(self, training: LocalTraining, client: str) -> None:
        """Refuse an optimizer whose state would go from one model to the other."""
        if training.optimizer_state == "keep":
            raise ConfigError("model.client.optimizer_state: Ditto's two models share an optimizer; set it to reset")

    def train(self, client: Client) -> None:
        """Train the global model's copy, then the personal model."""
        personal = client.kept["personal"] if "personal" in client.kept else client.model.whole.clone()
        super().train(client)
        trained = client.model.whole.clone()
        client.model.whole.copy_(personal)
        client.model.reset_counters()
        client.optimizer.reset(client.round)
        personal_steps = OtherSteps(correct=partial(client.optimizer.pull, client.received.vector, self.lam))
        with client.personal_training():
            client.fit(personal_steps)
        client.keep("personal", client.model.whole)
        client.model.whole.copy_(trained)
