"""Habits of public LightningModules: minimal modules, each with one of them, for either package of Lightning."""

import copy
import random
import re
import weakref
from functools import partial

import numpy as np
import timm.scheduler
import torch
import torchmetrics
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot
from torch.optim import SGD, lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

F_IN = 6 * 7 * 3
"""values of a map of an image of 16 x 8 pixels"""


def make_net():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(F_IN, 8), nn.BatchNorm1d(8)
    )


class Loss(nn.Module):
    """A loss with a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, logits, labels):
        self.count += 1
        return cross_entropy(logits, labels) * (1 + 0.01 * self.count)


def habits(package):  # noqa: C901 - a list of classes
    """Return the habits by name, as classes of a package; some are partials of these."""
    lightning_module = package.LightningModule
    found = {}

    class Base(lightning_module):
        def __init__(self, num_classes=4):
            super().__init__()
            self.save_hyperparameters()
            self.net = make_net()
            self.head = nn.Linear(8, num_classes)

        def embed(self, x):
            return self.net(x)

        def loss(self, batch):
            return cross_entropy(self.head(self.embed(batch[0])), batch[1])

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

        def configure_optimizers(self):
            return SGD(self.parameters(), 0.05, momentum=0.9)

    def habit(kind):
        found[kind.__name__] = kind
        return kind

    def made(kind, **arguments):
        found[f"{kind.__name__}, given"] = partial(kind, **arguments)

    found["plain"] = Base

    # -- what is given, and how modules are built

    @habit
    class GivenNet(lightning_module):
        def __init__(self, net, num_classes=4):
            super().__init__()
            self.save_hyperparameters(ignore=["net"])
            self.net, self.head = net, nn.Linear(8, num_classes)

        embed, loss, training_step = Base.embed, Base.loss, Base.training_step
        configure_optimizers = Base.configure_optimizers

    del found["GivenNet"]
    torch.manual_seed(0)
    made(GivenNet, net=make_net())

    @habit
    class GivenLoss(Base):
        def __init__(self, criterion, num_classes=4):
            super().__init__(num_classes)
            self.criterion = criterion

        def training_step(self, batch, batch_idx):
            return self.criterion(self.head(self.net(batch[0])), batch[1])

    del found["GivenLoss"]
    made(GivenLoss, criterion=Loss())

    @habit
    class GivenOptimizer(Base):
        def __init__(self, optimizer, scheduler, num_classes=4):
            super().__init__(num_classes)
            self.save_hyperparameters(logger=False)

        def configure_optimizers(self):
            optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
            scheduler = self.hparams.scheduler(optimizer=optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}

    del found["GivenOptimizer"]
    made(
        GivenOptimizer,
        optimizer=partial(torch.optim.Adam, lr=0.01),
        scheduler=partial(lr_scheduler.StepLR, step_size=1),
    )

    @habit
    class InitApplied(Base):
        def __init__(self, num_classes=4):
            super().__init__(num_classes)
            self.apply(lambda m: nn.init.normal_(m.weight, std=0.1) if isinstance(m, nn.Linear) else None)

    @habit
    class BuildsInSetup(Base):
        def __init__(self, num_classes=4):
            super(Base, self).__init__()
            self.save_hyperparameters()
            self.net = make_net()

        def setup(self, stage):
            assert stage == "fit"
            assert self.trainer.world_size == 1
            self.head = nn.Linear(8, self.hparams.num_classes)

    @habit
    class ConfiguresModel(BuildsInSetup):
        def setup(self, stage):
            self.data = getattr(self.trainer, "datamodule", None)

        def configure_model(self):
            if not hasattr(self, "head"):
                self.head = nn.Linear(8, self.hparams.num_classes)

    @habit
    class StepInInit(lightning_module):
        def __init__(self, num_classes=4):
            super().__init__()
            self.save_hyperparameters()
            self.net, self.head = make_net(), nn.Linear(8, num_classes)
            self.training_step = self.my_step

        embed, configure_optimizers = Base.embed, Base.configure_optimizers

        def my_step(self, batch, batch_idx):
            return Base.loss(self, batch)

    @habit
    class OptimizerInInit(Base):
        def __init__(self, num_classes=4):
            super().__init__(num_classes)
            self.opt = SGD(self.parameters(), 0.05)

        def configure_optimizers(self):
            return self.opt

    @habit
    class NoBatchNumber(Base):
        def training_step(self, batch):
            return self.loss(batch)

    @habit
    class StarredArguments(Base):
        def training_step(self, batch, *args):
            assert isinstance(args[0], int)
            return self.loss(batch)

    # -- tensors of unusual kinds

    @habit
    class CenterInPlace(Base):
        def __init__(self, num_classes=4):
            super().__init__(num_classes)
            self.register_buffer("center", torch.zeros(8))

        def training_step(self, batch, batch_idx):
            f = self.net(batch[0])
            self.center.mul_(0.9).add_(f.detach().mean(0), alpha=0.1)
            return cross_entropy(self.head(f - self.center.clone()), batch[1])

    @habit
    class CenterReplaced(CenterInPlace):
        def training_step(self, batch, batch_idx):
            f = self.net(batch[0])
            self.center = 0.9 * self.center + 0.1 * f.detach().mean(0)
            return cross_entropy(self.head(f - self.center), batch[1])

    @habit
    class Queue(Base):
        def __init__(self, num_classes=4):
            super().__init__(num_classes)
            self.register_buffer("queue", torch.randn(8, 32))
            self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

        def training_step(self, batch, batch_idx):
            f = self.net(batch[0])
            with torch.no_grad():
                ptr, n = int(self.queue_ptr), len(f)
                columns = torch.arange(ptr, ptr + n) % 32
                self.queue[:, columns] = f.detach().T
                self.queue_ptr[0] = (ptr + n) % 32
            return self.loss(batch) + 1e-3 * (f @ self.queue.clone()).square().mean()

    def with_net(name, change, **members):
        def init(self, num_classes=4):
            Base.__init__(self, num_classes)
            change(self)

        found[name] = type(plain(name), (Base,), {"__init__": init, **members})

    def old_norm(function):
        def change(self):
            self.net[4] = function(self.net[4])

        return change

    with_net("spectral norm", old_norm(nn.utils.parametrizations.spectral_norm))
    with_net("old spectral norm", old_norm(nn.utils.spectral_norm))
    with_net("weight norm", old_norm(nn.utils.parametrizations.weight_norm))
    with_net("old weight norm", old_norm(nn.utils.weight_norm))
    with_net("orthogonal", lambda self: nn.utils.parametrizations.orthogonal(self.head))

    def buffered(name, make, update):
        def step(self, batch, batch_idx):
            update(self)
            return self.loss(batch) * (1 + 1e-3 * self.extra.to(torch.complex64).abs().mean())

        with_net(name, lambda self: self.register_buffer("extra", make()), training_step=step)

    buffered("float64 buffer", lambda: torch.zeros(3, dtype=torch.float64), lambda self: self.extra.add_(1 / 3))
    buffered("float16 buffer", lambda: torch.zeros(3, dtype=torch.float16), lambda self: self.extra.add_(1 / 3))
    buffered("bfloat16 buffer", lambda: torch.zeros(3, dtype=torch.bfloat16), lambda self: self.extra.add_(1 / 3))
    buffered("complex buffer", lambda: torch.ones(2, dtype=torch.complex64), lambda self: self.extra.mul_(1j + 0.1))
    buffered("integer counter", lambda: torch.zeros((), dtype=torch.long), lambda self: self.extra.add_(1))
    buffered("bool mask", lambda: torch.zeros(4, dtype=torch.bool), lambda self: self.extra[1].logical_not_())
    buffered("buffer that grows", lambda: torch.zeros(1, dtype=torch.int32), lambda self: grow(self))

    def grow(self):
        self.extra = torch.cat([self.extra, self.extra[:1] + 1])[-5:]

    with_net("tied weights", lambda self: setattr(self.head, "bias", nn.Parameter(self.head.bias.data)))
    with_net("batch norm without momentum", lambda self: setattr(self.net[1], "momentum", None))
    with_net(
        "number as parameter", lambda self: setattr(self, "scale", nn.Parameter(torch.tensor(1.0))),
        loss=lambda self, batch: cross_entropy(self.scale * self.head(self.net(batch[0])), batch[1]),
    )  # fmt: skip
    with_net(
        "parameter list", lambda self: setattr(self, "more", nn.ParameterList([torch.ones(8), torch.zeros(8)])),
        embed=lambda self, x: self.net(x) * self.more[0] + self.more[1],
    )  # fmt: skip
    with_net(
        "tied layers", lambda self: setattr(self, "same", self.head),
        loss=lambda self, b: cross_entropy(self.head(self.net(b[0])) + self.same(self.net(b[0])), b[1]),
    )  # fmt: skip
    with_net("frozen part", lambda self: self.net[0].requires_grad_(False))
    with_net("part in evaluation mode", lambda self: self.net[1].eval())
    with_net(
        "buffer that is not saved",
        lambda self: self.register_buffer("n", torch.zeros(()), persistent=False),
        loss=lambda self, b: Base.loss(self, b) * (1 + 0.01 * self.n.add_(1)),
    )
    with_net("gradient hook", lambda self: self.head.weight.register_hook(lambda g: 0.5 * g) and None)
    with_net(
        "closure",
        lambda self: setattr(self, "scaled", lambda x: x * (1 + self.head.bias.sum())),
        embed=lambda self, x: self.scaled(self.net(x)),
    )
    with_net(
        "hook with a closure",
        lambda self: self.net.register_forward_hook(lambda m, a, out: out + self.head.bias.sum()) and None,
    )
    with_net("module hook", lambda self: self.head.register_forward_hook(lambda m, a, out: 2 * out) and None)
    with_net("full backward hook", lambda self: self.head.register_full_backward_hook(halved) and None)
    with_net(
        "generator",
        lambda self: setattr(self, "g", torch.Generator().manual_seed(3)),
        loss=lambda self, b: Base.loss(self, (b[0] + 0.1 * torch.randn(b[0].shape, generator=self.g), b[1])),
    )
    with_net(
        "attention",
        lambda self: setattr(self, "attn", nn.MultiheadAttention(8, 2, batch_first=True)),
        embed=lambda self, x: self.attn(*3 * [self.net(x)[:, None]])[0][:, 0],
    )
    with_net(
        "recurrent",
        lambda self: setattr(self, "gru", nn.GRU(8, 8, batch_first=True)),
        embed=lambda self, x: self.gru(self.net(x)[:, None])[0][:, 0],
    )
    with_net("dropout", lambda self: setattr(self, "drop", nn.Dropout(0.3)), embed=lambda s, x: s.drop(s.net(x)))
    with_net("checkpointing", lambda self: None, embed=lambda self, x: checkpoint(self.net, x, use_reentrant=False))
    with_net(
        "functional call",
        lambda self: None,
        embed=lambda self, x: torch.func.functional_call(self.net, dict(self.net.named_parameters()), (x,)),
    )

    # -- buffers and references

    with_net("infinite mask", lambda self: self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1)),
             embed=lambda s, x: (s.mask + s.net(x)[:, None]).softmax(-1).mean(1))  # fmt: skip
    with_net("expanded buffer", lambda self: self.register_buffer("scale", torch.ones(1, 3, 1, 1).expand(1, 3, 16, 8)),
             embed=lambda s, x: s.net(x * s.scale))  # fmt: skip
    with_net("weak reference", lambda self: setattr(self, "ref", weakref.ref(self.net)),
             embed=lambda s, x: s.ref()(x))  # fmt: skip
    with_net("no batch index", lambda self: None, training_step=lambda self, batch: self.loss(batch))
    with_net("a batch without a loss that is a number", lambda self: None,
             training_step=lambda s, b, i: s.loss((b[0], torch.full_like(b[1], -100) if i % 2 else b[1])))  # fmt: skip

    class Checkpoints(package.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            path = f"{trainer.default_root_dir}/kept.ckpt"
            trainer.save_checkpoint(path)
            values = torch.load(path, weights_only=False)["state_dict"]
            pl_module.load_state_dict({name: 0.5 * value for name, value in values.items()})

    with_net("checkpoint of a training", lambda self: None, configure_callbacks=lambda self: [Checkpoints()])

    # -- random numbers

    def step_of(name, step, **more):
        found[name] = type(plain(name), (Base,), {"training_step": step, **more})

    def mixup(self, batch, batch_idx):
        share = float(np.random.beta(1, 1))  # noqa: NPY002 - public code does so
        order = torch.randperm(len(batch[1]))
        mixed = share * batch[0] + (1 - share) * batch[0][order]
        return share * self.loss((mixed, batch[1])) + (1 - share) * self.loss((mixed, batch[1][order]))

    step_of("numpy mixup", mixup)
    step_of("python random", lambda self, b, i: self.loss(b) * (1 + random.random()))
    step_of("torch random", lambda self, b, i: self.loss((b[0] + 0.1 * torch.randn_like(b[0]), b[1])))
    step_of(
        "one hot",
        lambda self, b, i: mse_loss(self.head(self.net(b[0])), one_hot(b[1], self.hparams.num_classes).float()),
    )
    step_of("autocast inside", lambda self, b, i: autocast_loss(self, b))
    step_of(
        "dict with extras",
        lambda self, b, i: {"loss": self.loss(b), "labels": b[1]},
        on_train_batch_end=lambda self, outputs, b, i: self.log("n", float(len(outputs["labels"]))),
    )
    step_of("none at times", lambda self, b, i: None if i % 3 == 1 else self.loss(b))

    def autocast_loss(self, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return self.loss(batch)

    # -- schedules

    def schedule(name, configure, base=Base, **more):
        found[name] = type(plain(name), (base,), {"configure_optimizers": configure, **more})

    def warm(self):
        o = SGD(self.parameters(), 0.05)
        if self.trainer.max_epochs <= 1:
            raise ValueError("warm-up needs more epochs")
        steps = [
            lr_scheduler.LinearLR(o, total_iters=1),
            lr_scheduler.CosineAnnealingLR(o, self.trainer.max_epochs - 1),
        ]
        return [o], [lr_scheduler.SequentialLR(o, steps, milestones=[1])]

    def one_cycle(self):
        o = SGD(self.parameters(), 0.05, momentum=0.9)
        n = int(self.trainer.estimated_stepping_batches)
        s = lr_scheduler.OneCycleLR(o, 0.1, total_steps=n, pct_start=min(1.0, 3 / n))
        return {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step"}}

    def two(self):
        o = SGD(self.parameters(), 0.05)
        return [o], [
            {"scheduler": lr_scheduler.StepLR(o, 2, 0.9), "interval": "step"},
            lr_scheduler.ExponentialLR(o, 0.9),
        ]

    def every_second(self):
        o = SGD(self.parameters(), 0.05)
        s = lr_scheduler.StepLR(o, 1, 0.5)
        return {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step", "frequency": 2}}

    def dicts(self):
        o = SGD(self.parameters(), 0.05)
        return [{"optimizer": o, "lr_scheduler": {"scheduler": lr_scheduler.StepLR(o, 1, 0.5)}}]

    def plateau(self):
        o = SGD(self.parameters(), 0.05)
        s = lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=10.0)
        return {"optimizer": o, "lr_scheduler": {"scheduler": s, "monitor": "loss", "interval": "epoch"}}

    def by_timm(self):
        o = SGD(self.parameters(), 0.05)
        s = timm.scheduler.CosineLRScheduler(o, t_initial=self.trainer.max_epochs, warmup_t=1, warmup_lr_init=1e-3)
        return [o], [{"scheduler": s, "interval": "epoch"}]

    def groups(self):
        return torch.optim.AdamW(
            [
                {"params": self.net.parameters(), "lr": 1e-3},
                {"params": self.head.parameters(), "lr": 1e-2, "weight_decay": 0.1},
            ]
        )

    def logged(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, on_step=False, prog_bar=True, sync_dist=True)
        return loss

    schedule("warm-up", warm)
    schedule("one cycle", one_cycle)
    schedule("two schedulers", two)
    schedule("every second step", every_second)
    schedule("list of dicts", dicts)
    schedule("plateau", plateau, training_step=logged)
    schedule("timm scheduler", by_timm, lr_scheduler_step=lambda self, s, m: s.step(epoch=self.current_epoch))
    schedule("groups", groups)
    schedule(
        "lambda rate", lambda self: ([o := SGD(self.parameters(), 0.05)], [lr_scheduler.LambdaLR(o, lambda e: 0.9**e)])
    )
    schedule("rmsprop", lambda self: torch.optim.RMSprop(self.parameters(), 1e-3, centered=True, momentum=0.5))
    schedule("lbfgs", lambda self: torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3))
    schedule("only what trains", lambda self: SGD(filter(lambda p: p.requires_grad, self.parameters()), 0.05))
    schedule("tuple of optimizers", lambda self: (SGD(self.parameters(), 0.05),))

    # -- hooks

    def step_at_times(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def warm_by_hand(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (self.trainer.global_step + 1) / 5)
        optimizer.step(closure=optimizer_closure)

    def sharp(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        with torch.no_grad():
            moves = [(p, 0.05 * p.grad / (p.grad.norm() + 1e-12)) for p in self.parameters() if p.grad is not None]
            for p, move in moves:
                p.add_(move)
        optimizer_closure()
        with torch.no_grad():
            for p, move in moves:
                p.sub_(move)
        optimizer.step()

    def clamp(self, optimizer):
        with torch.no_grad():
            self.head.bias.clamp_(-0.02, 0.02)

    def noisy(self):
        for p in self.head.parameters():
            p.grad.add_(0.01)

    def clips(self, optimizer):
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    def clips_inside(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")

    def rate_at_end(self):
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.5
        self.log("rate", self.optimizers().param_groups[0]["lr"])

    def stop(self):
        self.trainer.should_stop = True

    def stop_at(self, outputs, batch, batch_idx):
        if self.global_step >= 5:
            self.trainer.should_stop = True

    def zero(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    class Shrinks(package.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            with torch.no_grad():
                pl_module.head.weight.mul_(0.99)

    def hooks(name, **members):
        found[name] = type(plain(name), (Base,), members)

    hooks("steps at times", optimizer_step=step_at_times)
    hooks("warm-up by hand", optimizer_step=warm_by_hand)
    hooks("sharpness-aware", optimizer_step=sharp)
    hooks("clamp before zero grad", on_before_zero_grad=clamp)
    hooks("noise after backward", on_after_backward=noisy)
    hooks("clips before the step", on_before_optimizer_step=clips)
    hooks("clips inside", configure_gradient_clipping=clips_inside)
    hooks("sets the rate at an epoch's end", on_train_epoch_end=rate_at_end)
    hooks("stops after an epoch", on_train_epoch_end=stop)
    hooks("stops at a step", on_train_batch_end=stop_at)
    hooks("zero grad", optimizer_zero_grad=zero)
    hooks("backward", backward=lambda self, loss: loss.backward(retain_graph=True))
    hooks("callbacks", configure_callbacks=lambda self: [Shrinks()])
    hooks("train loader", train_dataloader=lambda self: [1, 2], val_dataloader=lambda self: [1])
    hooks("checkpoint hooks", on_save_checkpoint=lambda self, c: None, on_load_checkpoint=lambda self, c: None)
    hooks("validation", validation_step=lambda self, b, i: self.log("val", self.loss(b)))
    hooks(
        "moves batches",
        transfer_batch_to_device=lambda self, b, device, i: Base.transfer_batch_to_device(self, b, device, i),
    )
    hooks(
        "batches as dicts",
        on_after_batch_transfer=lambda self, b, i: {"x": b[0] * 2, "y": b[1]},
        training_step=lambda self, b, i: self.loss((b["x"], b["y"])),
    )
    hooks("skips the rest", on_train_batch_start=lambda self, b, i: -1 if i == 3 else None)
    hooks("evaluation at the start", on_train_start=lambda self: self.net.eval() and None)
    hooks("evaluation in each epoch", on_train_epoch_start=lambda self: self.net[1].eval() and None)
    hooks("unfreezes", on_train_epoch_start=lambda self: self.net.requires_grad_(self.current_epoch > 0) and None)
    hooks("rate by batch", on_train_batch_start=lambda self, b, i: rate_by_batch(self))
    hooks(
        "adds a group",
        on_train_epoch_start=lambda self: adds(self),
        configure_optimizers=lambda self: SGD(self.head.parameters(), 0.05),
    )
    hooks(
        "accumulates from an epoch on",
        on_train_epoch_start=lambda self: setattr(self.trainer, "accumulate_grad_batches", 1 + self.current_epoch),
    )
    hooks(
        "own train mode",
        train=lambda self, mode=True: (lightning_module.train(self, mode), self.net[1].eval(), self)[-1],
    )
    hooks(
        "fit hooks",
        on_fit_start=lambda self: scale(self, 0.9),
        on_train_end=lambda self: scale(self, 1.1),
        teardown=lambda self, stage: scale(self, 0.5),
    )

    def scale(self, factor):
        with torch.no_grad():
            self.head.weight.mul_(factor)

    def rate_by_batch(self):
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.05 / (1 + self.trainer.global_step)

    def adds(self):
        if self.current_epoch == 1:
            self.optimizers().add_param_group({"params": list(self.net.parameters()), "lr": 0.01})

    # -- what a Trainer is asked for

    def asks(name, question):
        def step(self, batch, batch_idx):
            return self.loss(batch) * (1 + 1e-3 * float(question(self)))

        step_of(name, step)

    asks("trainer.model", lambda self: sum(p.numel() for p in self.trainer.model.parameters()) % 7)
    asks("trainer.log_every_n_steps", lambda self: self.trainer.log_every_n_steps > 0)
    asks("trainer.is_last_batch", lambda self: self.trainer.is_last_batch)
    asks("trainer.num_training_batches", lambda self: self.trainer.num_training_batches)
    asks("trainer.train_dataloader", lambda self: len(self.trainer.train_dataloader))
    asks(
        "trainer.num_devices", lambda self: self.trainer.num_devices + self.trainer.num_nodes + self.trainer.world_size
    )
    asks("trainer.current_epoch", lambda self: self.trainer.current_epoch + self.trainer.global_step)
    asks("trainer.max_epochs", lambda self: self.current_epoch / self.trainer.max_epochs)
    asks(
        "trainer.state",
        lambda self: self.trainer.training and not self.trainer.sanity_checking and self.trainer.is_global_zero,
    )
    asks("trainer.callback_metrics", lambda self: (self.log("x", 1.0), len(self.trainer.callback_metrics))[1])
    asks("all_gather", lambda self: self.all_gather(torch.ones(2)).sum())
    asks("optimizers().optimizer", lambda self: self.optimizers().optimizer.param_groups[0]["lr"])
    asks("lr_schedulers", lambda self: self.lr_schedulers() is None)
    asks("global_rank", lambda self: self.global_rank + self.local_rank)
    asks("device", lambda self: self.device.type == "cpu")
    asks("logger", lambda self: (self.logger and self.logger.experiment.add_scalar("a", 1, 2), 1)[1])

    # -- averages, metrics, nested modules

    @habit
    class Averaged(Base):
        def __init__(self, num_classes=4):
            super().__init__(num_classes)
            self.ema = AveragedModel(self.net, avg_fn=lambda a, b, n: 0.9 * a + 0.1 * b)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.ema.update_parameters(self.net)

        def configure_optimizers(self):
            return SGD([*self.net.parameters(), *self.head.parameters()], 0.05)

    @habit
    class Teacher(Base):
        def __init__(self, num_classes=4):
            super().__init__(num_classes)
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)

        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                for p, q in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                    p.mul_(0.99).add_(q, alpha=0.01)
                target = self.teacher(batch[0])
            return self.loss(batch) + mse_loss(self.net(batch[0]), target)

    @habit
    class Metrics(Base):
        def __init__(self, num_classes=4):
            super().__init__(num_classes)
            accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=num_classes)
            self.accuracy, self.mean = accuracy, torchmetrics.MeanMetric()
            self.both = torchmetrics.MetricCollection({"a": accuracy.clone(), "b": accuracy.clone()}, prefix="train/")

        def training_step(self, batch, batch_idx):
            logits = self.head(self.net(batch[0]))
            loss = cross_entropy(logits, batch[1])
            self.accuracy(logits, batch[1])
            self.mean(loss.detach())
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            self.log_dict(self.both(logits, batch[1]))
            self.log("mean", self.mean, on_epoch=True, on_step=False)
            return loss * (1 + 0.1 * self.accuracy.compute())

        def on_train_epoch_end(self):
            scale(
                self,
                1 - 0.01 * float(self.trainer.callback_metrics.get("accuracy_epoch", 0)),
            )

    @habit
    class Nested(Base):
        def __init__(self, num_classes=4):
            super().__init__(num_classes)
            self.inner = Base(num_classes)

        def embed(self, x):
            return self.inner.embed(x)

        def training_step(self, batch, batch_idx):
            return self.inner.loss(batch) * (1 + 0.01 * self.inner.current_epoch) + self.loss(batch)

    # -- manual optimization

    class Manual(Base):
        def __init__(self, num_classes=4):
            super().__init__(num_classes)
            self.automatic_optimization = False

        def take(self, optimizer, loss):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

        def training_step(self, batch, batch_idx):
            self.take(self.optimizers(), self.loss(batch))

    found["manual"] = Manual

    def two_optimizers(self):
        return [SGD(self.net.parameters(), 0.05), torch.optim.Adam(self.head.parameters(), 1e-3)]

    def alternates(self, batch, batch_idx):
        net, head = self.optimizers()
        self.toggle_optimizer(net)
        self.take(net, self.loss(batch))
        self.untoggle_optimizer(net)
        self.toggle_optimizer(head)
        self.take(head, self.loss(batch) * 2)
        self.untoggle_optimizer(head)

    def accumulates(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    def scheduled(self, batch, batch_idx):
        self.take(self.optimizers(), loss := self.loss(batch))
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()
        return loss

    def manual(name, **members):
        found[name] = type(plain(name), (Manual,), members)

    manual("adversaries", training_step=alternates, configure_optimizers=two_optimizers)
    manual("manual accumulation", training_step=accumulates)
    manual("manual schedule", training_step=scheduled, configure_optimizers=dicts)
    return found


def plain(name):
    return re.sub(r"\W", "_", name)


def halved(module, grad_input, grad_output):
    return tuple(None if g is None else 0.5 * g for g in grad_input)
