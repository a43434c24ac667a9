"""Exploiting Shared Representations for Personalized Federated Learning (FedRep).

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai. ICML 2021. arXiv:2102.07078.

| hook            | Algorithm 1                                                                              |
|-----------------|------------------------------------------------------------------------------------------|
| download        | phi^t is the server's, h_i the client's own                                              |
| train           | h_i <- steps on f_i(h_i, phi^t) with phi^t fixed, for ``head_epochs``; then              |
|                 | phi_i <- steps on f_i(h_i, phi_i) with h_i fixed, for the local epochs                   |
| weights         | phi^{t+1} <- (1 / rn) sum over i of phi_i, rn the number of selected clients             |

phi is all that is shared, h_i all that is private: the classifier, and with ``share_neck: false`` the neck, too.

Deviations and silences:

- Fixed parameters have no gradient: neither momentum nor weight decay moves them. In the authors' code, with the torch
  of its time, a gradient of zero stays after the head's last step, by which momentum and decay go on moving the head.
- Fixed layers stay in training mode, as in the code, whose networks have no normalisation: running statistics follow
  the images of the head's epochs, too.
- The code trains 10 epochs of the head and one of the body on CIFAR. After its last round it trains the heads of all
  clients for 10 or more epochs, and scores these. Here evaluations score the heads of the clients' last rounds.
  Retrieval does not see heads.
- In the code a client that joins after round 0 begins with the mean of the others' heads, and weight decay leaves out
  biases. Here it begins with its own initial head, as in Algorithm 1, and the optimizer decays all parameters.
- The code's mean is by numbers of samples on FEMNIST and Sent140: ``weighting: size``.
- ``local_steps`` and the work of stragglers bound each epoch of the head. The log counts all epochs.
- ``head_epochs: 0`` trains the body for heads that stay random, as FedBABU does.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsim.core.checks import at_least
from fedsim.methods.base import Method, OtherSteps, Weighting, WeightingChoice
from fedsim.models.groups import Group, body_groups
from fedsim.training.client import Client


@dataclass(frozen=True, kw_only=True)
class FedRep(WeightingChoice, Method):
    """Averaging of bodies, each trained for a head that was fitted to the received body before."""

    requires = frozenset({"identities"})  # clusters have no head

    head_epochs: int = 10
    """epochs of the head before those of the body, which are ``model.client.local_epochs``; $\\tau$ in steps"""
    share_neck: bool = True
    """whether the embedding layers before the classifier belong to the body"""
    weighting: Weighting = "uniform"
    """$1 / rn$; ``size`` is $n_k / n$"""

    def __post_init__(self) -> None:
        at_least("model.method", 0, head_epochs=self.head_epochs)

    @property
    def shared_groups(self) -> frozenset[Group]:
        """The body."""
        return body_groups(self.share_neck, share_head=False)

    def train(self, client: Client) -> None:
        """Train the head on the received body, then the body on that head."""
        with client.model.training_only("private"):
            client.fit(OtherSteps(counts=True), [0] * self.head_epochs)
        with client.model.training_only("shared"):
            super().train(client)
