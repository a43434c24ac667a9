"""Layers, an optimizer and plain objects of the modules in ``project_habits.py``."""

import threading

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.optim import SGD, Optimizer


class Merges(nn.Linear):
    """A layer with a low-rank addition, which its evaluation mode adds to its weights, as loralib does."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, sizes[0])), nn.Parameter(0.1 * torch.randn(sizes[1], 2))
        self.is_merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.is_merged is mode:
            self.weight.data += (-1 if mode else 1) * (self.b @ self.a).data
            self.is_merged = not mode
        return self

    def forward(self, x):
        y = linear(x, self.weight, self.bias)
        return y if self.is_merged else y + x @ self.a.T @ self.b.T


class Sharp(Optimizer):
    """Sharpness-aware minimisation in two steps, by another optimizer."""

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.base = SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(0.05 * p.grad / (p.grad.norm() + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


class Average:
    """Averages of a network's values: no module."""

    def __init__(self, net):
        self.values = {name: value.detach().clone() for name, value in net.state_dict().items()}

    def update(self, net):
        for name, value in net.state_dict().items():
            self.values[name] = torch.lerp(self.values[name].float(), value.float(), 0.1)


class CountedAverage(nn.Module):
    """Averages as buffers, and a count that only its extra state has."""

    def __init__(self, net):
        super().__init__()
        for number, p in enumerate(net.parameters()):
            self.register_buffer(f"average_{number}", p.detach().clone())
        self.count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]

    def update(self, net):
        self.count += 1
        share = 1 - min(0.9, (1 + self.count) / (10 + self.count))
        for p, average in zip(net.parameters(), self.buffers(), strict=True):
            average.lerp_(p.detach(), share)


class Task:
    """What to learn: it holds the module and its Trainer."""

    def __init__(self):
        self.lock = threading.Lock()

    def loss(self, batch):
        return cross_entropy(self.model.head(self.model.net(batch[0])), batch[1]) * (1 + self.trainer.current_epoch)
