"""The bound of mAP by the CMC, where every query has one match, against lists of ranks."""

import random

import pytest

from fedsim.papers.contradictions import Interval, one_match_bounds

RANKS = (1, 5, 10)


def average_precision(rank, definition):
    if definition == "rectangular":
        return 1 / rank
    before = 1.0 if rank == 1 else 0.0  # precision before the match
    return (before + 1 / rank) / 2


def cmc_and_map(ranks, definition):
    """Percentages, by counting."""
    cmc = {}
    for limit in RANKS:
        hits = 0
        for rank in ranks:
            if rank <= limit:
                hits += 1
        cmc[limit] = 100 * hits / len(ranks)
    total = 0.0
    for rank in ranks:
        total += average_precision(rank, definition)
    return cmc, 100 * total / len(ranks)


@pytest.mark.parametrize("definition", ["rectangular", "trapezoid"])
def test_any_list_of_ranks_is_inside_and_the_extremes_are_the_ends(definition):
    draw = random.Random(0)
    gallery = 30
    for _ in range(200):
        ranks = [draw.randint(1, draw.choice((3, 8, gallery))) for _ in range(20)]
        cmc, mean = cmc_and_map(ranks, definition)
        bounds = one_match_bounds(cmc, definition, gallery)
        assert bounds.holds(mean, 1e-9)
        first = {rank: start for start, end in ((1, 1), (2, 5), (6, 10), (11, 30)) for rank in range(start, end + 1)}
        last = {rank: end for start, end in ((1, 1), (2, 5), (6, 10), (11, 30)) for rank in range(start, end + 1)}
        assert cmc_and_map([first[r] for r in ranks], definition)[1] == pytest.approx(bounds.high)
        assert cmc_and_map([last[r] for r in ranks], definition)[1] == pytest.approx(bounds.low)


def test_the_closed_form_of_ranks_1_5_10():
    r1, r5, r10 = 52.0, 55.8, 58.1
    bounds = one_match_bounds({1: r1, 5: r5, 10: r10})
    assert bounds.high == pytest.approx(r1 + (r5 - r1) / 2 + (r10 - r5) / 6 + (100 - r10) / 11)
    assert bounds.low == pytest.approx(r1 + (r5 - r1) / 5 + (r10 - r5) / 10)
    with_gallery = one_match_bounds({1: r1, 5: r5, 10: r10}, gallery=316)
    assert with_gallery.low - bounds.low == pytest.approx((100 - r10) / 316)


def test_only_rank_1_is_enough():
    assert one_match_bounds({1: 40.0}) == Interval(40.0, 70.0)
    assert one_match_bounds({1: 40.0}, "trapezoid") == Interval(40.0, 55.0)


def test_the_tolerance_counts_on_both_sides():
    assert Interval(1.0, 2.0).holds(0.9, 0.1)
    assert Interval(1.0, 2.0).holds(2.1, 0.11)
    assert not Interval(1.0, 2.0).holds(2.1, 0.05)
