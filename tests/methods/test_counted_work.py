"""Images and steps in the log against hooks: on forward passes of networks, and on the steps of torch's optimizers."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from lightning import Callback
from test_methods import METHODS, training_of
from torch.nn.modules.module import register_module_forward_pre_hook

import others
from fedsim.data import Augmentation, SyntheticReID
from fedsim.federation.components.hardware import ClientHardware, Hardware
from fedsim.federation.components.selection import Availability, RandomFraction
from fedsim.federation.components.timing import Buffered, Deadline
from fedsim.methods import SKA, Distillation, Ditto, FedAvg, FedPav, FedReID, FedSAM
from fedsim.models import Neck, SmallCNN
from fedsim.models.reid import ReIDModel
from fedsim.training.batch_loss import BatchLoss
from fedsim.training.objective import Objective
from fedsim.training.settings import ClientOverride, LocalTraining
from lightning_modules import FOREIGN, federation
from small import fit, labels_of, make_data, make_model, sgd

KINDS = (torch.optim.SGD, torch.optim.NAdam, torch.optim.Adam, torch.optim.AdamW)


def without_hooks(step):
    """A step without the wrappers that torch adds when the first optimizer of a class is made."""
    return without_hooks(step.__wrapped__) if getattr(step, "hooked", False) else step


class Hooks:
    """Counts what an outsider sees of a federation in this process."""

    def __init__(self, model):
        self.model = model
        self.start()

    def start(self):
        """Forget what was tried before the first round."""
        self.images = self.steps = self.by_mode = self.given = 0

    def before_forward(self, module, images):
        """A pass that trains: of a network in training mode, with gradients; ``by_mode`` are those of its backbone."""
        if isinstance(module, ReIDModel) and module.training and torch.is_grad_enabled():
            self.images += len(images[0])
        if isinstance(module, SmallCNN) and module.training:
            self.by_mode += len(images[0])

    def counting(self, step):
        """An optimizer's ``step`` that counts, and is not unwrapped by those who look for a bare step."""

        def counted(optimizer, *args, **kwargs):
            of_server = (
                {*map(id, self.model.server.parameters())} if hasattr(self.model, "server") else {}
            )  # the step to the mean trains nothing
            self.steps += id(optimizer.param_groups[0]["params"][0]) not in of_server
            return step(optimizer, *args, **kwargs)

        return counted

    @contextmanager
    def attached(self):
        handle = register_module_forward_pre_hook(self.before_forward)
        try:
            with pytest.MonkeyPatch.context() as patch:
                for kind, step in [(kind, without_hooks(kind.step)) for kind in KINDS]:
                    patch.setattr(kind, "step", self.counting(step))
                yield
        finally:
            handle.remove()


class Logged(Callback):
    """Sums what is logged over the rounds."""

    def __init__(self, hooks):
        self.hooks, self.sums = hooks, {}

    def on_train_start(self, trainer, pl_module):
        self.hooks.start()

    def on_train_epoch_end(self, trainer, pl_module):
        for name, value in pl_module.round_metrics.items():
            if name.startswith(("train/images", "train/steps", "train/skipped")):
                self.sums[name] = self.sums.get(name, 0) + value


def train(model, data=None, rounds=2, hooks=None):
    """Train, and return both counts."""
    logged = Logged(hooks := hooks or Hooks(model))
    with hooks.attached():
        fit(model, data, rounds, callbacks=[logged])
    return hooks, logged.sums


def small_data(**options):
    return make_data(SyntheticReID(clients=3, unseen=1, scale=0.1), size=(16, 8), public="new0", **options)


def assert_counted(hooks, sums):
    assert (sums["train/images"], sums["train/steps"]) == (hooks.images, hooks.steps)
    assert hooks.images > 0
    assert hooks.steps > 0


# -- all methods -------------------------------------------------------------------------------------------------------

