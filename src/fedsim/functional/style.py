"""Statistics of maps that stand for their style, and how images of a batch exchange them.

Shapes: B images, C channels, H x W pixels of a map. The style of an image is mean and standard deviation of each
channel over its pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def style_of(
    x: Tensor, eps: float, box: Tensor | None = None, *, unbiased: bool = True
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return mean and standard deviation of each channel of maps [B, C, H, W], both [B, C, 1, 1], at least float32.

    The variance divides by the pixels less one if it is ``unbiased``, otherwise by the pixels; ``eps`` is added to it
    under the root. ``box`` [H, W] bool marks the pixels that count, at least two; None: all.

    >>> mean, std = style_of(torch.tensor([[[[0.0, 2.0, 4.0, 9.0]]]]), 0.0, torch.tensor([[True, True, True, False]]))
    >>> mean.item(), std.item()
    (2.0, 2.0)
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if box is None:
        variance, mean = torch.var_mean(x, dim=(2, 3), correction=int(unbiased), keepdim=True)
    else:
        counts, size = box.to(x.dtype), box.sum()
        mean = (x * counts).sum(dim=(2, 3), keepdim=True) / size
        variance = ((x - mean).square() * counts).sum(dim=(2, 3), keepdim=True) / (size - int(unbiased))
    return mean, (variance + eps).sqrt()


def style_of_places(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each place over the images [B, C, H, W] of a batch: both [1, C, H, W].

    The variance divides by B - 1, or by 1 for a single image, whose deviations are 0. At least float32.

    >>> mean, std = style_of_places(torch.tensor([[[[0.0]]], [[[2.0]]], [[[4.0]]]]))
    >>> mean.item(), std.item()
    (2.0, 2.0)
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(x, dim=0, correction=min(1, len(x) - 1), keepdim=True)
    return mean, variance.sqrt()


def standardise(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Remove the style of each image of maps [B, C, H, W]: each channel gets the mean 0 and the deviation 1.

    ``eps`` is added to the variance, which divides by the pixels, so a channel of one value becomes 0. Statistics are
    at least float32; the result has the dtype of ``x``.

    >>> standardise(torch.tensor([[[[0.0, 2.0]], [[7.0, 7.0]]]]), eps=0.0625).flatten().tolist()[2:]
    [0.0, 0.0]
    """
    mean, std = style_of(x, eps, unbiased=False)
    return ((x - mean) / std).to(x.dtype)


def mix_styles(x: Tensor, shares: Tensor, partners: Tensor, eps: float = 1e-6) -> Tensor:
    """Give images a mixture of their own style and a partner's (MixStyle, Zhou et al., ICLR 2021).

    ``x`` are maps [B, C, H, W], ``partners`` [B] int64 numbers of images, and ``shares`` [B] lambda, the weight of an
    image's own style. With a share of 1 an image keeps its bits. No gradient flows through the statistics.

    >>> x = torch.tensor([[[[0.0, 2.0]]], [[[10.0, 14.0]]]])
    >>> mix_styles(x, torch.tensor([1.0, 0.5]), torch.tensor([1, 0]), eps=0.0).flatten().tolist()
    [0.0, 2.0, 5.0, 8.0]
    """
    mean, std = style_of(x.detach(), eps)
    return _mix(x, shares, (mean, std), (mean[partners], std[partners]))


def mix_styles_with(x: Tensor, shares: Tensor, style: tuple[Tensor, Tensor], eps: float = 1e-5) -> Tensor:
    """Give images a mixture of their own style and one ``style`` of all (FedFD-A, Yang et al., ECCV 2024).

    ``x`` are maps [B, C, H, W], ``shares`` [B] lambda, the weight of an image's own style, and ``style`` mean and
    deviation, both [1, C, 1, 1]. ``eps`` is added to an image's variance, which divides by the pixels. With a share of
    1 an image keeps its bits. No gradient flows through the statistics.

    >>> x, style = torch.tensor([[[[0.0, 4.0]]]]), (torch.full((1, 1, 1, 1), 10.0), torch.full((1, 1, 1, 1), 4.0))
    >>> [mix_styles_with(x, torch.tensor([share]), style, eps=0.0).flatten().tolist() for share in (1.0, 0.5, 0.0)]
    [[0.0, 4.0], [3.0, 9.0], [6.0, 14.0]]
    """
    return _mix(x, shares, style_of(x.detach(), eps, unbiased=False), style)


