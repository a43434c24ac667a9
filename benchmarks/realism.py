"""How real drawn people are: what features of other pictures show of them. Nothing is trained.

A network that has seen photographs only finds people again in pictures as far as these hold what photographs hold:
clothes, colours, bodies. Its mAP is the gauge of a new drawing, beside what raw pixels and untrained networks reach. A
drawing is more real if ImageNet's networks are further ahead of raw pixels on it. Real photographs are the other end of
the gauge: groceries, with --grocery.

Features are pooled maps, or the pixels themselves, ranked by their cosine; scores are mAP and rank-1 in percent, their
mean over the data sets. "A random order" and untrained networks are drawn with three seeds, and shown with mean and
deviation. ImageNet's pictures are large, so the size of the pictures matters: there is a table for each.

    python benchmarks/realism.py --weights mobilenet_v2_imagenet_features.pth
    python benchmarks/realism.py --weights FILE --narrow mobilenet_v2_w035_features.pth --grocery FOLDER

Two minutes on an idle core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

from fedsim.data import MarketFolders, ReIDSource, SyntheticReID
from fedsim.data.images import Size
from fedsim.evaluation.ranker import rank_features
from fedsim.evaluation.ranking import RetrievalLabels
from fedsim.functional.normalise import normalise_images
from fedsim.models import Backbone, MobileNetV2, SmallCNN
from seeded_runs import SEEDS, show

BATCH = 64
Extract = Callable[[Tensor], Tensor]
"""pixels, uint8 [B, 3, H, W] -> features [B, D]"""

UNTRAINED: dict[str, Callable[[], Backbone]] = {
    "SmallCNN, width 24": lambda: SmallCNN(24),
    "MobileNetV2": MobileNetV2,
}


def raw_pixels(pixels: Tensor) -> Tensor:
    """Return normalised pixels as features."""
    return normalise_images(pixels).flatten(1)


def colours(pixels: Tensor) -> Tensor:
    """Return the mean colour of six horizontal stripes: what a person wears, without any form."""
    return torch.nn.functional.adaptive_avg_pool2d(normalise_images(pixels), (6, 1)).flatten(1)


def random_order(seed: int) -> Extract:
    """Return features that know nothing of the pixels."""
    generator = torch.Generator().manual_seed(seed)
    return lambda pixels: torch.randn(len(pixels), 64, generator=generator)


def pooled(backbone: Backbone) -> Extract:
    """Return a network's features, its pooled map."""
    backbone.eval()
    return lambda pixels: backbone(normalise_images(pixels)).mean((2, 3))


def untrained(build: Callable[[], Backbone], seed: int) -> Extract:
    """Return the features of a network with random weights."""
    torch.manual_seed(seed)
    return pooled(build())


class TestSet(NamedTuple):
    """Pictures of a data set, uint8 [n, 3, H, W], and their labels."""

    name: str
    query: Tensor
    gallery: Tensor
    labels: RetrievalLabels


def test_sets(source: ReIDSource, size: Size) -> list[TestSet]:
    """Read or draw the pictures of all data sets."""
    sets = []
    for domain in source.domains():
        query, gallery = domain.query, domain.gallery
        assert query is not None
        assert gallery is not None
        labels = RetrievalLabels(query.pids, query.camids, gallery.pids, gallery.camids)
        sets.append(TestSet(domain.name, query.images.decode(size), gallery.images.decode(size), labels))
    return sets


@torch.no_grad()
def scores_of(extract: Extract, data: TestSet) -> tuple[float, float]:
    """Return mAP and rank-1, percent."""
    query, gallery = (torch.cat([extract(part) for part in p.split(BATCH)]) for p in (data.query, data.gallery))
    ranking = rank_features(query, gallery, data.labels)
    return 100 * ranking.mAP, 100 * float(ranking.cmc[0])


def gauge(name: str, source: ReIDSource, size: Size, pretrained: dict[str, Backbone]) -> str:
    """Return a row per network: its means, and its mAP on each data set."""
    extracts: dict[str, list[Extract]] = {"a random order": [random_order(seed) for seed in SEEDS]}
    extracts |= {"raw pixels": [raw_pixels], "colours of six stripes": [colours]}
    extracts |= {f"{label}, untrained": [untrained(build, s) for s in SEEDS] for label, build in UNTRAINED.items()}
    extracts |= {label: [pooled(network)] for label, network in pretrained.items()}
    sets, rows = test_sets(source, size), []
    for label, features in extracts.items():
        scores = np.array([[scores_of(extract, data) for data in sets] for extract in features])  # [seeds, sets, 2]
        means = " / ".join(show(column) for column in scores.mean(axis=1).T)
        rows.append([label, means, *(f"{value:.1f}" for value in scores[:, :, 0].mean(axis=0))])
    headers = [f"{name}, {size[0]} x {size[1]}", "mAP / rank-1", *(f"mAP, {data.name}" for data in sets)]
    return tabulate(rows, headers=headers, disable_numparse=True)


def main() -> None:
    """Print a table for each source of pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="ImageNet weights of MobileNetV2 1.0")
    parser.add_argument("--narrow", help="ImageNet weights of MobileNetV2 0.35 that take pixels from -1 to 1")
    parser.add_argument("--grocery", help="folder of fruit, packages and vegetables in Market-1501's layout")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pretrained: dict[str, Backbone] = {"MobileNetV2, ImageNet": MobileNetV2(weights=args.weights)}
    if args.narrow:
        narrow = MobileNetV2(0.35, args.narrow, 1e-3, pixels="symmetric")
        pretrained["MobileNetV2 x 0.35, ImageNet"] = narrow
    for size in ((64, 32), (128, 64), (256, 128)):
        print(gauge("drawn people", SyntheticReID(), size, pretrained), end="\n\n", flush=True)
    if args.grocery:
        print(gauge("groceries", MarketFolders(args.grocery), (96, 96), pretrained), flush=True)


if __name__ == "__main__":
    main()