MEASURES_IN_TRAINING_MODE = {"FedPav-cdw", "FedKLPR", "FedSupWA", "SSCU"}
"""without gradients: two measurements, and the passes of restyled images before they train"""
BACKBONE_IN_EVALUATION_MODE = {"FedReIDFineTune"}
"""while neck and head are trained on it"""


@pytest.mark.parametrize("name", others.some(METHODS, {"Ditto", "FedPav-cdw-eval-kd", "FedSAM", "SKA"} & {*METHODS}))
def test_images_and_steps_of_every_method_are_those_of_hooks(name):
    options = {"neck": Neck(dim=8, dropout=0.2), "selection": RandomFraction(0.7), "client": training_of(name)}
    data = small_data(augmentation=Augmentation(pad=1, flip=0.5), labels=labels_of(METHODS[name]))
    hooks, sums = train(make_model(METHODS[name], **options), data)
    assert_counted(hooks, sums)
    assert hooks.by_mode >= hooks.images or name in BACKBONE_IN_EVALUATION_MODE
    assert hooks.by_mode == hooks.images or name in MEASURES_IN_TRAINING_MODE | BACKBONE_IN_EVALUATION_MODE


def plain():
    """A run of FedAvg on the same images."""
    return train(make_model(FedAvg()), small_data())[1]


def without(sums, *roles):
    """What is left of the sums without some roles."""
    return tuple(
        sums[f"train/{what}"] - sum(sums[f"train/{what}_{role}"] for role in roles) for what in ("images", "steps")
    )


