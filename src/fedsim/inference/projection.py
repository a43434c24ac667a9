"""Features of a finished run's test images as points of the plane, by principal components or t-SNE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import normalize

from fedsim.core.errors import DataError
from fedsim.data.federated import FederatedData
from fedsim.data.preview import true_to_shape
from fedsim.evaluation.ranking import Floats, Ints, RetrievalLabels
from fedsim.functional.similarity import Distance
from fedsim.inference.run_features import ModelOnSet, RunFeatures, each_usable, names_of
from fedsim.report.projection import Projection, Projector

IMAGES = 300
"""images of a data set that are drawn, at most"""
_EQUAL = 1e-6
"""relative difference between features below which they are equal: ten times the rounding of float32"""
_PERPLEXITY = 30.0
"""of t-SNE: about the number of neighbours; the value of its authors' programs"""


class _Part(NamedTuple):
    """The images of a test set that are drawn."""

    query: Ints
    """positions, ascending"""
    gallery: Ints


def project_features(features: RunFeatures, projector: Projector, num: int) -> list[Projection]:
    """Return the points of each model's features, of a sample of each test set.

    A sample has whole people, drawn by a fixed seed from those with a query: all models have the same images. Cosine
    distances compare directions, so features then have length 1. A personalised model has the test sets of which
    ``fedsim predict`` writes its features: those of its client and the unseen ones.

    Args:
        features: of a run.
        projector: pca: principal components; tsne: t-SNE, which starts with these.
        num: largest number of images of a test set.

    Raises:
        DataError: if all features are not finite, or ``num`` is less than the images of each person.
    """
    by_model: dict[tuple[str, ...], list[ModelOnSet]] = {}
    for model in features.models:
        # without an owner, each set may have a model of its own
        apart = (model.data_set,) if model.kind == "personalised" and not model.owner else ()
        by_model.setdefault((model.title, *apart), []).append(model)
    clients = only_clients(features.data.federated)
    distance = features.settings.distance
    drawn = each_usable(by_model.values(), lambda sets: _projected(sets, projector, num, distance, clients))
    return [replace(projection, round_=features.round_) for projection in drawn]


def sample_people(labels: RetrievalLabels, num: int) -> tuple[Ints, Ints]:
    """Return the positions of the queries and gallery images of some people, at most ``num`` images in total.

    People are drawn in an order by a fixed seed, and those whose images no longer fit are left out. Distractors have no
    query, so they are not drawn; nor is junk, nor a query's image in the gallery. Nothing if no person's images fit.

    >>> labels = RetrievalLabels(np.array([1, 2]), np.zeros(2), np.array([1, 2, 2, 0, -1]), np.ones(5))
    >>> sample_people(labels, num=2)
    (array([0]), array([0]))
    """
    is_shown = ~labels.is_junk
    if labels.own is not None:
        is_shown[labels.own[labels.own >= 0]] = False
    shown = np.concatenate([labels.query_pids, labels.gallery_pids[is_shown]])
    counts = dict(zip(*(values.tolist() for values in np.unique(shown, return_counts=True)), strict=True))
    chosen, left = [], num
    for person in np.random.default_rng(0).permutation(np.unique(labels.query_pids)).tolist():
        if counts[person] <= left:
            chosen.append(person)
            left -= counts[person]
    return (
        np.flatnonzero(np.isin(labels.query_pids, chosen)),
        np.flatnonzero(np.isin(labels.gallery_pids, chosen) & is_shown),
    )


