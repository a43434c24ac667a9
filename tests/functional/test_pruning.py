"""Magnitude masks, schedules and two-stage recovery against plain loops over elements."""

import math

import pytest
import torch
from torch import nn

from fedsim.functional.pruning import (
    cubic_sparsity,
    differ,
    global_magnitude_mask,
    hamming_distance,
    layerwise_magnitude_mask,
    next_step,
    pruned_fraction,
    smallest_count_above,
    stepped_weight,
    zero_pruned_,
)
from fedsim.functional.recovery import has_recovered, prune_in_trials, try_mask
from fedsim.functional.weighting import klpwa_weights

LAYERS = [slice(3, 23), slice(32, 132), slice(160, 167)]
SEEDS = range(6)


def case(seed, length=170, ties=False):
    """Weights, and a mask of which some elements of the layers are pruned."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(length, generator=generator)
    if ties:
        weights = (weights * 2).round() / 2
    mask = torch.ones(length, dtype=torch.bool)
    for layer in LAYERS:
        mask[layer] = torch.rand(layer.stop - layer.start, generator=generator) < 0.8
    return weights, mask


def positions(layers):
    return [i for layer in layers for i in range(layer.start, layer.stop)]


def loop_global(weights, mask, layers, fraction, floor):
    """Protect each layer's largest elements; of the others take the smallest until there are enough."""
    w, result = weights.abs().tolist(), mask.tolist()
    free = []
    for layer in layers:
        alive = sorted((w[i], i) for i in range(layer.start, layer.stop) if result[i])
        protected = math.ceil(floor * (layer.stop - layer.start))
        free += alive[: max(len(alive) - protected, 0)]
    everything = positions(layers)
    missing = math.floor(round(fraction * len(everything), 9)) - sum(not result[i] for i in everything)
    for _, i in sorted(free)[: max(missing, 0)]:
        result[i] = False
    return result


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("floor", [0.0, 0.05, 0.6])
@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.71, 0.99])
def test_global_masks_are_those_of_a_loop(fraction, floor, ties):
    for seed in SEEDS:
        weights, mask = case(seed, ties=ties)
        before = mask.clone()
        found = global_magnitude_mask(weights, mask, LAYERS, fraction, floor)
        assert found.tolist() == loop_global(weights, mask, LAYERS, fraction, floor)
        assert torch.equal(mask, before)
        assert not (found & ~mask).any()  # nothing comes back
        for layer in LAYERS:
            size = layer.stop - layer.start
            least = min(math.ceil(floor * size), int(mask[layer].sum()))
            assert int(found[layer].sum()) >= least
        if floor == 0.0 and fraction >= 0.5:
            assert pruned_fraction(found, LAYERS) == math.floor(fraction * 127) / 127


@pytest.mark.parametrize("fraction", [0.3, 0.6, 0.9])
def test_global_masks_of_mostly_zeros_are_those_of_a_loop(fraction):
    for seed in SEEDS:
        weights, mask = case(seed)
        weights[torch.rand(len(weights), generator=torch.Generator().manual_seed(seed)) < 0.7] = 0.0
        found = global_magnitude_mask(weights, mask, LAYERS, fraction, 0.0)
        assert found.tolist() == loop_global(weights, mask, LAYERS, fraction, 0.0)


def test_global_masks_of_every_count_are_those_of_a_sort():
    """A selection orders hundreds of elements completely: few of 2,000 counts show one that is off by one."""
    weights = torch.randn(2_000, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(len(weights), dtype=torch.bool)
    expected = ones.clone()
    for count, smallest in enumerate(weights.abs().argsort().tolist(), 1):
        expected[smallest] = False
        assert torch.equal(global_magnitude_mask(weights, ones, [slice(0, 2_000)], count / 2_000), expected)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 1.0])
def test_layerwise_masks_are_those_of_a_loop(share, ties):
    for seed in SEEDS:
        weights, mask = case(seed, ties=ties)
        expected = mask.tolist()
        for layer in LAYERS:
            alive = sorted((abs(weights[i].item()), i) for i in range(layer.start, layer.stop) if mask[i])
            count = min(math.ceil(round(share * len(alive), 9)), len(alive) - 1)
            for _, i in alive[:count]:
                expected[i] = False
        found = layerwise_magnitude_mask(weights, mask, LAYERS, share)
        assert found.tolist() == expected
        assert all(found[layer].any() for layer in LAYERS)


