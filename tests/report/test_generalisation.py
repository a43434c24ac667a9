"""The study of changed pictures: its shifts against plain loops, what each leaves as it is, and its losses."""

import colorsys
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsim.data.synthetic import SyntheticImages, SyntheticReID
from fedsim.models.ibn import IBN

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import generalisation
from generalisation import RANDOM, drops, losses, mean_ap, random_order
from shifted_towns import (
    CAMERA,
    DOSES,
    IBNCNN,
    SCENE,
    SETS,
    SHIFTS,
    ShiftedTowns,
    Visitors,
    blur,
    hue,
    light,
    resolution,
)

SIZE = (32, 16)


def pixels(seed, size=(8, 4)):
    return torch.randint(0, 256, (2, 3, *size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def places(images):
    return itertools.product(*map(range, images.shape))


@pytest.mark.parametrize("dose", DOSES)
def test_light(dose):
    signs = np.random.default_rng(dose).choice((-1.0, 1.0), 8)
    images = pixels(dose)
    changed = light(images, dose, signs)
    for b, c, y, x in places(images):
        gain = math.exp(dose * (0.35 * signs[0] + 0.15 * signs[2 + c]))
        value = (int(images[b, c, y, x]) - 127.5) * gain + 127.5 + dose * (30 * signs[1] + 20 * signs[5 + c])
        assert int(changed[b, c, y, x]) == pytest.approx(min(max(value, 0), 255), abs=0.5 + 1e-9)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("dose", DOSES)
def test_hue(dose, sign):
    images = pixels(dose)
    changed = hue(images, dose, np.full(8, sign))
    for b, y, x in itertools.product(range(2), range(8), range(4)):
        h, s, v = colorsys.rgb_to_hsv(*(images[b, :, y, x] / 255).tolist())
        expected = torch.tensor(colorsys.hsv_to_rgb((h + sign * dose / 12) % 1, s, v)) * 255
        assert (changed[b, :, y, x] - expected).abs().max() <= 1.01  # torchvision cuts


@pytest.mark.parametrize("dose", DOSES)
def test_blur(dose):
    images = pixels(dose, (12, 10))
    changed = blur(images, dose, np.zeros(8))
    weights = [math.exp(-0.5 * (k / (dose / 2)) ** 2) for k in range(-4, 5)]
    for b, c in itertools.product(range(2), range(3)):
        value = sum(
            weights[i] * weights[j] * int(images[b, c, 1 + i, j])  # around (5, 4), where no edge is near
            for i, j in itertools.product(range(9), repeat=2)
        )
        assert int(changed[b, c, 5, 4]) == pytest.approx(value / sum(weights) ** 2, abs=0.51)


@pytest.mark.parametrize("dose", DOSES)
def test_resolution(dose):
    images, step = pixels(dose), 2**dose
    changed = resolution(images, dose, np.zeros(8))
    for b, c, y, x in places(images):
        top, left = y // step * step, x // step * step
        block = [int(images[b, c, i, j]) for i in range(top, top + step) for j in range(left, left + step)]
        assert int(changed[b, c, y, x]) == pytest.approx(sum(block) / len(block), abs=0.5)


def test_shifts_of_light_are_undone_where_images_are_standardised():
    """The control switches its cause off: without clipping, no bit of the style is left but rounding."""
    images = pixels(0) // 4 + 96
    signs = np.array([-1.0, 1, 1, -1, 1, -1, 1, -1])
    both = [x.double() for x in (images, light(images, 1, signs))]
    first, second = ((x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True) for x in both)
    assert (first - second).abs().max() < 0.06


def visitors(town, redrawn=0.0):
    """Eight pictures of the first new people."""
    images = SyntheticReID(1, 1, 1.0, 5).domains()[1].query.images.take(np.arange(8))
    return images, Visitors(**vars(images), town=town, redrawn=redrawn)


def test_visitors_at_home_are_drawn_as_ever():
    images, at_home = visitors("v1/new0")
    assert torch.equal(images.decode(SIZE), at_home.decode(SIZE))


def test_visitors_have_the_cameras_of_the_town_and_their_own_identities():
    images, away = visitors("v1/town0")
    town = SyntheticImages(images.seed, "v1/town0", images.identities, images.cameras, images.shots)
    assert np.array_equal(away._numbers_of_cameras(), town._numbers_of_cameras())
    for key in (("identity", 3), ("shot", 3, 1, 0)):
        assert away._stream(*key).random() == images._stream(*key).random() != town._stream(*key).random()
    assert not torch.equal(images.decode(SIZE), away.decode(SIZE))
    assert away.content() != visitors("v1/town1")[1].content()


@pytest.mark.parametrize("redrawn", [0.5, 1.0])
def test_redrawn_scenes_differ_between_pictures_of_a_camera_and_leave_its_light(redrawn):
    before, after = (np.array(visitors("v1/town0", share)[1]._numbers_of_cameras()) for share in (0.0, redrawn))
    in_scene = np.array([name in SCENE for name in CAMERA])
    assert np.array_equal(before[:, ~in_scene], after[:, ~in_scene])
    anew = (after - (1 - redrawn) * before)[:, in_scene] / redrawn
    assert anew.min() >= -1e-6
    assert anew.max() <= 1 + 1e-6
    assert len(np.unique(anew.round(5))) == anew.size


def test_all_views_show_the_same_people_cameras_and_moments():
    domains = {domain.name: domain for domain in ShiftedTowns(seed=3).domains()}
    assert [name for name, domain in domains.items() if domain.train] == ["town0", "town1", "town2"]
    views = ["seen", "town", *(f"{shift}-{dose}" for shift in SHIFTS for dose in DOSES)]
    assert len(domains) == 3 + SETS * len(views)
    for number, view in itertools.product(range(SETS), views):
        seen, domain = domains[f"people{number}-seen"], domains[f"people{number}-{view}"]
        for part, of_seen in ((domain.query, seen.query), (domain.gallery, seen.gallery)):
            assert np.array_equal(part.pids, of_seen.pids)
            assert np.array_equal(part.camids, of_seen.camids)
        shown = [d.query.images.take(np.arange(2)).decode(SIZE) for d in (seen, domain)]
        assert torch.equal(*shown) == (view == "seen")
    assert len({domain.query.images.content() for domain in domains.values() if not domain.train}) == SETS * len(views)


def test_ibn_normalises_each_image_in_the_first_half_of_three_norms():
    network = IBNCNN(8)
    assert [type(network.get_submodule(f"bn{i}")) for i in (1, 2, 3, 4)] == [IBN, IBN, IBN, torch.nn.BatchNorm2d]
    assert [name for name, _ in network.named_children()][:3] == ["conv1", "bn1", "relu1"]
    assert network(torch.randn(2, 3, *SIZE)).shape == (2, network.out_channels, 4, 2)


@pytest.mark.parametrize(("matches", "wrong"), [(1, 4), (2, 3), (3, 4)])
def test_random_orders(matches, wrong):
    precisions = [
        np.mean([hits / rank for hits, rank in enumerate(ranks, start=1)])
        for ranks in itertools.combinations(range(1, matches + wrong + 1), matches)
    ]
    assert random_order(matches, wrong) == pytest.approx(100 * np.mean(precisions))


class Finished:
    """A run of which only the scores are known."""

    def __init__(self, scores):
        metrics = {f"test/global/{name}/mAP": value for name, value in scores.items()}
        self.summary = {"final": {"metrics": metrics}}


def test_losses_are_shares_of_what_is_above_a_random_order():
    rng = np.random.default_rng(0)
    names = [f"people{i}-{view}" for i in range(3) for view in ("seen", "town", "hue-1", "hue-2", "blur-1", "blur-2")]
    scores = [dict(zip(names, rng.uniform(0.2, 0.9, len(names)), strict=True)) for _ in range(4)]
    runs = [Finished(of_run) for of_run in scores]
    for index, of_run in enumerate(scores):
        seen, town = (100 * sum(of_run[f"people{i}-{view}"] for i in range(3)) / 3 for view in ("seen", "town"))
        lost = (
            seen
            - 100 * sum(of_run[f"people{i}-{s}-{d}"] for i in range(3) for s in ("hue", "blur") for d in DOSES) / 12
        )
        assert mean_ap(runs, "town")[index] == pytest.approx(town)
        assert drops(runs, ["hue", "blur"])[index] == pytest.approx(lost)
        assert losses(runs, ["hue", "blur"])[index] == pytest.approx(100 * lost / (seen - RANDOM))


def test_the_random_order_is_that_of_the_three_galleries():
    """By a thousand random orders of the distances of each set."""
    rng, scores = np.random.default_rng(0), []
    for domain in ShiftedTowns().domains():
        if not domain.name.endswith("-seen"):
            continue
        of_set = []
        for pid, camera in zip(domain.query.pids, domain.query.camids, strict=True):
            good = domain.gallery.pids == pid
            valid = good[~(good & (domain.gallery.camids == camera))]
            for _ in range(10):
                ranks = np.flatnonzero(rng.permutation(valid)) + 1
                of_set.append(np.mean(np.arange(1, len(ranks) + 1) / ranks))
        scores.append(np.mean(of_set))
    assert pytest.approx(100 * np.mean(scores), abs=0.4) == RANDOM


def towns_with(lost):
    """Ten runs whose mAP is 0.6 by no change, and less by ``lost`` and by a little that differs between seeds."""
    names = ["seen", "town", *(f"{shift}-{dose}" for shift in SHIFTS for dose in DOSES)]
    return [
        Finished({f"people{i}-{n}": 0.6 - (n != "seen") * lost * (0.9 + seed / 45) for i in range(SETS) for n in names})
        for seed in range(10)
    ]


def alphabets_with(lost):
    return [Finished({"seen": 0.8, "unseen": 0.8 - lost * (0.9 + seed / 45)}) for seed in range(10)]


def cells(table):
    return {row[0]: row for line in table.splitlines()[2:] if (row := [c.strip() for c in line.split("|")[1:-1]])}


def test_tables_say_who_loses_less():
    towns = {"FedPav": towns_with(0.3), "standardised": towns_with(0.1), "SNR": towns_with(0.2)}
    groups = {"towns": towns, "Omniglot": {"FedPav": alphabets_with(0.08), "SNR": alphabets_with(0.064)}}
    claims = cells(generalisation.claim_table(groups))
    assert len(claims) == 5, "the claim whose rows are missing has no verdict"
    share = 100 * 20 / (60 - RANDOM)
    assert claims["standardised images lose less by light than FedPav"][2].startswith(f"+{share:.1f} (")
    assert claims["standardised images lose less by light than FedPav"][3] == "yes"
    assert claims["SNR loses less by another town than standardised images"][2].startswith(f"-{share / 2:.1f} (")
    assert claims["SNR loses less by another town than standardised images"][3] == "no, behind"
    control = "Omniglot: SNR loses as much as FedPav, within 3 points"
    assert claims[control][2].startswith("+2.0 (")  # 0.016 of 0.8, of all mAP
    assert claims[control][3] == "yes"
    groups["Omniglot"]["SNR"] = alphabets_with(0.04)  # 5 points less
    assert cells(generalisation.claim_table(groups))[control][3] == "not shown"
    assert cells(generalisation.control_table(groups["Omniglot"]))["SNR"][1:3] == ["80.0 ± 0.0", "76.0 ± 0.3"]
    lost = cells(generalisation.loss_table(towns))
    assert lost["SNR, less than FedPav"][1].startswith(f"+{share / 2:.1f} (")


def test_claims_are_of_known_rows_and_at_most_six():
    assert len(generalisation.CLAIMS) <= 6
    rows = {
        data: {row for of, names in generalisation.STAGES if of == data for row in names}
        for data in ("towns", "Omniglot")
    }
    for claim in generalisation.CLAIMS:
        assert {claim.less, claim.more} <= rows[claim.data]


@pytest.mark.parametrize("number", ["-1", "0", "6"])
def test_there_are_five_stages(capsys, monkeypatch, number):
    monkeypatch.setattr(sys, "argv", ["generalisation.py", "--stages", number])
    with pytest.raises(SystemExit) as error:
        generalisation.main()
    assert error.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_the_negative_control_needs_its_folder(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generalisation.py", "--stages", "2"])
    with pytest.raises(SystemExit) as error:
        generalisation.main()
    assert error.value.code == 2
    assert "stage 2 needs --omniglot; give it, or --stages 1" in capsys.readouterr().err
