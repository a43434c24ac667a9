"""The equations of a generator's training against plain loops, in float64.

The reference follows the table of :mod:`fedsim.generation.losses`. Images go through encoder of structure, decoder and
discriminator one by one; the appearance encoder's batch normalisation needs the whole batch.
"""

import copy
import math
from dataclasses import fields, replace

import pytest
import torch

import fedsim.generation.training
from fedsim.core.errors import ConfigError
from fedsim.core.seeding import torch_generator
from fedsim.generation.losses import LossWeights, realness_loss
from fedsim.generation.networks import Networks
from fedsim.generation.sampling import Sampler
from small_generators import LABELS, new, noise, train

STEPS = {
    "steps": 4, "batch_size": 5, "rate": 1e-3, "appearance_rate": 2e-3, "discriminator_rate": 3e-3, "momentum": 0.3,
}  # fmt: skip
WEIGHTS = LossWeights(
    image=5.0, code=0.7, identity=1.3, swapped_identity=0.4, adversarial=0.9, soft=2.0, soft_after=0.5
)


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch):
    monkeypatch.setattr(fedsim.generation.training, "to_symmetric", lambda pixels: pixels.double() / 127.5 - 1)


# -- the reference -----------------------------------------------------------------------------------------------------


def plain_image(pixels, row, mirrored):
    """One image in [-1, 1], pixel by pixel."""
    given = pixels[row].tolist()
    width = len(given[0][0])
    turned = [[[line[width - 1 - u] if mirrored else line[u] for u in range(width)] for line in c] for c in given]
    return torch.tensor([[[value / 127.5 - 1 for value in line] for line in c] for c in turned], dtype=torch.float64)


def distance(a, b):
    """Mean absolute difference of lists of tensors."""
    total, count = 0.0, 0
    for x, y in zip(a, b, strict=True):
        total, count = total + (x - y).abs().sum(), count + x.numel()
    return total / count


def log_softmax(logits):
    return [z - sum(other.exp() for other in logits).log() for z in logits]


def surprise(logits, labels):
    """Mean of -log p(y)."""
    return sum(-log_softmax(row)[y] for row, y in zip(logits, labels, strict=True)) / len(labels)


def divergence(wanted, found):
    """Mean of KL(q || p)."""
    total = 0.0
    for q_logits, p_logits in zip(wanted, found, strict=True):
        for log_q, log_p in zip(log_softmax(q_logits), log_softmax(p_logits), strict=True):
            total = total + log_q.exp() * (log_q - log_p)
    return total / len(wanted)


def far_from(wanted, discriminator, images):
    """Mean squared distance of scores from what they shall be, of each scale; their sum."""
    of_images = [discriminator(image[None]) for image in images]
    total = 0.0
    for scale in range(len(of_images[0])):
        scores = [score for of_image in of_images for score in of_image[scale].flatten()]
        total = total + sum((score - wanted) ** 2 for score in scores) / len(scores)
    return total


