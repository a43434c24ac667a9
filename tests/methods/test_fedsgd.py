"""FedSGD: with one batch per client, the mean of the updates is one step with the mean gradient."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsim.core.errors import ConfigError
from fedsim.core.seeding import torch_generator
from fedsim.functional.normalise import normalise_images
from fedsim.methods import FedSGD
from fedsim.models import Neck
from fedsim.models.reid import make_head
from fedsim.training.settings import LocalTraining
from plain_loops import LR, Federation, play, shares
from small import fit, make_model, named


def test_one_step_with_the_mean_gradient():
    federation = Federation()
    gradients = []
    for client in federation.clients:
        model = copy.deepcopy(federation.model).train()
        x, y = client.batches(0)[0]
        loss = F.cross_entropy(client.head(model(x).neck), y)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    found = named(play(FedSGD(share_head=False), 1), "smooth")
    for index, (name, p) in enumerate(federation.model.named_parameters()):
        mean = sum(n_k * g[index] for n_k, g in zip(shares(federation.clients), gradients, strict=True))
        torch.testing.assert_close(found[name].double(), p.detach() - LR * mean, rtol=0, atol=1e-6)


class Plain(nn.Module):
    """A backbone without batch normalisation, whose loss is a mean over images."""

    out_channels = 4

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, stride=2)

    def forward(self, images):
        return torch.tanh(self.conv(images))


@pytest.mark.parametrize(("batch_size", "accumulate"), [(None, 1), (1000, 1), (8, 15), (8, 12), (7, 1000)])
def test_a_step_of_all_images_has_the_gradient_of_all_images(batch_size, accumulate):
    """In one batch or in several, of which the last is shorter: n_k is 96, 72 and 54."""
    options = {"backbone": Plain(), "neck": Neck(kind="none", dropout=0.0)}
    training = LocalTraining(batch_size=batch_size, accumulate=accumulate, optimizer=partial(torch.optim.SGD, lr=100.0))
    model = fit(make_model(FedSGD(share_head=False), client=training, **options), rounds=1)
    start, data = Plain().double(), model.trainer.datamodule
    step = {name: torch.zeros_like(p) for name, p in start.named_parameters()}
    for client in data.federated.clients:
        images = normalise_images(client.train.images.decode(data.size)).double()
        head = make_head(4, client.num_classes, torch_generator(0, client.name, "head")).double()
        loss = F.cross_entropy(head(start(images).mean(dim=(2, 3))), torch.from_numpy(client.labels))
        for name, g in zip(step, torch.autograd.grad(loss, start.parameters()), strict=True):
            step[name] += client.num_images / sum(c.num_images for c in data.federated.clients) * 100.0 * g
    for name, p in start.named_parameters():
        found = named(model, "plain")[f"backbone.{name}"].double()
        torch.testing.assert_close(found, p.detach() - step[name], rtol=0, atol=2e-6)
        assert step[name].abs().max() > 1e-3


def test_no_steps_are_refused():
    with pytest.raises(ConfigError, match=r"model\.method\.steps"):
        FedSGD(steps=0)
