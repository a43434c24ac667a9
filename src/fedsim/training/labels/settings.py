"""Settings of pseudo-labels, for clients without identities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fedsim.core.arguments import Section
from fedsim.core.checks import at_least, not_negative, positive, within
from fedsim.core.errors import ConfigError
from fedsim.training.proxy_loss import ProxyLoss


@dataclass(frozen=True, kw_only=True)
class Clustering(Section, option="model.client.cluster"):
    """Labels for clients without identities: their images are clustered before each local epoch.

    Images are compared by the neck's features of unit length, without augmentation. The defaults are FedCAPR's, on
    which paper 004 builds; single clients may have other values, see ``model.clients``.
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
    """r: copies of each image, for data sets with few images per person; see docs/unsupervised.md"""
    proxies: Literal["camera", "cluster"] = "camera"
    """one proxy per cluster and camera, or one per cluster"""
    momentum: float = 0.2
    """mu: weight of the old proxy when an image moves it (Eq. 1)"""
    loss: ProxyLoss = field(default_factory=ProxyLoss)
    """the camera-aware contrastive loss (Eqs. 2-7)"""

    def check(self, section: str) -> None:
        """Raise ConfigError, which names the field of this ``section``, if a number is invalid."""
        at_least(section, 1, k1=self.k1, k2=self.k2, min_samples=self.min_samples, replicate=self.replicate)
        if self.k2 > self.k1:
            raise ConfigError(f"{section}.k2: {self.k2} is more than k1 = {self.k1}")
        if not 0 < self.eps < 1:
            raise ConfigError(f"{section}.eps: {self.eps} is not between 0 and 1, both excluded")
        within(section, "[0, 1]", momentum=self.momentum)
        loss, section = self.loss, f"{section}.loss"
        positive(section, temperature=loss.temperature)
        not_negative(section, intra=loss.intra, inter=loss.inter, camera=loss.camera)
        at_least(section, 1, camera_positives=loss.camera_positives)
        at_least(section, 0, inter_negatives=loss.inter_negatives, camera_negatives=loss.camera_negatives)


@dataclass(frozen=True, kw_only=True)
class BottomUp(Section, option="model.client.bottom_up"):
    """Labels for clients without identities: at first every image is a cluster, then clusters merge (FedUReID).

    Between rounds the client keeps the cluster of each image. Images are compared by the backbone's pooled features of
    unit length, without augmentation.
    """

    merge: float = 0.05
    """pairs of clusters that merge before each of the client's rounds but the first, as a share of its images (rounded
    down)"""
    size_penalty: float = 0.003
    """lambda: added to the squared distance of two clusters for each image in them"""
    momentum: float = 0.5
    """weight of the old proxy when an image moves it"""
    temperature: float = 0.1
    """of the exclusive loss, the cross-entropy over all clusters"""

    def check(self, section: str) -> None:
        """Raise ConfigError, which names the field of this ``section``, if a number is invalid."""
        within(section, "[0, 1]", merge=self.merge, momentum=self.momentum)
        within(section, "[0, inf]", size_penalty=self.size_penalty)
        positive(section, temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class ClusterOverride(Section, option="model.clients.NAME.cluster"):
    """Settings of :class:`Clustering` in which one client differs; null keeps the common value."""

    k1: int | None = None
    k2: int | None = None
    eps: float | None = None
    min_samples: int | None = None
    replicate: int | None = None
