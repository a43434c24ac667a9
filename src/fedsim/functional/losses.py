"""Losses and distances of features and logits. B images, D features, Z identities."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def soft_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy against soft labels t of any mass: ``(1 - s) * t + s * w / Z``, w the sum of t; a scalar.

    ``logits`` are [B, Z] float, ``targets`` t [B, Z] float; ``smoothing`` is s in [0, 1) (Szegedy et al., CVPR 2016).
    The mean divides by B for any w.

    >>> soft_cross_entropy(torch.zeros(1, 2), torch.tensor([[0.25, 0.25]]))
    tensor(0.3466)
    """
    spread = smoothing / targets.shape[1] * targets.sum(1, keepdim=True)
    return F.cross_entropy(logits, (1 - smoothing) * targets + spread)  # label_smoothing would assume sums of 1


def batch_hard_triplet(features: Tensor, labels: Tensor, margin: float = 0.3, squared: bool = False) -> Tensor:
    """Batch-hard triplet loss ``mean(max(0, m + d_positive - d_negative))``, a scalar (Hermans et al., 2017, Eq. 5).

    Each anchor compares its farthest image of the same identity with its nearest image of another one. Anchors without
    a positive or a negative in the batch do not count; a batch without such anchors gives 0. Eq. (8) of paper 002 has
    squared distances, and both signs wrong in print: it would push positives away.

    ``features`` are [B, D] float, ``labels`` [B] int64; the ``margin`` m has the unit of the Euclidean distance,
    ``squared`` or not.

    >>> x = torch.tensor([[0.0], [1.0], [1.5], [3.0]])
    >>> batch_hard_triplet(x, torch.tensor([0, 0, 1, 1]), margin=0.3)
    tensor(0.5250)
    """
    distance = (features[:, None, :] - features[None, :, :]).square().sum(-1)
    if not squared:
        distance = distance.clamp_min(1e-12).sqrt()  # the gradient of sqrt at 0 is infinite
    is_same = labels[:, None] == labels[None, :]
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    positive = distance.masked_fill(~is_same | itself, -torch.inf).amax(1)
    negative = distance.masked_fill(is_same, torch.inf).amin(1)
    valid = (is_same & ~itself).any(1) & (~is_same).any(1)
    # without a positive or negative the gap is -inf, which relu turns into 0 without gradient
    return F.relu(margin + positive - negative).sum() / valid.sum().clamp_min(1)


