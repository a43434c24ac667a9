"""Training a generator: who learns from what, what depends on what, and what is refused."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch

from fedsim.core.errors import ConfigError, DataError, TrainingError
from fedsim.generation.losses import LossWeights
from fedsim.generation.training import GeneratorSteps, to_symmetric
from fedsim.models import ConvNeXt, SmallCNN
from small_generators import CLASSES, LABELS, equal, new, noise, train


def learning(module):
    """Names of the parts of which some parameter has a gradient."""
    parts = {
        "appearance": module.generator.appearance, "structure": module.generator.structure,
        "decoder": module.generator.decoder, "teacher": module.teacher, "discriminator": module.discriminator,
    }  # fmt: skip
    return {name for name, part in parts.items() if any(p.grad is not None and p.grad.any() for p in part.parameters())}


def images(count=4, seed=9):
    return to_symmetric(noise(count, seed=seed))


# -- who learns from what ----------------------------------------------------------------------------------------------


def test_soft_labels_teach_the_appearance_encoder_alone():
    module, swapped = new(), images().requires_grad_()
    before = copy.deepcopy(module.teacher)
    module._soft_label_loss(swapped).backward()
    assert swapped.grad is None
    assert learning(module) == {"appearance"}
    assert all(p.grad is not None for p in module.generator.appearance.parameters())
    assert equal(module.teacher, before)
    assert all(part.training for part in module.teacher.modules())


def test_soft_labels_are_those_of_the_teacher_in_use():
    module, swapped = new(), images()
    module.teacher(images(seed=2))  # moves running statistics
    alone = [module._soft_label_loss(swapped[:n]).item() for n in (2, 4)]
    judge = copy.deepcopy(module.teacher).eval()
    encoder = module.generator.appearance
    for n, found in zip((2, 4), alone, strict=True):
        q, p = (part.logits(part(swapped[:n])).softmax(1).double() for part in (judge, encoder))
        assert found == pytest.approx((q * (q / p).log()).sum(1).mean().item(), rel=1e-4)


def test_what_swapped_images_tell_moves_the_image_and_not_what_it_is_compared_with():
    module = new()
    swapped, codes, maps = (
        images().requires_grad_(),
        torch.rand(4, module.generator.appearance.code_size, requires_grad=True),
        torch.rand(4, 8, 4, 5, requires_grad=True),
    )
    found = module._losses_of_swapped(swapped, codes, maps, torch.tensor([0, 1, 2, 4]))
    for name, learners in {
        "appearance code": {"appearance"}, "structure code": {"structure"}, "swapped identity": {"appearance"},
        "adversarial": set(),
    }.items():  # fmt: skip
        module.zero_grad()
        swapped.grad = None
        found[name].backward(retain_graph=True)
        assert swapped.grad.any(), name
        assert learning(module) == learners, name
    assert codes.grad is None
    assert maps.grad is None
    assert all(p.requires_grad for p in module.discriminator.parameters())


def test_the_discriminator_learns_alone():
    module, made = new(), images(seed=1).requires_grad_()
    module._realness(images(), made).backward()
    assert made.grad is None
    assert learning(module) == {"discriminator"}


def test_the_discriminator_does_not_move_by_the_generators_update_nor_the_other_way_round():
    plain = train(new(steps=1))
    other_losses = train(new(steps=1, losses=LossWeights(image=1, code=3, adversarial=50, soft_after=0), rate=1e-2))
    other_judge = train(new(steps=1, discriminator_rate=1e-2))
    assert equal(plain.discriminator, other_losses.discriminator)
    assert not equal(plain.generator, other_losses.generator)
    assert equal(plain.generator, other_judge.generator)
    assert not equal(plain.discriminator, other_judge.discriminator)


@pytest.mark.parametrize("change", [
    {"losses": LossWeights(image=0, identity=9, swapped_identity=9, adversarial=9, soft=9, soft_after=0)},
    {"rate": 1e-2}, {"discriminator_rate": 1e-2},
])  # fmt: skip
def test_the_teacher_learns_from_real_images_alone(change):
    plain, changed = train(new()), train(new(**change))
    assert not equal(plain.generator, changed.generator)
    assert equal(plain.teacher, changed.teacher)
    assert not equal(plain.teacher, new().teacher)


def test_soft_labels_come_late_or_never():
    never, of_factor_0, later = (train(new(losses=losses)) for losses in (
        LossWeights(soft_after=1.0), LossWeights(soft=0, soft_after=0), LossWeights(soft=7, soft_after=1.0),
    ))  # fmt: skip
    assert equal(never, of_factor_0)
    assert equal(never, later)
    assert never.history == of_factor_0.history == later.history
    assert all("soft" not in row for row in never.history)
    with_them = train(new(losses=LossWeights(soft_after=0.75)))
    assert ["soft" in row for row in with_them.history] == [False, False, False, True]
    assert with_them.history[:3] == never.history[:3]
    assert not equal(with_them.generator, never.generator)


# -- steps -------------------------------------------------------------------------------------------------------------


def drawn(module):
    """The steps of which images are drawn in a training."""
    steps, draw = [], module.sampler.sample
    module.sampler.sample = lambda step: steps.append(step) or draw(step)
    train(module)
    return steps


@pytest.mark.parametrize(("steps", "save_every", "lines"), [(5, 2, [2, 4, 5]), (4, 2, [2, 4]), (3, 8, [3])])
def test_every_step_is_made_once_whatever_is_between_two_checkpoints(steps, save_every, lines):
    module = new(steps=steps, save_every=save_every)
    assert drawn(module) == list(range(steps))
    assert [row["step"] for row in module.history] == lines
    single = train(new(steps=steps, save_every=1))
    assert equal(module, single)


def test_a_line_has_the_means_of_its_steps():
    whole, single = (train(new(steps=5, save_every=n, losses=LossWeights(soft_after=0.5))) for n in (3, 1))
    for row, (first, end) in zip(whole.history, [(0, 3), (3, 5)], strict=True):
        for name in set(row) - {"step"}:
            values = [line[name] for line in single.history[first:end] if name in line]
            assert row[name] == pytest.approx(sum(values) / len(values), rel=1e-6), name
    assert len([line for line in single.history if "soft" in line]) == 2  # steps 3 and 4, from 2.5


def test_images_are_mirrored_with_their_probability():
    straight, mirrored, both = (new(flip=flip, batch_size=60) for flip in (0.0, 1.0, 0.25))
    share = 0.0
    for step in range(5):
        draw = straight.sampler.sample(step)
        for place, rows in enumerate((draw.images, draw.others)):
            plain = to_symmetric(straight.pixels[rows])
            assert torch.equal(straight._sample(step)[place], plain)
            assert torch.equal(mirrored._sample(step)[place], plain.flip(3))
            found = both._sample(step)[place]
            is_plain = (found == plain).flatten(1).all(1)
            assert torch.equal(found[~is_plain], plain.flip(3)[~is_plain])
            share += (~is_plain).float().mean().item() / 10
        assert straight._sample(step)[2].tolist() == LABELS[draw.images].tolist()
        assert torch.equal(straight._sample(step)[3], draw.lenders)
    assert share == pytest.approx(0.25, abs=0.07)  # 600 images: four standard deviations


@pytest.mark.parametrize("make_backbone", [partial(SmallCNN, 4), partial(ConvNeXt, "micro")])
def test_training_depends_on_seed_and_client_and_on_nothing_that_ran_before(make_backbone):
    """Stochastic depth draws from the process's own random numbers."""

    def trained(global_seed, **options):
        module = new(make_backbone=make_backbone, size=(64, 32), steps=3, batch_size=4, **options)
        torch.manual_seed(global_seed)
        return train(module)

    assert equal(trained(1), trained(2))
    assert not equal(trained(1), trained(1, seed=4))


