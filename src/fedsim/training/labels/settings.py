"""How clients without identities find labels, as it appears in configs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fedsim.core.errors import ConfigError
from fedsim.training.labels.losses import ProxyLoss

__all__ = ["BottomUp", "ClusterOverride", "Clustering"]


@dataclass(frozen=True, kw_only=True)
class Clustering:
    """Labels for clients that know no identities: before each local epoch their images are clustered anew.

    What the images are compared by is the neck's feature of unit length, without augmentation. The paper's numbers are
    FedCAPR's (paper 004 continues it); each of them may differ for single clients, see ``model.clients``.
    """

    k1: int = 20
    """neighbours of the k-reciprocal encoding, the image itself counted"""
    k2: int = 6
    """images to average an encoding over, the image itself counted; 1: none"""
    eps: float = 0.5
    """DBSCAN: largest Jaccard distance of neighbours"""
    min_samples: int = 4
    """DBSCAN: neighbours, the image itself counted, that make it the core of a cluster"""
    replicate: int = 1
    """r: copies of each image, for data sets with few images per person; see docs/unsupervised.md for what it does"""
    proxies: Literal["camera", "cluster"] = "camera"
    """what images are compared with: a cluster's images in one camera, or all of them as if of one camera"""
    momentum: float = 0.2
    """mu: weight of what the memory holds when an image moves its proxy (Eq. 1)"""
    loss: ProxyLoss = field(default_factory=ProxyLoss)
    """the camera-aware contrastive loss (Eqs. 2-7)"""

    def check(self, where: str) -> None:
        """Raise ConfigError, naming the field, if a number cannot be right."""
        for name in ("k1", "k2", "min_samples", "replicate"):
            if self.__dict__[name] < 1:
                raise ConfigError(f"{where}.{name}: {self.__dict__[name]} is less than 1")
        if self.k2 > self.k1:
            raise ConfigError(f"{where}.k2: {self.k2} is more than k1 = {self.k1}")
        if not 0 < self.eps < 1:
            raise ConfigError(f"{where}.eps: {self.eps} is not between 0 and 1, both excluded")
        if not 0 <= self.momentum <= 1:
            raise ConfigError(f"{where}.momentum: {self.momentum} is not in [0, 1]")
        if self.loss.temperature <= 0:
            raise ConfigError(f"{where}.loss.temperature: {self.loss.temperature} is not positive")
        for name, least in (("camera_positives", 1), ("inter_negatives", 0), ("camera_negatives", 0)):
            if self.loss.__dict__[name] < least:
                raise ConfigError(f"{where}.loss.{name}: {self.loss.__dict__[name]} is less than {least}")


@dataclass(frozen=True, kw_only=True)
class BottomUp:
    """Labels for clients that know no identities: at first every image is a cluster, then clusters merge (FedUReID).

    Between rounds the client keeps who is in which cluster. Images are compared as for ``cluster``, in whole clusters.
    """

    merge: float = 0.05
    """before each of its rounds but the first, so many pairs of clusters merge: a share of the client's images"""
    size_penalty: float = 0.003
    """lambda: added to the distance of two clusters for each image in them"""
    momentum: float = 0.5
    """weight of what the memory holds when an image moves its cluster's entry"""
    temperature: float = 0.1
    """of the exclusive loss, the cross-entropy over all clusters"""

    def check(self, where: str) -> None:
        """Raise ConfigError, naming the field, if a number cannot be right."""
        for name, least, most in (("merge", 0, 1), ("momentum", 0, 1), ("size_penalty", 0, float("inf"))):
            if not least <= self.__dict__[name] <= most:
                raise ConfigError(f"{where}.{name}: {self.__dict__[name]} is not in [{least}, {most}]")
        if self.temperature <= 0:
            raise ConfigError(f"{where}.temperature: {self.temperature} is not positive")


@dataclass(frozen=True, kw_only=True)
class ClusterOverride:
    """Clustering of one client that differs from the others'; null keeps the common value."""

    k1: int | None = None
    """see Clustering"""
    k2: int | None = None
    """see Clustering"""
    eps: float | None = None
    """see Clustering"""
    min_samples: int | None = None
    """see Clustering"""
    replicate: int | None = None
    """see Clustering"""
