"""How models are scored: the section ``model.evaluation``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from fedsim.core.arguments import Section
from fedsim.core.checks import at_least
from fedsim.core.errors import ConfigError
from fedsim.settings.facts import NOTHING, ROUNDING, Facts

_RETRIEVAL = Facts(needs="task == 'retrieval'")


@dataclass(frozen=True, kw_only=True)
class Evaluation(Section, option="model.evaluation"):
    """How models are scored."""

    task: Literal["retrieval", "classification"] = "retrieval"
    """retrieval, or classification: top-1 accuracy on the classes of training; it needs ``data.labels: common``. Of
    the settings below it uses flip (logits are added), share_from, batch_size, precision and test_during_fit"""
    layer: Annotated[Literal["neck", "pool"], _RETRIEVAL] = "neck"
    """the retrieval feature: the embedding (neck), or the pooled map (pool)"""
    flip: bool = False
    """add the feature of the mirror image (the papers' protocols do; twice the time)"""
    distance: Annotated[Literal["cosine", "euclidean"], _RETRIEVAL] = "cosine"
    """the gallery's order: cosine, or euclidean on features that are not normalised (papers 000 and 001)"""
    camera_aware: Annotated[bool, _RETRIEVAL] = True
    """whether the same identity in the same camera is junk"""
    junk_pids: Annotated[tuple[int, ...], replace(_RETRIEVAL, is_set=True)] = (-1,)
    """identities whose gallery images count neither as right nor as wrong"""
    invalid_as_zero: Annotated[bool, _RETRIEVAL] = False
    """average over all queries; those without a match count as zeros (the code of paper 003)"""
    single_gallery_shot: Annotated[bool, _RETRIEVAL] = False
    """CMC on galleries with one random image per identity, in expectation (first CUHK03 protocol)"""
    share_from: Annotated[int, ROUNDING] = 1000
    """data sets with at least so many images are scored by all ranks together, smaller ones by one rank each"""
    backend: Annotated[Literal["auto", "torch", "faiss"], ROUNDING] = "auto"
    """library that ranks: torch, faiss, or auto, which is torch"""
    batch_size: Annotated[int, ROUNDING] = 64
    """images per forward pass; the same on any number of ranks"""
    precision: Annotated[
        Literal["32-true", "run"], Facts(needs="trainer.precision == 'bf16-mixed' or model.client.channels_last")
    ] = "32-true"
    """precision of the forward passes: 32-true, or run: that of the run (``trainer.precision``), with
    ``channels_last`` where training has it. Features are float32, and similarities are computed in it"""
    ensemble: Annotated[bool, NOTHING] = False
    """on unseen data sets, also score all clients' personalised models together, with their features side by side
    (Feat-Concatenation of paper 001, Table 3, with ``Local``; FeatConcat of paper 000, Table 6)"""
    test_during_fit: Annotated[bool, NOTHING] = True
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