def test_the_backbone_that_is_given_stays_as_it_is():
    template = SmallCNN(4)
    before = copy.deepcopy(template)
    module = new(make_backbone=lambda: template)
    assert equal(module.generator.appearance.backbone, template)
    assert equal(module.teacher.backbone, template)
    train(module)
    assert equal(template, before)
    assert not equal(module.generator.appearance.backbone, template)
    assert not equal(module.teacher.backbone, module.generator.appearance.backbone)


def test_heads_have_an_output_for_every_identity_even_of_those_without_images():
    module = train(new())
    assert module.teacher.head.out_features == module.generator.appearance.head.out_features == CLASSES


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", ["rate", "appearance_rate"])
def test_a_training_that_diverges_ends_with_client_and_step(rate):
    module = new(save_every=2, **{rate: 1e30})
    with pytest.raises(TrainingError, match=r"^client north, step 2: the generator's loss .* is (nan|inf); lower"):
        train(module)
    assert module.history == []


def test_a_single_identity_will_not_do():
    with pytest.raises(DataError, match="client north: a generator needs images of at least 2 identities"):
        new(labels=np.full(6, 2))


@pytest.mark.parametrize(("field", "value", "message"), [
    ("steps", 0, "0 is less than 1"), ("batch_size", 1, "1 is less than 2"), ("save_every", 0, "0 is less than 1"),
    *((name, value, rf"{value} is not in \(0, 1e30\]")
      for name in ("rate", "appearance_rate", "discriminator_rate") for value in (0.0, -1.0, math.inf, math.nan)),
    ("momentum", 1.0, r"1.0 is not in \[0, 1\)"), ("momentum", -0.1, "-0.1 is not in"),
    ("flip", 1.1, r"1.1 is not in \[0, 1\]"), ("flip", math.nan, "nan is not in"),
])  # fmt: skip
def test_settings_out_of_range_are_named(field, value, message):
    with pytest.raises(ConfigError, match=rf"^training\.{field}: {message}"):
        GeneratorSteps(**{field: value})


def test_settings_at_their_limits_train():
    assert len(train(new(steps=1, batch_size=2, momentum=0.0, flip=1.0)).history) == 1