def test_a_step_is_a_share_of_what_is_left_and_of_round_numbers_not_one_more():
    mask = torch.ones(100, dtype=torch.bool)
    weights = torch.arange(100.0)
    for left in (90, 81, 72, 64):  # 10, 9, 8.1 and 7.2 go
        mask = layerwise_magnitude_mask(weights, mask, [slice(0, 100)], 0.1)
        assert int(mask.sum()) == left
    assert int(layerwise_magnitude_mask(weights, torch.ones(100).bool(), [slice(0, 30)], 0.1).sum()) == 97


def test_fractions_and_distances_count_layers_only():
    weights, a = case(0)
    b = layerwise_magnitude_mask(weights, a, LAYERS, 0.3)
    inside = positions(LAYERS)
    assert pruned_fraction(a, LAYERS) == sum(not a[i] for i in inside) / len(inside)
    assert hamming_distance(a, b, LAYERS) == sum(bool(a[i] != b[i]) for i in inside) / len(inside) > 0
    a[0] = False  # no layer
    assert hamming_distance(a, a, LAYERS) == 0
    assert pruned_fraction(torch.ones(4).bool(), []) == 0.0


def test_nine_points_a_round_end_at_the_target():
    pruned, steps = 0.0, []
    while step := next_step(pruned, 0.70):
        pruned, steps = pruned + step, [*steps, step]
    assert len(steps) == 8
    assert steps[:7] == [0.09] * 7
    assert pruned == pytest.approx(0.70)
    assert next_step(0.8, 0.7) == 0.0


def test_pruned_elements_are_a_plain_zero():
    weights = torch.tensor([-1.0, math.nan, -math.inf, 3.0])
    zero_pruned_(weights, torch.tensor([False, False, False, True]))
    assert weights.view(torch.int32).tolist()[:3] == [0, 0, 0]
    assert weights[3] == 3


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_pruned_weights_are_zero_after_ten_steps_of_adam(decay):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    vector = nn.utils.parameters_to_vector(model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=decay)
    mask = global_magnitude_mask(vector, torch.ones_like(vector).bool(), [slice(0, 30), slice(35, 50)], 0.5)
    moved = False
    with torch.no_grad():
        nn.utils.vector_to_parameters(zero_pruned_(vector.detach().clone(), mask), model.parameters())
    for step in range(10):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            stepped = nn.utils.parameters_to_vector(model.parameters())
            moved |= bool((stepped[~mask] != 0).any()) and step > 0  # the optimizer alone would not keep them
            nn.utils.vector_to_parameters(zero_pruned_(stepped.clone(), mask), model.parameters())
    final = nn.utils.parameters_to_vector(model.parameters())
    assert moved
    assert int((~mask).sum()) == 22
    assert (final[~mask] == 0).all()
    assert (final[mask] != 0).all()


# -- schedules and weights ---------------------------------------------------------------------------------------------


def test_cubic_schedule():
    for t in range(21):
        expected = 0.7052 + (0.1 - 0.7052) * (1 - t / 20) * (1 - t / 20) * (1 - t / 20)
        assert cubic_sparsity(t, 20, 0.1, 0.7052) == pytest.approx(expected, rel=1e-12)


