"""The loss of clusters: camera-aware contrastive losses of images against proxies.

B images of a batch, A proxies, D features, C cameras of a client. Features and memory have unit length; s_ip is the
similarity of image i and proxy p, divided by the temperature tau.

Paper 004 (FedKLPR), Section III, with FedCAPR's and CAP's code where symbols are missing in the text: each term is a
mean over the images of one camera, summed over the cameras in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.core.arguments import Section
from fedsim.settings.facts import Facts
from fedsim.training.proxies import Proxies

_CAMERA = Facts(needs="camera")


def similarities(features: Tensor, proxies: Proxies, temperature: float) -> Tensor:
    """Return s [B, A]: cosines of features [B, D], of any length, with proxies, divided by tau."""
    return F.normalize(features) @ proxies.memory.T / temperature


def intra_camera_loss(similarity: Tensor, labels: Tensor, proxies: Proxies) -> Tensor:
    """Cross-entropy of each image over the proxies of its own camera (Eq. 3).

    ``-log(exp(s_ij) / sum over p in the camera of j of exp(s_ip))``, j the image's proxy.

    ``similarity`` is s [B, A]; ``labels`` [B] int64 are each image's proxy, of the A ``proxies``. Returns [B].

    >>> proxies = Proxies(torch.eye(3), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]))
    >>> intra_camera_loss(torch.tensor([[0.0, 9.0, 0.0], [1.0, 9.0, 0.0]]), torch.tensor([0, 2]), proxies)
    tensor([0.6931, 1.3133])
    """
    other_camera = proxies.cameras[labels][:, None] != proxies.cameras
    return F.cross_entropy(similarity.masked_fill(other_camera, -torch.inf), labels, reduction="none")


def inter_camera_loss(similarity: Tensor, labels: Tensor, proxies: Proxies, num_negatives: int = 50) -> Tensor:
    """Mean cross-entropy of each image with all proxies of its cluster against its hardest negatives (Eqs. 4, 5).

    ``-1 / |P| sum over p in P of log(exp(s_ip) / sum over u in P and Q of exp(s_iu))``: P, the proxies of the image's
    cluster, its own included; Q, the ``num_negatives`` most similar others, or all if there are fewer. Shapes are those
    of :func:`intra_camera_loss`.

    >>> proxies = Proxies(torch.eye(3), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]))
    >>> inter_camera_loss(torch.zeros(2, 3), torch.tensor([0, 2]), proxies, num_negatives=1)
    tensor([1.0986, 0.6931])
    """
    positive = proxies.clusters[labels][:, None] == proxies.clusters
    return _soft_cross_entropy(similarity, positive, num_negatives)


def camera_aware_loss(similarity: Tensor, proxies: Proxies, num_positives: int = 3, num_negatives: int = 30) -> Tensor:
    """As :func:`inter_camera_loss`, with positives by similarity instead of clusters (Eqs. 6, 7).

    The most similar proxy of each camera is a candidate. P', the positives: the ``num_positives`` most similar
    candidates, or all if there are fewer cameras. Q', the negatives: the ``num_negatives`` most similar other proxies.
    The image's own camera takes part: in the paper it does not, in the code it does. Shapes are those of
    :func:`intra_camera_loss`.

    >>> proxies = Proxies(torch.eye(3), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]))
    >>> camera_aware_loss(torch.tensor([[1.0, 1.0, 0.0]]), proxies, num_positives=1, num_negatives=1)
    tensor([0.6931])
    """
    nearness, best = similarity.detach()[:, None, :].masked_fill(~proxies.by_camera, -torch.inf).max(2)  # [B, C]
    chosen = nearness.topk(min(num_positives, best.shape[1]), dim=1).indices
    positive = torch.zeros_like(similarity, dtype=torch.bool).scatter_(1, best.gather(1, chosen), True)
    return _soft_cross_entropy(similarity, positive, num_negatives)


def _soft_cross_entropy(similarity: Tensor, positive: Tensor, num_negatives: int) -> Tensor:
    """Mean over the positives [B, A] of ``log sum over u in P and Q of exp(s_u) - s_p``."""
    negatives = similarity.detach().masked_fill(positive, -torch.inf)
    hardest = negatives.topk(min(num_negatives, negatives.shape[1]), dim=1)
    # with fewer negatives than num_negatives, topk also returns positives, at -inf: they are counted anyway
    counted = positive.scatter(1, hardest.indices, True)
    total = similarity.masked_fill(~counted, -torch.inf).logsumexp(1)
    mean_positive = similarity.masked_fill(~positive, 0.0).sum(1) / positive.sum(1)
    return total - mean_positive


def across_cameras(losses: Tensor, cameras: Tensor) -> Tensor:
    """Mean of losses [B] over the images of each camera, summed (scalar) over the cameras in the batch.

    So a client with eight cameras has up to four times the loss of one with two, as in the paper's code.

    >>> across_cameras(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 4]))
    tensor(7.)
    """
    counts = (cameras[:, None] == cameras).to(losses.dtype).sum(1)
    return (losses / counts).sum()


@dataclass(frozen=True, kw_only=True)
class ProxyLoss(Section, option="model.client.cluster.loss"):
    """L_capr = l1 L_intra + l2 L_inter + l3 L_cam (paper 004, Eq. 2)."""

    intra: float = 0.6
    """l1, weight of Eq. (3); FedCAPR's code 0.6, CAP 1"""
    inter: float = 0.7
    """l2, weight of Eqs. (4), (5); FedCAPR's code 0.7, CAP 0.5"""
    camera: float = 0.7
    """l3, weight of Eqs. (6), (7); FedCAPR's code 0.7, CAP 0"""
    temperature: float = 0.07
    """tau"""
    inter_negatives: Annotated[int, Facts(needs="inter")] = 50
    """|Q| of Eq. (5)"""
    camera_positives: Annotated[int, _CAMERA] = 3
    """|P'| of Eq. (7)"""
    camera_negatives: Annotated[int, _CAMERA] = 30
    """|Q'| of Eq. (7)"""

    def __call__(self, similarity: Tensor, labels: Tensor, proxies: Proxies) -> Tensor:
        """Return L_capr (scalar) of similarities [B, A] to proxies; ``labels`` [B] are the proxies of the images."""
        total = self.intra * intra_camera_loss(similarity, labels, proxies)
        if self.inter:
            total = total + self.inter * inter_camera_loss(similarity, labels, proxies, self.inter_negatives)
        if self.camera:
            positives, negatives = self.camera_positives, self.camera_negatives
            total = total + self.camera * camera_aware_loss(similarity, proxies, positives, negatives)
        return across_cameras(total, proxies.cameras[labels])
