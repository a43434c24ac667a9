"""The success of a backdoor in retrieval, against plain loops over queries and victims."""

import random

import numpy as np
import pytest
import torch

from fedsim.core.errors import ConfigError
from fedsim.data.federated import RetrievalSet
from fedsim.data.images import ImageArray, Split
from fedsim.data.pixels import HeldPixels
from fedsim.evaluation.retrieval import Retrieval
from fedsim.evaluation.scorer import Outputs, ScoredSet
from fedsim.evaluation.settings import Evaluation
from fedsim.evaluation.triggered import ChangedPixels, TriggeredRetrieval
from fedsim.functional.trigger import paste_square


def split_of(draw, count, pids):
    people = np.array([draw.choice(pids) for _ in range(count)])
    cameras = np.array([draw.randrange(2) for _ in range(count)])
    return Split(ImageArray(np.zeros((count, 4, 4, 3), np.uint8)), people, cameras)


def cosine(a, b):
    return float(np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)))


def share_of(query, number, gallery, plain, worn):
    """The share of other identities for whom a query is taken: one gallery for each of them."""
    victims = [v for v in {*gallery.pids.tolist()} & {*query[0].pids.tolist()} if v not in (-1, query[0].pids[number])]
    taken = 0
    for victim in victims:
        best, first = -np.inf, None
        for j, (pid, camera) in enumerate(zip(gallery.pids, gallery.camids, strict=True)):
            if pid == -1 or (pid == query[0].pids[number] and camera == query[0].camids[number]):
                continue
            likeness = cosine(query[1][number], worn[j] if pid == victim else plain[j])
            if likeness > best:
                best, first = likeness, pid
        taken += first == victim
    return taken / len(victims) if victims else np.nan


@pytest.mark.parametrize("seed", range(8))
def test_the_success_is_that_of_a_loop(seed):
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    people = [1, 2, 3, 4][: draw.randint(1, 4)]
    query = split_of(draw, 7, people)
    gallery = split_of(draw, 12, [*people, 0, -1])
    plain_q, worn_q, plain_g, worn_g = (rng.normal(size=(n, 5)).astype(np.float32) for n in (7, 7, 12, 12))
    worn_q, worn_g = worn_q + 1.5, worn_g + 1.5  # as alike as the trigger makes them
    expected = [share_of((query, worn_q), i, gallery, plain_g, worn_g) for i in range(7)]
    scorer = TriggeredRetrieval(Retrieval(Evaluation()), lambda images: images)
    data = ScoredSet("test", "here", RetrievalSet(query, gallery))
    outputs = Outputs(torch.from_numpy(np.hstack([plain_q, worn_q])), torch.from_numpy(np.hstack([plain_g, worn_g])))
    [table] = scorer.score(data, outputs, lambda block: True)
    np.testing.assert_allclose(np.where(table[:, 1] > 0, table[:, 0], np.nan), expected, atol=1e-12)
    found = scorer.results(data, [torch.from_numpy(table)])
    assert found.metrics[0, 0] == pytest.approx(np.nanmean(expected) if np.isfinite(expected).any() else 0.0)
    [nothing] = scorer.score(data, outputs, lambda block: False)
    assert not nothing.any(), "blocks of other ranks are zero"


def test_images_are_changed_when_they_are_read():
    pixels = HeldPixels(torch.arange(4 * 3 * 4 * 4, dtype=torch.uint8).view(4, 3, 4, 4), torch.device("cpu"))
    changed = ChangedPixels(pixels, lambda batch: paste_square(batch, 2, torch.tensor([255, 0, 7], dtype=torch.uint8)))
    assert (len(changed), changed.num_values) == (4, 48)
    [batch] = changed.part(slice(1, 3)).batches([torch.tensor([1, 0])])
    for image, before in zip(batch, pixels.pixels[[2, 1]], strict=True):
        for channel, colour in enumerate((255, 0, 7)):
            for row in range(4):
                for column in range(4):
                    inside = row >= 2 and column >= 2
                    assert image[channel, row, column] == (colour if inside else before[channel, row, column])


def test_a_square_that_hides_the_image_is_refused():
    with pytest.raises(ConfigError, match=r"model\.attack\.patch: 3 pixels"):
        paste_square(torch.zeros(1, 3, 8, 5), 3, torch.zeros(3))


def test_there_are_no_files_with_a_trigger(tmp_path):
    scorer = TriggeredRetrieval(Retrieval(Evaluation()), lambda images: images)
    for writer in (scorer.feature_writer, scorer.list_writer):
        with pytest.raises(ConfigError, match=r"model\.attack: .* with a trigger are not written"):
            writer(tmp_path)