def mean_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the softmax of logits [B, Z] float in nats, a mean over the batch: a scalar.

    >>> mean_entropy(torch.zeros(3, 2)).item() == torch.tensor(2.0).log().item()
    True
    """
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean()


def authenticity(plain: Tensor, styled: Tensor, styled_local: Tensor) -> Tensor:
    """Return ``sp(H(G(x)) - H(G(x'))) + sp(H(G(x')) - H(L(x')))``, a scalar (DACS, Eqs. 5 and 6).

    ``sp(t)`` is ``ln(1 + e^t)``. Arguments are the entropies H, scalars: of the global model G on images x and on
    restyled ones x', and of the local expert L on x'. Minimised, G is less certain of x' than of x, and L less than G.

    >>> h = torch.tensor(1.5)
    >>> round(authenticity(h, h, h).item(), 5)  # 2 ln 2
    1.38629
    """
    return F.softplus(plain - styled) + F.softplus(styled - styled_local)


def entropy_causality(normalised: Tensor, relevant: Tensor, irrelevant: Tensor) -> Tensor:
    """Dual causality loss of an SNR layer with entropies (Jin et al., arXiv:2101.00588): a scalar.

    ``sp(H(F+) - H(F~)) + sp(H(F~) - H(F-))``, where ``sp(t)`` is ``ln(1 + e^t)``, and H is the mean entropy of a batch.
    Minimised, a classifier is more certain of the relevant part than without style, and less of the other part.

    Arguments are logits [B, Z] float of the layer's classifier for the pooled maps F~, F+ and F-.

    >>> z = torch.tensor([[1.0, 2.0]])
    >>> round(entropy_causality(z, z, z).item(), 5)  # 2 ln 2
    1.38629
    """
    return authenticity(mean_entropy(relevant), mean_entropy(normalised), mean_entropy(irrelevant))


def causality_loss(normalised: Tensor, relevant: Tensor, irrelevant: Tensor, labels: Tensor) -> Tensor:
    """Dual causality loss of an SNR layer (Jin et al., CVPR 2020), a mean over the anchors of a batch: a scalar.

    ``sp(p(F+) - p(F~)) + sp(n(F~) - n(F+)) + sp(p(F~) - p(F-)) + sp(n(F-) - n(F~))``, where ``sp(t)`` is
    ``ln(1 + e^t)``, and p and n are the anchor's mean distances to the images of its identity and of others. The
    distance is ``(1 - cos) / 2``; equal features have distance 0, also without a direction. Minimised, people are
    easier to distinguish with the relevant part than without style, and harder with the other part. Paper silent on the
    choice of positives and negatives; here all of the batch.

    The pooled maps F~, F+ and F- are [B, C], ``labels`` [B] int64. Anchors without a positive or a negative do not
    count; a batch without others gives 0.

    >>> f = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> round(causality_loss(f, f, f, torch.tensor([0, 0, 1])).item(), 5)  # 4 ln 2
    2.77259
    """
    is_same = labels[:, None] == labels[None, :]
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    positives, negatives = (is_same & ~itself).to(normalised.dtype), (~is_same).to(normalised.dtype)
    means = []
    for features in (normalised, relevant, irrelevant):
        unit = F.normalize(features, eps=1e-4)  # bounds the gradient of features near 0
        square = unit.square().sum(1)
        distance = (square[:, None] + square[None, :] - 2 * unit @ unit.T) / 4
        means.append([(distance * chosen).sum(1) / chosen.sum(1).clamp_min(1) for chosen in (positives, negatives)])
    (p, n), (p_plus, n_plus), (p_minus, n_minus) = means
    gaps = (p_plus - p, n - n_plus, p - p_minus, n_minus - n)
    counts = positives.any(1) & negatives.any(1)
    return (torch.stack([F.softplus(gap) for gap in gaps]).sum(0) * counts).sum() / counts.sum().clamp_min(1)


def center_loss(features: Tensor, labels: Tensor, centers: Tensor) -> Tensor:
    """``1/2 |f_i - c_{y_i}|^2``, a mean over the batch (Wen et al., ECCV 2016, Eq. 2, which is the sum).

    ``features`` f are [B, D] float, ``labels`` y [B] int64, and ``centers`` c [Z, D] float have no gradient.

    >>> center_loss(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([1, 1]), torch.zeros(2, 2))
    tensor(2.5000)
    """
    return (features - centers.detach().index_select(0, labels)).square().sum(1).mean() / 2


def moved_centers(centers: Tensor, features: Tensor, labels: Tensor, rate: float) -> Tensor:
    """Return the centers after a batch: ``c_j - rate * sum(c_j - f_i) / (1 + n_j)`` (Wen et al., ECCV 2016, Eq. 4).

    The sum is over those n_j images of the batch that are of identity j. ``centers`` c are [Z, D] float, ``features`` f
    [B, D] float, ``labels`` [B] int64, and ``rate`` is the paper's alpha in [0, 1].

    >>> moved_centers(torch.zeros(2, 1), torch.tensor([[4.0], [2.0]]), torch.tensor([1, 1]), rate=0.5)
    tensor([[0.],
            [1.]])
    """
    with torch.no_grad():
        identities = torch.arange(len(centers), device=labels.device)
        members = (labels == identities[:, None]).to(centers.dtype)  # sums by a product are deterministic on GPUs, too
        count = members.sum(1, keepdim=True)
        return centers - rate * (count * centers - members @ features.to(centers.dtype)) / (1 + count)


def mean_cosine_distance(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Mean of ``1 - cos(f, f')`` over two batches of logits [B, Z], in [0, 2] (paper 003, Algorithm 3, lines 23-28).

    >>> mean_cosine_distance(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
    tensor(0.5000)
    """
    return (1 - F.cosine_similarity(logits, other_logits, dim=1)).mean().clamp_min(0.0)


def mean_of_chosen(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of those ``values`` [B] that are ``chosen`` [B] bool, a scalar; at least one must be.

    On GPUs the others enter the sum as zeros, which may round differently: the host would have to wait for a choice.

    >>> mean_of_chosen(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([True, False, True]))
    tensor(2.)
    """
    if values.is_cpu:
        return values[chosen].mean()
    return torch.where(chosen, values, 0.0).sum() / chosen.sum()


def model_contrastive(features: Tensor, of_global: Tensor, of_previous: Tensor, temperature: float) -> Tensor:
    """``-log(exp(cos(z, z_glob) / tau) / (exp(cos(z, z_glob) / tau) + exp(cos(z, z_prev) / tau)))`` (MOON), batch mean.

    The three models' features are [B, D]: in training, as received, and after the client's last round.

    >>> x = torch.eye(2)
    >>> model_contrastive(x, x, x, temperature=0.5)
    tensor(0.6931)
    """
    references = (of_global, of_previous)
    similarities = torch.stack([F.cosine_similarity(features, reference, dim=1) for reference in references], 1)
    first = torch.zeros(len(features), dtype=torch.long, device=features.device)
    return F.cross_entropy(similarities / temperature, first)


def distillation_loss(features: Tensor, targets: Tensor, normalise: bool) -> Tensor:
    """Mean squared difference of a student's features [B, D] and targets [B, D], the mean of its teachers' features.

    ``normalise`` scales the student's features to unit length first, and takes the squared distance of the two: a sum
    over D, since a mean over D of such small numbers would have next to no gradient.

    >>> distillation_loss(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.6, 0.0]]), normalise=True)
    tensor(0.6400)
    """
    if normalise:
        return (F.normalize(features) - targets).square().sum(1).mean()
    return F.mse_loss(features, targets)


def feature_divergence(p: Tensor, q: Tensor, temperature: float = 1.0) -> Tensor:
    """``sum_d P_d log(P_d / Q_d)``, a mean over a batch (paper 004, Eq. 8).

    P and Q are softmaxes over the features of two models, ``p`` and ``q`` [B, D], divided by the temperature T > 0.

    >>> feature_divergence(torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2))
    tensor(0.1308)
    """
    log_p, log_q = (F.log_softmax(x / temperature, dim=1) for x in (p, q))
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def soft_label_divergence(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """``T^2 sum_z Q_z log(Q_z / P_z)``, a mean over the batch (paper 001, Eqs. 12, 13).

    P and Q are softmaxes, at temperature T > 0, of the student's logits [B, Z] and the teacher's, ``targets`` [B, Z].

    >>> soft_label_divergence(torch.zeros(1, 2), torch.tensor([[3.0, 1.0]]).log(), temperature=1.0)
    tensor(0.1308)
    """
    return temperature**2 * feature_divergence(targets, logits, temperature)