def test_the_penalty_rises_in_equal_steps():
    found = [stepped_weight(t, 100, 1e-3, 20) for t in range(101)]
    assert found == pytest.approx([1e-3 * (t // 5) / 20 for t in range(101)])


def test_eq_13_weights():
    kl, pr, alpha = {"a": 0.2, "b": 0.3, "c": 0.0}, {"a": 0.7, "b": 0.3, "c": 0.0}, 0.4
    found = klpwa_weights(kl, pr, alpha)
    for k in kl:
        praw = pr[k] ** 2 / (0.7**2 + 0.3**2)  # Eq. (12)
        assert found[k] == pytest.approx(alpha * kl[k] / 0.5 + (1 - alpha) * praw)
    assert sum(found.values()) == pytest.approx(1)
    assert found["c"] == 0
    assert klpwa_weights(kl, dict.fromkeys(kl, 0.0)) == {"a": 0.4, "b": 0.6, "c": 0.0}
    assert klpwa_weights(dict.fromkeys(kl, 0.0), dict.fromkeys(kl, 0.0)) == dict.fromkeys(kl, 1 / 3)


# -- two-stage recovery (CRR) ------------------------------------------------------------------------------------------

NOT_YET, PLATEAU = [0.30, 0.50, 0.60], [0.59, 0.61, 0.60]


@pytest.mark.parametrize("parts", [1, 2, 3, 10])
@pytest.mark.parametrize("history", [NOT_YET, PLATEAU], ids=["waits", "plateau"])
def test_stages_prune_as_many_parts_as_one_after_another_would(history, parts):
    for good in range(parts + 1):  # the accuracy falls beyond so many parts
        weights, mask = case(0)
        zero_pruned_(weights, mask)
        weights[7], weights[8] = -0.0, 1e-42  # a sign and a number that arithmetic would lose
        before, asked = weights.clone(), []
        deeper = [global_magnitude_mask(weights, mask, LAYERS, 0.4 + 0.5 * k / parts) for k in range(1, parts + 1)]
        steps = [mask, *deeper]
        seen_as = [torch.where(step, before, torch.zeros(())).view(torch.int32) for step in steps]

        def measure(seen_as=seen_as, weights=weights, asked=asked, good=good):
            asked.append(next(k for k, seen in enumerate(seen_as) if torch.equal(seen, weights.view(torch.int32))))
            return 0.595 if asked[-1] <= good else 0.58

        def propose(share, steps=steps):
            return steps[round(share * parts)]

        found = prune_in_trials(weights, mask, propose, measure, history, trials=parts)
        expected = 0
        while history is PLATEAU and expected < parts and expected + 1 <= good:  # one after another
            expected += 1
        assert found.mask is (steps[expected] if expected else mask)
        assert torch.equal(weights.view(torch.int32), seen_as[expected] if expected else before.view(torch.int32))
        assert found.stage == (1 if history is NOT_YET else 3 if expected else 2)
        assert found.trials == len(asked) <= 2 + math.log2(parts)
        assert asked[:1] == ([] if history is NOT_YET else [parts])  # the whole step first
        assert len(asked) == 1 or expected < parts


def test_trials_end_where_there_is_no_more_to_prune():
    weights, mask = case(0)
    asked = []
    found = prune_in_trials(weights, mask, lambda share: None, lambda: asked.append(1) or 1.0, PLATEAU, trials=3)
    assert torch.equal(found.mask, mask)
    assert (found.stage, found.trials) == (3, 0)
    assert not asked


def test_stage_1_wants_a_high_accuracy_and_a_plateau():
    assert has_recovered([0.5, 0.5, 0.5])
    assert not has_recovered([0.49, 0.49, 0.49])
    assert has_recovered([0.0, 0.60, 0.62, 0.6275])  # 0.0175 above the mean of the last two
    assert not has_recovered([0.60, 0.62, 0.64])
    assert not has_recovered([0.70, 0.70, 0.66])  # nor on the way down
    assert not has_recovered([0.9])
    assert has_recovered([0.2, 0.2, 0.3], target=0.3, plateau=0.15)


def test_stage_2_tolerates_less_than_its_limit():
    for after, passes in ((0.6, True), (0.7, True), (0.5, False), (0.4, False)):
        weights, mask = case(1)
        found = prune_in_trials(
            weights, torch.ones_like(mask), lambda share, mask=mask: mask, lambda a=after: a, [0.6, 0.6, 0.6], trials=1,
            tolerance=0.6 - 0.5,
        )  # fmt: skip
        assert found.mask.equal(mask) == passes


def test_a_bad_trial_is_taken_back():
    weights, mask = case(2)
    before = weights.clone()
    assert not try_mask(weights, mask, lambda: False)
    assert torch.equal(weights, before)
    assert try_mask(weights, mask, lambda: True)
    assert (weights[~mask] == 0).all()


def test_counts_compare_on_a_device_as_shares_do_on_the_host():
    for total in (1, 3, 7, 10, 49, 127):
        for share in {count / total for count in range(total + 1)} | {-0.5, 0.1, 0.2, 0.7, 1.5}:
            above = [count for count in range(total + 1) if count / total > share]
            assert smallest_count_above(share, total) == (above[0] if above else total + 1)
    assert smallest_count_above(0.3, 0) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_masks_differ_by_more_than_a_share_of_the_layers(seed):
    (_, a), (_, b) = case(seed), case(seed + 100)
    distance = hamming_distance(a, b, LAYERS)
    assert [bool(differ(a, b, LAYERS, share)) for share in (0.0, distance - 1e-9, distance, 1.0)] == [1, 1, 0, 0]
    assert not differ(a, a, LAYERS, 0.0)
