"""Habits of the LightningModules of public projects: minimal modules, each with one of them, for either package."""

import copy
import os
import re
from functools import partial

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, lr_scheduler

from habit_parts import Average, CountedAverage, Merges, Sharp, Task
from habits import habits, make_net


def project_habits(package):  # noqa: C901 - a list of classes
    """Return the habits by name, as classes of a package; some are partials of these."""
    found, known = {}, habits(package)
    base, manual = known["plain"], known["manual"]

    def habit(name, parent=base, change=lambda self: None, **members):
        def init(self, num_classes=4):
            parent.__init__(self, num_classes)
            change(self)

        found[name] = type(re.sub(r"\W", "_", name), (parent,), {"__init__": init, **members})

    class Passes(base):
        def __init__(self, factor, **arguments):
            super().__init__(**arguments)
            self.factor = factor

        def training_step(self, batch, batch_idx):
            return self.factor * self.loss(batch)

    found["arguments passed on"] = partial(Passes, factor=2)

    class System(base):
        def __init__(self, net, optimizer, scheduler, num_classes=4):
            package.LightningModule.__init__(self)
            self.net, self.head = net, nn.Linear(8, num_classes)
            self.optimizer, self.scheduler = optimizer, scheduler

        def configure_optimizers(self):
            return [self.optimizer], [{"scheduler": self.scheduler, "interval": "step"}]

    net = make_net()
    optimizer = SGD(net.parameters(), 0.05)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    found["optimizer given"] = partial(System, net=net, optimizer=optimizer, scheduler=scheduler)

    class Sharded(known["BuildsInSetup"]):
        def setup(self, stage):
            self.stage = stage

        def configure_sharded_model(self):
            self.head = nn.Linear(8, self.hparams.num_classes)

    found["layers made late"] = Sharded

    def compiles(self, stage):
        self.net = torch.compile(self.net, backend="eager")

    habit("compiled in setup", setup=compiles)

    # -- hooks of layers, and plain objects

    def catch(self, layer, inputs, output):
        self.caught = output.flatten(start_dim=1)

    def loss_of_caught(self, batch):
        return base.loss(self, batch) + 1e-3 * self.caught.square().mean()

    habit(
        "hook that is a method",
        change=lambda self: self.net[2].register_forward_hook(self.catch) and None,
        catch=catch, loss=loss_of_caught,
    )  # fmt: skip

    def of_parameter(self):
        factor = self.factor = nn.Parameter(torch.tensor(1.0))
        self.functions = [lambda x: x * factor]

    habit("function of a parameter", change=of_parameter, embed=lambda self, x: self.functions[0](self.net(x)))

    def after_accumulation(self):
        def halve(parameter):
            parameter.grad.mul_(0.5)

        self.head.weight.register_post_accumulate_grad_hook(halve)

    habit("hook after accumulation", change=after_accumulation)

    def sets_task(self, stage):
        self.task.model, self.task.trainer = self, self.trainer

    habit(
        "task", change=lambda self: setattr(self, "task", Task()), setup=sets_task,
        training_step=lambda self, batch, batch_idx: self.task.loss(batch),
    )  # fmt: skip
    habit(
        "average", change=lambda self: setattr(self, "average", Average(self.net)),
        on_before_zero_grad=lambda self, *_: self.average.update(self.net),
        on_save_checkpoint=lambda self, checkpoint: checkpoint.update(average=self.average.values),
        on_load_checkpoint=lambda self, checkpoint: setattr(self.average, "values", checkpoint["average"]),
        loss=lambda self, batch: base.loss(self, batch) + self.average.values["0.bias"].square().sum(),
    )  # fmt: skip

    def averages(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)
        self.average.update(self.net)

    habit(
        "counted average", change=lambda self: setattr(self, "average", CountedAverage(self.net)),
        optimizer_step=averages, on_validation_start=lambda self: None,
    )  # fmt: skip

    def loss_with_earlier(self, batch):
        loss = 0.9 * base.loss(self, batch) + 0.1 * self.earlier.get("loss", 0)
        self.earlier["loss"] = loss.detach()
        return loss

    def warms_up(self, *arguments, **options):
        optimizer = arguments[2]
        if self.trainer.global_step < 3:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (self.trainer.global_step + 1) / 3
        base.optimizer_step(self, *arguments, **options)

    habit(
        "loss with earlier ones", change=lambda self: setattr(self, "earlier", {}),
        loss=loss_with_earlier, optimizer_step=warms_up,
    )  # fmt: skip

    # -- tensors

    def remembers(self, batch, batch_idx):
        features = self.net(batch[0])
        self.bank = torch.cat([self.bank, features.detach()[:2]])[-20:]
        return self.loss(batch) + 1e-3 * (features @ self.bank.T).square().mean()

    habit(
        "bank that grows", change=lambda self: self.register_buffer("bank", torch.empty(0, 8)), training_step=remembers
    )

    def bank_by_size(self):
        loader = self.trainer.train_dataloader
        self.register_buffer("numbers", torch.zeros(len(loader) * 8).long())
        self.num_images = len(loader.dataset)

    habit(
        "bank by the number of images", on_train_start=bank_by_size,
        loss=lambda self, batch: base.loss(self, batch) * self.num_images / 100,
    )  # fmt: skip

    def rescales(self, batch, batch_idx):
        if self.current_epoch == 0 and self.global_step == 0 and batch_idx == 0:
            del self.scale
            self.register_buffer("scale", 1 / batch[0].flatten().std())

    habit(
        "scale of the first batch", change=lambda self: self.register_buffer("scale", torch.tensor(1.0)),
        on_train_batch_start=package.utilities.rank_zero_only(rescales),
        embed=lambda self, x: self.net(x * self.scale),
    )  # fmt: skip
    habit("layer that merges", change=lambda self: self.net.append(Merges(8, 8)))

    def without_teacher(self, *arguments, **options):
        values = package.LightningModule.state_dict(self, *arguments, **options)
        for name in [name for name in values if name.startswith(("net.1", "net.5"))]:
            del values[name]
        return values

    habit("state without parts", state_dict=without_teacher)

    def in_place(self, batch, batch_idx):
        batch[0].sub_(0.5).div_(0.25)
        return self.loss(batch)

    habit("images changed in place", training_step=in_place)

    # -- schedules and optimizers

    def by_validation(self):
        optimizer = SGD(self.parameters(), 0.05)
        plateau = {"scheduler": lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": plateau}

    habit(
        "plateau of validation", configure_optimizers=by_validation,
        validation_step=lambda self, batch, batch_idx: self.log("val_loss", self.loss(batch)),
    )  # fmt: skip

    def continued(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step, last_epoch=self.trainer.global_step - 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    habit("schedule that continues", configure_optimizers=continued)

    def with_data(self):
        self.trainer.fit_loop.setup_data()
        optimizer = SGD(self.parameters(), 0.05)
        steps = len(self.trainer.train_dataloader) * self.trainer.max_epochs
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    habit("data before optimizers", configure_optimizers=with_data)

    def made_again(self):
        if self.current_epoch == 1:
            self.net.requires_grad_(True)
            self.trainer.strategy.setup_optimizers(self.trainer)

    habit(
        "optimizers made again", on_train_epoch_start=made_again,
        change=lambda self: self.net.requires_grad_(False) and None,
        configure_optimizers=lambda self: SGD([p for p in self.parameters() if p.requires_grad], 0.05),
    )  # fmt: skip

    class Remembers(base):
        def __init__(self, num_classes=4):
            super().__init__(num_classes)
            self.register_buffer("mean", torch.zeros(8))

        def training_step(self, batch, batch_idx):
            self.mean = 0.9 * self.mean + 0.1 * self.net(batch[0]).detach().mean(0)
            return torch.tensor(0.0, requires_grad=True)

        def configure_optimizers(self):
            return None

    found["no optimizer"] = Remembers

    def two_steps(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.first_step()
        self.manual_backward(loss := self.loss(batch))
        optimizer.second_step()
        return loss

    def sharp(self):
        return Sharp(self.parameters(), lr=0.05)

    habit("two steps of one", manual, training_step=two_steps, configure_optimizers=sharp)

    def past_lightning(self, batch, batch_idx):
        def closure():
            self.manual_backward(loss := self.loss(batch))
            return loss

        closure()
        self.optimizers().optimizer.step(closure=closure)

    habit("steps past Lightning", manual, training_step=past_lightning, configure_optimizers=sharp)

    def by_number(self, batch, batch_idx):
        optimizers = self.optimizers()
        chosen = optimizers[0 if self.global_step < 2 else batch_idx % 2]
        chosen.zero_grad()
        with chosen.toggle_model():
            self.manual_backward(self.loss(batch))
        chosen.step()

    def two(self):
        return [SGD(self.net.parameters(), 0.05), torch.optim.Adam(self.head.parameters(), 1e-3)]

    habit("optimizer by number", manual, training_step=by_number, configure_optimizers=two)

    # -- hooks

    def drops(self):
        self.number = getattr(self, "number", 0) + 1
        if self.number == 2:
            self.head.bias.grad[0] = torch.inf
        if any(not p.grad.isfinite().all() for p in self.parameters()):
            self.zero_grad()

    habit("drops what is not finite", on_after_backward=drops)

    def follows(self, outputs, batch, batch_idx):
        if self.trainer.global_step > self.last_step:
            share = 0.1 + 0.9 * self.trainer.global_step / self.trainer.estimated_stepping_batches
            with torch.no_grad():
                for p, q in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                    p.lerp_(q, share)
        self.last_step = self.trainer.global_step

    habit(
        "teacher that follows steps",
        change=lambda self: setattr(self, "teacher", copy.deepcopy(self.net).requires_grad_(False)),
        on_train_start=lambda self: setattr(self, "last_step", 0), on_train_batch_end=follows,
        loss=lambda self, batch: base.loss(self, batch) + mse_loss(self.net(batch[0]), self.teacher(batch[0])),
    )  # fmt: skip

    def syncs(self, batch, batch_idx):
        if self.global_step % 3 == 0:
            self.target.load_state_dict(self.net.state_dict())
        with torch.no_grad():
            target = self.target(batch[0])
        return self.loss(batch) + mse_loss(self.net(batch[0]), target)

    habit(
        "target that is loaded", training_step=syncs,
        change=lambda self: setattr(self, "target", copy.deepcopy(self.net)),
    )  # fmt: skip

    def sets_counters(self):
        loop, number = self.trainer.fit_loop, self.current_epoch * len(self.trainer.train_dataloader)
        loop.epoch_progress.current.processed = loop.epoch_progress.current.completed = self.current_epoch
        loop.epoch_loop.batch_progress.total.ready = number + 1
        loop.epoch_loop.batch_progress.total.completed = number

    def takes_turns(self, batch, batch_idx):
        number = self.trainer.fit_loop.epoch_loop.total_batch_idx + 1
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            self.take(optimizer, self.loss(batch) * (1 + 0.01 * number) * (1 + index))
            self.untoggle_optimizer(optimizer)

    def makes_schedules(self):
        self.made = two(self)
        self.schedules = [lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in self.made]

    habit(
        "counters of the Trainer", manual, change=makes_schedules, on_train_start=sets_counters,
        training_step=takes_turns, configure_optimizers=lambda self: (self.made, self.schedules),
        on_train_epoch_end=lambda self: [schedule.step() for schedule in self.lr_schedulers()] and None,
    )  # fmt: skip

    def finds_queue(self, stage):
        folder = os.path.join(self.logger.log_dir, "queue")
        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(folder, f"{self.trainer.global_rank}.pth")

    habit(
        "queue in a file", change=lambda self: setattr(self, "queue", None), setup=finds_queue,
        on_train_epoch_start=lambda self: setattr(self, "queue", torch.zeros(4)),
        on_train_epoch_end=lambda self: torch.save(self.queue, self.path),
    )  # fmt: skip

    # -- callbacks of Lightning

    def logged(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def stops_and_saves(self):
        stop = package.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0)
        return [stop, package.callbacks.ModelCheckpoint(monitor="loss", save_last=True)]

    habit("stops early", configure_callbacks=stops_and_saves, training_step=logged)
    habit("averages at the end", configure_callbacks=lambda self: package.callbacks.StochasticWeightAveraging(0.01, 1))

    class Unfreezes(package.callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.net)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net, optimizer, lr=0.01)

    habit(
        "unfreezes by a callback", configure_callbacks=lambda self: [Unfreezes()],
        configure_optimizers=lambda self: SGD(filter(lambda p: p.requires_grad, self.parameters()), 0.05),
    )  # fmt: skip
    return found


OPTIONS = {"teacher that follows steps": {"accumulate": 2}}
"""settings of the training of a habit"""