@pytest.mark.parametrize(
    ("method", "role"),
    [(Ditto(), "personal"), (SKA(), "second"), (FedReID(), "second")],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_second_training_has_names_of_its_own(method, role):
    sums, expected = train(make_model(method), small_data())[1], plain()
    assert {*expected} == {"train/images", "train/steps", "train/skipped"}
    assert {*sums} == {*expected, f"train/images_{role}", f"train/steps_{role}"}
    assert without(sums, role) == without(expected)
    assert (sums[f"train/images_{role}"], sums[f"train/steps_{role}"]) == without(expected)


def test_distillation_is_work_of_the_server_in_the_rounds_that_have_it():
    method, data = FedPav(distillation=Distillation(every=2, epochs=3, batch_size=4)), small_data()
    model = make_model(method)
    hooks, sums = train(model, data, rounds=3)
    assert_counted(hooks, sums)
    public = model.server.num_public
    batches = [min(4, public - first) for first in range(0, public, 4)]
    used = [size for size in batches if size > 1]
    assert (sums["train/images_server"], sums["train/steps_server"]) == (3 * sum(used), 3 * len(used))


def test_the_second_pass_of_a_step_is_work():
    sums, expected = train(make_model(FedSAM()), small_data())[1], plain()
    assert (sums["train/images"], sums["train/steps"]) == (2 * expected["train/images"], expected["train/steps"])


# -- methods of users --------------------------------------------------------------------------------------------------


class Twice(FedPav):
    """Runs each batch again."""

    def loss(self, client, batch):
        client.forward(batch.images)
        return super().loss(client, batch)


class TwiceByTheNetwork(FedPav):
    """Runs each batch again, around the client."""

    def loss(self, client, batch):
        client.model.network(batch.images)
        return super().loss(client, batch)


class ByAReplica(FedPav):
    """Runs each batch through a second model that it has made itself."""

    def loss(self, client, batch):
        client.model.replica("own").forward(batch.images, "32-true")
        return super().loss(client, batch)


class Looks(FedPav):
    """Runs each batch again, without gradients, and in evaluation mode with them."""

    def loss(self, client, batch):
        with torch.no_grad():
            client.forward(batch.images)
        client.model.network.eval()
        client.forward(batch.images)
        client.model.network.train()
        return super().loss(client, batch)


@pytest.mark.parametrize(("kind", "factor"), [(Twice, 2), (TwiceByTheNetwork, 2), (ByAReplica, 2), (Looks, 1)])
def test_passes_that_a_method_adds_are_counted_if_they_train(kind, factor):
    hooks, sums = train(make_model(kind()), small_data())
    assert_counted(hooks, sums)
    expected = plain()
    assert (sums["train/images"], sums["train/steps"]) == (factor * expected["train/images"], expected["train/steps"])


class TwoViews(BatchLoss):
    """Compares two augmented views of each image."""

    views = 2

    def forward(self, seen):
        return (seen.views[0].neck - seen.views[1].neck).square().mean()


# -- shares of the work, and work that is thrown away ------------------------------------------------------------------

UNEQUAL = Hardware(
    down_mbit=float("inf"), up_mbit=float("inf"), images_per_second=100.0,
    clients={"town0": ClientHardware(images_per_second=20.0)},
)  # fmt: skip
DIVERGES = {"town1": ClientOverride(optimizer=partial(torch.optim.SGD, lr=1e18))}
CASES = {
    "drop_partial": {"client": LocalTraining(batch_size=8, drop_partial=True, optimizer=sgd)},
    "local_steps": {"client": LocalTraining(batch_size=8, local_epochs=3, local_steps=5, optimizer=sgd)},
    "accumulate": {"client": LocalTraining(batch_size=8, accumulate=3, optimizer=sgd)},
    "micro_batch": {"client": LocalTraining(batch_size=8, micro_batch=3, optimizer=sgd)},
    "stragglers": {"availability": Availability(straggle=1.0, straggler_work=0.4)},
    "drop-outs": {"availability": Availability(drop=0.5)},
    "Deadline": {"timing": Deadline(seconds=0.5, late="partial"), "hardware": UNEQUAL},
    "Buffered": {"timing": Buffered(buffer=1), "hardware": UNEQUAL},
    "two views": {"objective": Objective(metric=TwoViews())},
    "skip_client": {"on_bad_update": "skip_client", "clients": DIVERGES},
}


@pytest.mark.parametrize("name", others.some(CASES, {"Buffered", "micro_batch", "skip_client"}))
def test_shares_of_the_work(name):
    hooks, sums = train(make_model(FedPav(), **CASES[name]), small_data(), rounds=3)
    assert_counted(hooks, sums)
    assert sums["train/skipped"] == (3 if name == "skip_client" else 0)


@pytest.mark.others
@pytest.mark.parametrize("name", [name for name in CASES if name != "two views"])  # Ditto has one
def test_shares_of_the_work_of_two_models(name):
    assert_counted(*train(make_model(Ditto(), **CASES[name]), small_data(), rounds=3))


def test_a_session_that_is_left_out_was_work():
    """The row of the table is empty, but for its work."""
    good = train(make_model(FedPav()), small_data())[1]
    hooks, bad = train(make_model(FedPav(), on_bad_update="skip_client", clients=DIVERGES), small_data())
    assert_counted(hooks, bad)
    assert without(bad) == without(good)
    assert (good["train/skipped"], bad["train/skipped"]) == (0, 2)


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("method", others.some({"FedAvg": FedAvg(), "Ditto": Ditto(), "FedSAM": FedSAM()}, {"FedAvg"}))
def test_a_module_trains_on_the_images_of_its_training_steps(kind, method, monkeypatch):
    model = federation({"FedAvg": FedAvg, "Ditto": Ditto, "FedSAM": FedSAM}[method](), kind)
    training_step = kind.training_step

    def counting(module, batch, *number):
        hooks.given += len(batch[1])
        return training_step(module, batch, *number)

    monkeypatch.setattr(kind, "training_step", counting)
    hooks = Hooks(model)
    sums = train(model, make_data(SyntheticReID(clients=3, unseen=1, scale=0.1)), hooks=hooks)[1]
    assert (sums["train/images"], sums["train/steps"]) == (hooks.given, hooks.steps)
    assert hooks.steps > 0
