"""How models are scored: the section ``model.evaluation``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedsim.core.checks import at_least
from fedsim.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How models are scored."""

    task: Literal["retrieval", "classification"] = "retrieval"
    """retrieval, or classification: top-1 accuracy on the classes of training; it needs ``data.labels: common``. Of
    the settings below it uses flip (logits are added), share_from, batch_size, precision and test_during_fit"""
    layer: Literal["neck", "pool"] = "neck"
    """the retrieval feature: the embedding (neck), or the pooled map (pool)"""
    flip: bool = False
    """add the feature of the mirror image (the papers' protocols do; twice the time)"""
    distance: Literal["cosine", "euclidean"] = "cosine"
    """the gallery's order: cosine, or euclidean on features that are not normalised (papers 000 and 001)"""
    camera_aware: bool = True
    """whether the same identity in the same camera is junk"""
    junk_pids: tuple[int, ...] = (-1,)
    """identities whose gallery images count neither as right nor as wrong"""
    invalid_as_zero: bool = False
    """average over all queries; those without a match count as zeros (the code of paper 003)"""
    single_gallery_shot: bool = False
    """CMC on galleries with one random image per identity, in expectation (first CUHK03 protocol)"""
    share_from: int = 1000
    """data sets with at least so many images are scored by all ranks together, smaller ones by one rank each"""
    backend: Literal["auto", "torch", "faiss"] = "auto"
    """library that ranks: torch, faiss, or auto, which is torch"""
    batch_size: int = 64
    """images per forward pass; the same on any number of ranks"""
    precision: Literal["32-true", "run"] = "32-true"
    """precision of the forward passes: 32-true, or run: that of the run (``trainer.precision``), with
    ``channels_last`` where training has it. Features are float32, and similarities are computed in it"""
    ensemble: bool = False
    """on unseen data sets, also score all clients' personalised models together, with their features side by side
    (Feat-Concatenation of paper 001, Table 3, with ``Local``; FeatConcat of paper 000, Table 6)"""
    test_during_fit: bool = True
    """also score the test sets in each validation of a fit, for reports only: selection uses ``val/*``"""

    def __post_init__(self) -> None:
        """Check the ranges."""
        at_least("model.evaluation", 1, batch_size=self.batch_size)
        at_least("model.evaluation", 0, share_from=self.share_from)
        if self.task == "classification" and self.ensemble:
            raise ConfigError("model.evaluation.ensemble: joins retrieval features; leave it out of classification")

    @property
    def needs(self) -> Literal["neck", "pool", "head"]:
        """Part of the model that must be shared for a global model to be scored."""
        return "head" if self.task == "classification" else self.layer

    @property
    def monitor(self) -> str:
        """The score by which models are selected."""
        return "val/top1" if self.task == "classification" else "val/mAP"