def place_on_plane(features: Floats, projector: Projector) -> tuple[Floats, Floats]:
    """Return points [n, 2] of ``features`` [n, D], and the shares [2] of the variance along both axes.

    The sign of a component is that of its largest loading, so the same features have the same points, with any number
    of threads. Equal features are at 0, and their shares are 0; so are those of an axis that does not exist. The shares
    of t-SNE are NaN.

    >>> points, shares = place_on_plane(np.array([[3.0, 1.0], [1.0, 1.0]]), "pca")
    >>> points[:, 0].round(3).tolist(), shares.round(3).tolist()
    ([1.0, -1.0], [1.0, 0.0])
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):  # the order of sums depends on the number of threads
        points, shares = _components(features)
        if projector == "pca":
            return points, shares
        return (_neighbours(features, points) if points.any() else points), np.full(2, np.nan)


def _components(features: Floats) -> tuple[Floats, Floats]:
    from sklearn.decomposition import PCA  # slow to import

    points, shares = np.zeros((len(features), 2)), np.zeros(2)
    if np.ptp(features, axis=0).max() <= _EQUAL * np.abs(features).max():
        return points, shares
    axes = min(2, *features.shape)
    # the two largest of many components are found without the others
    pca = PCA(axes, svd_solver="arpack" if axes < min(features.shape) else "full", random_state=0)
    points[:, :axes] = pca.fit_transform(features)
    shares[:axes] = pca.explained_variance_ratio_
    return points, shares


def _neighbours(features: Floats, points: Floats) -> Floats:
    """Return the points of t-SNE, which starts with principal components: so distances between groups mean more."""
    from sklearn.manifold import TSNE  # slow to import

    begin = 1e-4 * points / points[:, 0].std()
    perplexity = min(_PERPLEXITY, (len(features) - 1) / 3)
    tsne = TSNE(2, perplexity=perplexity, init=begin.astype(np.float32), learning_rate="auto", random_state=0)
    return np.asarray(tsne.fit_transform(features), dtype=np.float64)


def _projected(
    sets: Sequence[ModelOnSet], projector: Projector, num: int, distance: Distance, clients: Mapping[str, str]
) -> Projection:
    def shown(model: ModelOnSet) -> tuple[ModelOnSet, _Part, Floats]:
        part = _sampled(model, num)
        return model, part, _features(model, part, distance)

    sets, parts, of_sets = zip(*each_usable(sets, shown), strict=True)
    features = np.concatenate(of_sets)
    points, shares = place_on_plane(features, projector)
    sizes = [[len(part.query), len(part.gallery)] for part in parts]
    values = list(map(_values, sets, parts))
    return Projection(
        projector,
        model=sets[0].kind,
        owner=sets[0].owner,
        sets=[model.data_set for model in sets],
        of_set=np.repeat(np.arange(len(sets)), np.sum(sizes, axis=1)),
        images=[name for names, _, _ in values for name in names],
        is_query=np.repeat(np.arange(2 * len(sets)) % 2 == 0, np.ravel(sizes)),
        identities=np.concatenate([identities for _, identities, _ in values]),
        cameras=np.concatenate([cameras for _, _, cameras in values]),
        points=points,
        shares=shares,
        clients=[clients.get(model.data_set, "") for model in sets],
        features=features,
    )


def only_clients(federated: FederatedData) -> dict[str, str]:
    """Return test set -> the only client that is tested on it; sets of no client, or of several, are left out."""
    owners: dict[str, list[str]] = {}
    for client in federated.clients:
        for name in client.tests:
            owners.setdefault(name, []).append(client.name)
    return {name: clients[0] for name, clients in owners.items() if len(clients) == 1}


def draw_thumbnails(features: RunFeatures, projection: Projection, num: int, side: int) -> NDArray[np.uint8]:
    """Return the n images of a projection of ``num`` images per set, true to shape on white squares.

    They are uint8 [n, ``side``, ``side``, 3], in the order of its points. Raises DataError naming an image that cannot
    be read.
    """
    squares = []
    for model in features.models:
        if model.title != projection.title or model.data_set not in projection.sets:
            continue
        part = _sampled(model, num)
        for images in (model.query_images.take(part.query), model.gallery_images.take(part.gallery)):
            for picture in true_to_shape(images, (side, side)):
                square = Image.new("RGB", (side, side), "white")
                square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
                squares.append(np.asarray(square))
    return np.stack(squares)


def _sampled(model: ModelOnSet, num: int) -> _Part:
    part = _Part(*sample_people(model.labels, num))
    if not len(part.query):
        raise DataError(
            f"num: {num} is less than the images of each person of {model.data_set}; give a larger one: "
            "fedsim.load_run(RUN).projection(num=...)"
        )
    return part


def _features(model: ModelOnSet, part: _Part, distance: Distance) -> Floats:
    """Return the features [n, D] of the queries, then of the gallery images, as the distance compares them."""
    values = torch.cat([model.query[part.query], model.gallery[part.gallery]]).double()
    if not values.isfinite().all():
        raise DataError(f"{model.name}: features of {model.title} are not finite; did the training diverge?")
    array: Floats = (normalize(values) if distance == "cosine" else values).numpy()
    return array


def _values(model: ModelOnSet, part: _Part) -> tuple[list[str], Ints, Ints]:
    """Return names, identities, and cameras from 1, in the order of :func:`_features`."""
    labels = model.labels
    queries, gallery = names_of(model.query_images, "query"), names_of(model.gallery_images, "image")
    names = [queries[place] for place in part.query] + [gallery[place] for place in part.gallery]
    identities = np.concatenate([labels.query_pids[part.query], labels.gallery_pids[part.gallery]])
    cameras = np.concatenate([labels.query_camids[part.query], labels.gallery_camids[part.gallery]])
    return names, identities, cameras + 1