def _mix(x: Tensor, shares: Tensor, style: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    (mean, std), (target_mean, target_std) = style, target
    share = shares.to(mean.dtype)[:, None, None, None]
    # not (x - mean) / std first: so a share of 1 multiplies by exactly 1 and adds exactly 0
    scale = (share * std + (1 - share) * target_std) / std
    shift = share * mean + (1 - share) * target_mean - mean * scale
    return (x * scale + shift).to(x.dtype)


def normalise_with_mixture(
    x: Tensor, share: float, style: tuple[Tensor, Tensor], affine: tuple[Tensor, Tensor], eps: float = 1e-5
) -> Tensor:
    """Normalise images by a mixture of their own style and one ``style`` of all (FedFD-A's adaptation).

    The mean of an image of maps ``x`` [B, C, H, W] becomes ``share`` times its own plus ``1 - share`` times that of
    ``style``, and so does its deviation; ``style`` and ``eps`` are those of :func:`mix_styles_with`. ``affine`` is
    weight and bias, both [C]. A share of 1 is instance normalisation, one of 0 batch normalisation in evaluation.

    >>> x, style = torch.tensor([[[[0.0, 4.0]]]]), (torch.full((1, 1, 1, 1), 10.0), torch.full((1, 1, 1, 1), 4.0))
    >>> affine = torch.tensor([3.0]), torch.tensor([1.0])
    >>> [normalise_with_mixture(x, share, style, affine, 0.0).flatten().tolist() for share in (1.0, 0.5, 0.0)]
    [[-2.0, 4.0], [-5.0, -1.0], [-6.5, -3.5]]
    """
    (mean, std), (weight, bias) = style_of(x, eps, unbiased=False), (part[:, None, None] for part in affine)
    scale = weight / (share * std + (1 - share) * style[1])
    shift = bias - (share * mean + (1 - share) * style[0]) * scale
    return (x * scale + shift).to(x.dtype)


def swap_styles(
    x: Tensor, partners: Tensor, *, style_box: Tensor | None = None, content_box: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Give images the style of their partners (CrossNorm, Tang et al., ICCV 2021; DACS's CrossStyle).

    ``x`` are maps [B, C, H, W], ``partners`` [B] int64 numbers of images. Boxes are bool [H, W] of at least two pixels:
    a partner's style is that of its ``style_box``, and an image changes in its ``content_box`` alone, by the style that
    it has there. None: all pixels. Gradients flow through the statistics.

    >>> x = torch.tensor([[[[0.0, 2.0]]], [[[10.0, 14.0]]]])
    >>> swap_styles(x, torch.tensor([1, 0]), eps=0.0).flatten().tolist()
    [10.0, 14.0, 0.0, 2.0]
    """
    mean, std = style_of(x, eps, content_box)
    given_mean, given_std = (mean, std) if style_box is content_box else style_of(x, eps, style_box)
    scale = given_std[partners] / std
    swapped = (x * scale + (given_mean[partners] - mean * scale)).to(x.dtype)
    return swapped if content_box is None else torch.where(content_box, swapped, x)


def restyle(x: Tensor, style: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor], eps: float = 1e-8) -> Tensor:
    """Return ``s (x - mu) / (sigma + eps) + m``: images with a style for each place (DACS, Eqs. 1 and 2).

    ``x`` are images [B, C, H, W], ``style`` is their :func:`style_of`: mu and sigma, both [B, C, 1, 1]; or their
    :func:`style_of_places`. ``target`` is m and s: both [C, H, W], or a style for each image, both [B, C, 1, 1].

    >>> x = torch.tensor([[[[1.0, 5.0]]]])
    >>> m, s = torch.tensor([[[0.5, 0.5]]]), torch.tensor([[[1.0, 2.0]]])
    >>> restyle(x, style_of(x, 0.0, unbiased=False), (m, s)).flatten().tolist()
    [-0.5, 2.5]
    """
    (mean, std), (target_mean, target_std) = style, target
    return target_std * ((x - mean) / (std + eps)) + target_mean


def style_gap(style: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor], variances: bool = False) -> Tensor:
    """Return ``(mu - m)^2 + (sigma - s)^2``, a mean over images, channels and places: a scalar (DACS, Eqs. 3 and 4).

    Arguments are those of :func:`restyle`. ``variances``: the second term is ``(sigma^2 - s^2)^2``.

    >>> style = torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1, 1), 3.0)
    >>> target = torch.ones(1, 1, 2), torch.ones(1, 1, 2)
    >>> style_gap(style, target).item(), style_gap(style, target, variances=True).item()
    (5.0, 65.0)
    """
    (mean, std), (target_mean, target_std) = style, target
    if variances:
        std, target_std = std.square(), target_std.square()
    return (mean - target_mean).square().mean() + (std - target_std).square().mean()


def image_moments(x: Tensor) -> Tensor:
    """Return mean and mean square of each channel of images [B, C, H, W]: [B, 2 C] float64, all means first.

    >>> image_moments(torch.tensor([[[[1.0, 3.0]], [[2.0, 2.0]]]])).tolist()
    [[2.0, 2.0, 5.0, 4.0]]
    """
    x = x.double()
    return torch.cat([x.mean((2, 3)), x.square().mean((2, 3))], dim=1)


def camera_styles(moments: Tensor, cameras: Tensor, num_cameras: int) -> Tensor:
    """Return mean and variance of each channel over all pixels of a camera's images: [K, 2 C] float32, all means first.

    ``moments`` [n, 2 C] float64 are the images' :func:`image_moments`, and ``cameras`` [n] int64 their cameras, from 0
    to K - 1 with K = ``num_cameras``; each has an image. The variance divides by the pixels, and contains the
    differences between images.

    >>> moments = image_moments(torch.tensor([[[[1.0]]], [[[3.0]]], [[[5.0]]]]))
    >>> camera_styles(moments, torch.tensor([1, 1, 0]), 2).tolist()
    [[5.0, 0.0], [2.0, 1.0]]
    """
    # a product adds in one order, also on GPUs
    is_of = (torch.arange(num_cameras, device=cameras.device)[:, None] == cameras).to(moments.dtype)
    mean, square = (is_of @ moments / is_of.sum(1, keepdim=True)).chunk(2, dim=1)
    return torch.cat([mean, (square - mean.square()).clamp_min(0)], dim=1).float()  # below 0 by rounding


def spread_of_styles(bank: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each number of a bank of styles [n, 2 C] over its rows, both [2 C].

    >>> [moment.tolist() for moment in spread_of_styles(torch.tensor([[1.0, 2.0], [3.0, 2.0]]))]
    [[2.0, 2.0], [1.0, 0.0]]
    """
    return bank.mean(0), bank.var(0, correction=0)


def random_styles(noise: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return random styles [B, 2 C] of independent numbers with the given ``mean`` and ``variance``, both [2 C].

    ``noise`` [B, 2 C] is standard normal. The first C numbers, means of channels, are normal. The others, variances of
    channels, are log-normal, so they are positive; where their mean is 0, they are 0.

    >>> random_styles(torch.ones(1, 2), torch.tensor([1.0, 2.0]), torch.tensor([4.0, 0.0])).tolist()
    [[3.0, 2.0]]
    """
    (noise, noise_of_variance), (mean, center), (variance, spread) = (
        numbers.chunk(2, dim=-1) for numbers in (noise, mean, variance)
    )
    log_variance = torch.log1p(spread / center.square().clamp_min(torch.finfo(center.dtype).tiny))
    factor = (log_variance.sqrt() * noise_of_variance - log_variance / 2).exp()
    return torch.cat([mean + variance.sqrt() * noise, torch.where(center > 0, center * factor, 0.0)], dim=-1)
