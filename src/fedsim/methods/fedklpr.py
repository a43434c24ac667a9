"""FedKLPR: Personalized Federated Learning for Person Re-Identification with Adaptive Pruning.

Paper 004 of fedsim's list; version 1 of a paper that has been revised since.

| hook          | Section III                                                                               |
|---------------|-------------------------------------------------------------------------------------------|
| download      | the personalised model: theta_g "adapted using each client's mask", theta_g * M_k         |
| train         | it is also the reference, in evaluation mode                                              |
| loss          | Eqs. (2), (9): L_capr + lambda D_KL(p_global, p_local)                       ("KLL")      |
| take_step     | theta_k <- theta_k * M_k                                                                  |
| upload        | Eq. (10): kl_k, then pruning, in the two stages of Section III-F             ("CRR")      |
| upload        | kl_k and PR_k                                                                             |
| weights       | Eqs. (11)-(13): alpha KLAW + beta PRAW                                       ("KLPWA")    |
| upload        | theta_k and M_k: pruned elements are left out of the mean                    ("SAS")      |
| personalise   | theta_g * M_k                                                                             |

L_capr is the loss of ``model.client.cluster``; clients with identities have the supervised loss instead. Every row
of Table VII is a config, by ``regulariser``, ``weighting``, ``prune``, ``sas`` and ``crr``.

Deviations and silences:

- The "feature distribution" is the softmax of the neck's features at temperature 1. Of features of unit length the
  divergence would be the cosine distance over their number: too small for FedCAPR's lambda = 0.13.
- Eq. (9): the prose compares "local and personalized model distributions"; here D_KL(p || q) has p of the received
  model. ``reverse`` swaps them. The term begins with the second round, as in FedCAPR's code.
- A larger change gives a larger weight, by Eqs. (10) and (11); the list of contributions says the opposite. kl_k is
  measured on the first 32 training images, before pruning.
- alpha and beta are not printed: a half each. While no client has pruned, PRAW is 0 / 0: then KLAW is the weight, and
  ``praw`` alone is uniform.
- The paper does not say whether magnitudes of all shared convolutions and linear layers are compared together. Here
  they are, and each layer keeps at least the share ``floor`` of its weights. A pruned element stays pruned.
- "Up to 9% of model parameters per round" and "10 evaluation epochs": a round prunes as many tenths of 9 % of all
  prunable weights as CRR allows. All ten are tried first, then the number is halved; one tenth after another would
  need up to ten measurements. Without CRR a round prunes its whole step.
- CRR's thresholds are not printed. Stage 1, once a round: accuracy at least 0.5, and within 0.05 of the mean of the
  client's two rounds before. The paper compares "the improvement over previous rounds"; here it is the absolute
  difference, our reading, so a drop stops pruning, too. Stage 2: a loss of less than 0.01 against the model before its
  first trial.
- In this family of code "training accuracy" is rank-1 on the test set, which clients do not have. Here it is rank-1
  among the training images, with clusters as identities; docs/pruning.md compares the other choices.
- Training images are soon learnt, so A_target delays pruning only for a short time. Hence ``prune_from``: the rate
  drops in the sixth round, and a client that begins to prune there, nine points a round, sends slightly less than any
  client of Tables III and IV (2.12 and 1.91 GiB against 2.16 and 2.08).
- The target holds exactly, as in six of eight rows of Table IV; in Table III 61.61 to 67.57 % are pruned.
  Rows of Table VII end at 72 %, eight steps of nine: ``cap: false``.
- A rejected trial restores weights and mask to the bit.
- Elements that all clients have pruned keep their global value; without SAS they become 0. Running statistics are
  averaged and never masked.

Measured in docs/results.md: accuracy against bytes, compared with FedCAPR, LotteryFL, SubFedAvg and FedDIP on clients
without identities (``benchmarks/fedklpr.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedsim.core.checks import at_least, not_negative, positive, within
from fedsim.core.errors import ConfigError
from fedsim.functional.losses import feature_divergence, mean_cosine_distance
from fedsim.functional.pruning import count_remaining, deeper_global_mask, next_step, remaining, share_pruned
from fedsim.functional.recovery import Trials, prune_in_trials
from fedsim.functional.weighting import klpwa_weights, normalise
from fedsim.methods.base import InitialState, Method, Need, Replicas, Signal, Weights, weigh
from fedsim.methods.pruned import (
    Measure,
    check_pruning,
    full_mask,
    own_accuracy,
    prunable_layers,
    upload_masked,
    zero_pruned,
)
from fedsim.methods.reference import RECEIVED, first_features, received_features, remember_received
from fedsim.models.groups import BODY
from fedsim.settings.facts import Facts
from fedsim.training.client import Batch, Client
from fedsim.training.flat_model import FlatModel
from fedsim.training.messages import Measured, Report, Upload

_HISTORY = 3
"""number of accuracies in stage 1"""
_CHANGES = {"klpwa": "kl", "klaw": "kl", "cdw": "cdw"}
"""weighting -> signal of the change of features; the other weightings need none"""
_CRR = ("crr_accuracy", "crr_stage", "crr_trials")
"""signals about CRR, for logs only; the stage is 0 before ``prune_from``, then :attr:`Trials.stage`"""
_REGULARISED = Facts(needs="regulariser != 'none' and lam")
_DIVERGENCE = Facts(needs="(regulariser == 'kl' and lam) or weighting in ('klpwa', 'klaw')")
_PRUNING = Facts(needs="prune")
_TRIALS = Facts(needs="prune and crr")


@dataclass(frozen=True, kw_only=True)
class FedKLPR(Method):
    """Averaging of clients that prune, weighted by the change of their features and their pruned share."""

    delivers = "personalised"
    shared_groups = BODY  # with clusters there is no head
    replicas: ClassVar[Replicas] = {RECEIVED: "frozen"}

    regulariser: Literal["kl", "cosine", "none"] = "kl"
    """term that keeps features near the received model's: KLL, FedCAPR's cosine distance, or none"""
    lam: Annotated[float, Facts(needs="regulariser != 'none'")] = 0.13
    """$lambda$, its weight"""
    reg_from: Annotated[int, _REGULARISED] = 2
    """the first round with the regulariser, from 1"""
    temperature: Annotated[float, _DIVERGENCE] = 1.0
    """temperature of the feature distributions"""
    reverse: Annotated[bool, Facts(needs="regulariser == 'kl' and lam")] = False
    """D_KL(p_local || p_global) in Eq. (9)"""
    weighting: Literal["klpwa", "klaw", "praw", "cdw", "size"] = "klpwa"
    """aggregation weights: both parts of Eq. (13), one of them, FedCAPR's cosine distance, or numbers of images"""
    alpha: Annotated[float, Facts(needs="weighting == 'klpwa'")] = 0.5
    """$alpha$, share of KLAW in Eq. (13); $beta$ is the rest"""
    prune: bool = True
    """whether clients prune"""
    sas: Annotated[bool, _PRUNING] = True
    """leave pruned elements out of the mean; false: they enter it as zeros"""
    crr: Annotated[bool, _PRUNING] = True
    """prune only if the accuracy allows it; false: in every round"""
    target: Annotated[float, _PRUNING] = 0.7
    """share of the prunable weights that is pruned in the end"""
    cap: Annotated[bool, _PRUNING] = True
    """stop at the target exactly; false: a client below it prunes a whole step"""
    step: Annotated[float, _PRUNING] = 0.09
    """largest share that a round prunes"""
    prune_from: Annotated[int, _PRUNING] = 6
    """the first round in which clients may prune, from 1"""
    trials: Annotated[int, _TRIALS] = 10
    """parts of a round's step ("evaluation epochs"); a round prunes as many of them as CRR allows"""
    floor: Annotated[float, _PRUNING] = 0.05
    """share of each layer that is never pruned"""
    min_accuracy: Annotated[float, _TRIALS] = 0.5
    """$A_target$ of stage 1"""
    plateau: Annotated[float, _TRIALS] = 0.05
    """largest change of accuracy against the rounds before in stage 1"""
    tolerance: Annotated[float, _TRIALS] = 0.01
    """smallest loss of accuracy for which stage 2 rejects a trial"""
    accuracy: Annotated[Measure, _TRIALS] = "rank1"
    """of both stages, on training images: retrieval among them (``rank1``, ``mAP``), nearest of fresh ``centroids``, or
    the ``classifier`` of the training, which is a head, or the proxies of clusters as the last batch has left them"""
    accuracy_images: Annotated[int | None, _TRIALS] = None
    """number of random images to measure a head's accuracy on; null: all"""

    def __post_init__(self) -> None:
        section = "model.method"
        not_negative(section, lam=self.lam, plateau=self.plateau, tolerance=self.tolerance)
        at_least(section, 1, reg_from=self.reg_from, prune_from=self.prune_from, trials=self.trials)
        positive(section, temperature=self.temperature)
        within(section, "[0, 1]", alpha=self.alpha, floor=self.floor, min_accuracy=self.min_accuracy)
        if self.weighting in ("klpwa", "praw") and not self.prune:
            raise ConfigError(f"{section}.weighting: {self.weighting} weighs by pruning; set prune, or take klaw")
        if self.accuracy_images is not None and self.accuracy != "classifier":
            raise ConfigError(f"{section}.accuracy_images: {self.accuracy} takes all images; set accuracy: classifier")
        check_pruning(self.target, self.step, self.accuracy_images)

    @property
    def requires(self) -> frozenset[Need]:
        """Masks, if clients prune; features, for the divergence."""
        return frozenset({"masks", "built_in_model"} if self.prune else {"built_in_model"})

    @property
    def measures(self) -> Mapping[str, Signal]:
        """The change of features if weights depend on it, PR_k if clients prune, and the numbers of CRR."""
        change = (_CHANGES[self.weighting],) if self.weighting in _CHANGES else ()
        pruning = ("pruned", *(_CRR if self.crr else ())) if self.prune else ()
        return dict.fromkeys((*change, *pruning), "client")

    def initial_state(self, model: FlatModel) -> InitialState:
        """Return M_k: ones."""
        return InitialState({"mask": full_mask(model)} if self.prune else {})

    def download(self, client: Client) -> None:
        """Load theta_g * M_k."""
        super().download(client)
        if self.prune:
            zero_pruned(client)

    def train(self, client: Client) -> None:
        """Keep a copy of the received model as the reference, and train."""
        remember_received(client)
        super().train(client)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return L_capr + lambda D_KL."""
        output = client.forward(batch.images)
        loss = client.supervised_loss(output, batch)
        if self.regulariser == "none" or self.lam == 0 or client.round + 1 < self.reg_from:
            return loss
        reference = received_features(client, batch.images)
        if self.regulariser == "cosine":
            return loss + self.lam * mean_cosine_distance(output.features.neck, reference)
        p, q = (output.features.neck, reference) if self.reverse else (reference, output.features.neck)
        return loss + self.lam * feature_divergence(p, q, self.temperature)  # Eq. (9)

    def take_step(self, client: Client, loss: Tensor) -> None:
        """Step, and apply M_k."""
        if client.step(loss) and self.prune:
            zero_pruned(client)

    def upload(self, client: Client) -> Upload:
        """Measure the change by training, prune, and return theta_k and M_k."""
        signals: dict[str, float | Measured] = {}
        if self.weighting in _CHANGES:
            signals[_CHANGES[self.weighting]] = Measured(self._change(client))
        if not self.prune:
            return Upload(client.model.shared, signals=signals)
        signals |= self._prune(client)
        layers = prunable_layers(client.model)
        left = count_remaining(client.kept["mask"], layers)
        signals["pruned"] = Measured(left, lambda of_layers: share_pruned([int(n) for n in of_layers], layers))
        return upload_masked(client, signals, zeros_count=not self.sas)

    def _change(self, client: Client) -> Tensor:
        """Return kl_k, or FedCAPR's m_k: the change of the features of the first images."""
        before, after = first_features(client)
        if self.weighting == "cdw":
            return mean_cosine_distance(before, after)
        return feature_divergence(before, after, self.temperature).clamp(min=0)  # Eq. (10)

    def _prune(self, client: Client) -> dict[str, float]:
        """Prune a step further, all at once or by Section III-F; return the signals about it."""
        mask, is_time = client.kept["mask"], client.round + 1 >= self.prune_from
        if not self.crr:
            left = remaining(mask, prunable_layers(client.model))
            deeper = self._next_mask(client, mask, left, 1.0) if is_time else None
            client.keep("mask", mask if deeper is None else deeper)
            zero_pruned(client)
            return {}
        measure = partial(own_accuracy, client, self.accuracy_images, self.accuracy)
        history = [*client.kept.get("accuracies", torch.empty(0)).tolist(), measure()][-_HISTORY:]
        client.keep("accuracies", torch.tensor(history, dtype=torch.float64))
        result = Trials(mask, stage=0, trials=0)
        if is_time:
            propose = partial(self._next_mask, client, mask, remaining(mask, prunable_layers(client.model)))
            result = prune_in_trials(
                client.model.shared[: len(mask)], mask, propose, measure, history,
                trials=self.trials, target=self.min_accuracy, plateau=self.plateau, tolerance=self.tolerance,
            )  # fmt: skip
        client.keep("mask", result.mask)
        return dict(zip(_CRR, (history[-1], float(result.stage), float(result.trials)), strict=True))

    def _next_mask(self, client: Client, mask: Tensor, left: Sequence[int], share: float) -> Tensor | None:
        """Return the mask pruned further by a share of this round's step; None if the share is no whole element.

        ``left`` are the elements that the mask leaves of each layer.
        """
        layers = prunable_layers(client.model)
        pruned = share_pruned(left, layers)
        step = next_step(pruned, self.target, self.step) if self.cap or pruned >= self.target else self.step
        weights, fraction = client.model.shared[: len(mask)], min(pruned + share * step, 1.0)
        return deeper_global_mask(weights, mask, layers, left, fraction, self.floor)

    def weights(self, reports: Mapping[str, Report]) -> Weights:
        """Return w_k of Eq. (13)."""
        if self.weighting == "size":
            return weigh("size", reports)
        if self.weighting == "praw":
            return Weights(normalise({k: report.signals["pruned"] ** 2 for k, report in reports.items()}))  # Eq. (12)
        changes = {client: report.signals[_CHANGES[self.weighting]] for client, report in reports.items()}
        if self.weighting != "klpwa":
            return Weights(normalise(changes))  # Eq. (11)
        pruned = {client: report.signals["pruned"] for client, report in reports.items()}
        return Weights(klpwa_weights(changes, pruned, self.alpha))  # Eq. (13)