class Plain:
    """Generator, teacher and discriminator in plain training."""

    def __init__(self, module):
        self.generator, self.teacher, self.discriminator = (
            copy.deepcopy(part) for part in (module.generator, module.teacher, module.discriminator)
        )
        self.pixels, self.sampler = module.pixels, Sampler("north", LABELS, STEPS["batch_size"], 3)
        betas = (STEPS["momentum"], 0.999)
        makers = [*self.generator.structure.parameters(), *self.generator.decoder.parameters()]
        encoder, twin = self.generator.appearance.parameters(), self.teacher.parameters()
        self.optimizers = {
            "makers": torch.optim.Adam(makers, lr=STEPS["rate"], betas=betas),
            "encoder": torch.optim.Adam(encoder, lr=STEPS["appearance_rate"], betas=betas),
            "teacher": torch.optim.Adam(twin, lr=STEPS["appearance_rate"], betas=betas),
            "discriminator": torch.optim.Adam(
                self.discriminator.parameters(), lr=STEPS["discriminator_rate"], betas=betas
            ),
        }

    def learn(self, loss, *who):
        """Nobody else gets a gradient."""
        learned = [p for name in who for group in self.optimizers[name].param_groups for p in group["params"]]
        for p, gradient in zip(learned, torch.autograd.grad(loss, learned), strict=True):
            p.grad = gradient
        for name in who:
            self.optimizers[name].step()

    def draw(self, step):
        i, t, j = (rows.tolist() for rows in self.sampler.sample(step))
        u = torch.rand(2 * len(i), generator=torch_generator(3, "north", step, "mirror")).tolist()
        images = [plain_image(self.pixels, row, u[place] < 0.5) for place, row in enumerate(i)]
        others = [plain_image(self.pixels, row, u[len(i) + place] < 0.5) for place, row in enumerate(t)]
        return images, others, [int(LABELS[row]) for row in i], j

    def step(self, step):
        x_i, x_t, y, lenders = self.draw(step)
        persons = range(len(y))
        appearance, structure, decoder = self.generator.appearance, self.generator.structure, self.generator.decoder
        teaching = surprise(self.teacher.logits(self.teacher(torch.stack(x_i))), y)
        self.learn(teaching, "teacher")

        codes = appearance(torch.stack([*x_i, *x_t]))
        a_i, a_t = codes[: len(y)], codes[len(y) :]
        s_i = [structure(image[None]) for image in x_i]
        x_ij = [decoder(s_i[lenders[n]], a_i[n][None])[0] for n in persons]
        found = {
            "self": distance(x_i, [decoder(s_i[n], a_i[n][None])[0] for n in persons]),
            "same": distance(x_i, [decoder(s_i[n], a_t[n][None])[0] for n in persons]),
            "identity": surprise(appearance.logits(a_i), y),
        }
        a_ij = appearance(torch.stack(x_ij))
        found["appearance code"] = distance(a_i.detach(), a_ij)
        found["structure code"] = distance([s_i[lenders[n]].detach() for n in persons],
                                           [structure(image[None]) for image in x_ij])  # fmt: skip
        found["swapped identity"] = surprise(appearance.logits(a_ij), y)
        found["adversarial"] = far_from(1, self.discriminator, x_ij)
        total = 5.0 * (found["self"] + found["same"]) + 1.3 * found["identity"]
        total = total + 0.7 * (found["appearance code"] + found["structure code"])
        total = total + 0.4 * found["swapped identity"] + 0.9 * found["adversarial"]

        constant = [image.detach() for image in x_ij]
        if step >= 2:  # half of four steps
            judge = copy.deepcopy(self.teacher).eval()
            wanted = judge.logits(judge(torch.stack(constant))).detach()
            found["soft"] = divergence(wanted, appearance.logits(appearance(torch.stack(constant))))
            total = total + 2.0 * found["soft"]
        self.learn(total, "makers", "encoder")

        found["teacher"] = teaching
        found["discriminator"] = far_from(1, self.discriminator, x_i) + far_from(0, self.discriminator, constant)
        self.learn(found["discriminator"], "discriminator")
        return {"step": step + 1, **{name: loss.item() for name, loss in found.items()}}


def assert_close(module, reference):
    expected = reference.state_dict()
    for name, found in module.state_dict().items():
        assert torch.allclose(found.double(), expected[name].double(), rtol=1e-8, atol=1e-8), name


@pytest.mark.parametrize("networks", [None, Networks(width=2, structure_blocks=2, decoder_blocks=1, parts=1, scales=1)])
def test_steps_follow_the_equations(networks):
    """Losses of a step show how it computes them; those of the next ones, who has learned what from which."""
    module = new(losses=WEIGHTS, **STEPS, **({"networks": networks} if networks else {})).double()
    reference = Plain(module)
    expected = [reference.step(step) for step in range(4)]
    train(module)
    assert [list(row) for row in module.history] == [list(row) for row in expected]
    assert "soft" not in module.history[1]
    assert "soft" in module.history[2]
    for found, row in zip(module.history, expected, strict=True):
        assert found == pytest.approx(row, rel=1e-8)
    for name in ("generator", "teacher", "discriminator"):
        assert_close(module.get_submodule(name), getattr(reference, name))


# -- sums --------------------------------------------------------------------------------------------------------------

TERMS = {
    "image": ["self", "same"], "code": ["appearance code", "structure code"], "identity": ["identity"],
    "swapped_identity": ["swapped identity"], "adversarial": ["adversarial"], "soft": ["soft"],
}  # fmt: skip


def test_each_factor_is_that_of_its_own_losses():
    names = [name for of_field in TERMS.values() for name in of_field]
    found = {name: torch.tensor(2.0**place) for place, name in enumerate(names)}
    assert sorted(TERMS) == sorted({field.name for field in fields(LossWeights)} - {"soft_after"})
    module = new()
    before = module._total(found).item()
    for field, of_field in TERMS.items():
        factor = getattr(LossWeights(), field)
        module.losses = replace(LossWeights(), **{field: 2 * factor})
        assert module._total(found).item() - before == factor * sum(found[name].item() for name in of_field)


def test_the_published_factors():
    assert LossWeights() == LossWeights(image=5, code=1, identity=1, swapped_identity=0.5, adversarial=1, soft=2)


@pytest.mark.parametrize("wanted", [0.0, 1.0])
def test_realness_is_a_mean_per_scale(wanted):
    scores = [noise(2, (3, 2), seed=1).double()[:, :1] / 100, noise(2, (1, 1), seed=2).double()[:, :1] / 100]
    expected = 0.0
    for of_scale in scores:
        values = of_scale.flatten().tolist()
        expected += sum((value - wanted) ** 2 for value in values) / len(values)
    assert realness_loss(scores, wanted).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan])
@pytest.mark.parametrize("field", [field.name for field in fields(LossWeights)])
def test_factors_are_numbers_from_0(field, value):
    with pytest.raises(ConfigError, match=rf"^losses\.{field}: {value} "):
        LossWeights(**{field: value})
