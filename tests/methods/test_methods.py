"""Every method: the same bits on one rank and on two, and after a pause; what it reduces to; what it does not move."""

from functools import cache, partial
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import fedsim.methods
import others
from failing import run_on_ranks
from fedsim.data import Augmentation, SyntheticReID
from fedsim.federation.components.attacks import Backdoor
from fedsim.federation.components.selection import RandomFraction
from fedsim.methods import (
    APFL,
    DACS,
    MOON,
    SKA,
    Distillation,
    Ditto,
    FedALA,
    FedAtt,
    FedAvg,
    FedBABU,
    FedBN,
    FedCAPR,
    FedDIP,
    FedDyn,
    FedKLPR,
    FedNova,
    FedPav,
    FedProto,
    FedProx,
    FedReID,
    FedReIDFineTune,
    FedSAM,
    FedSGD,
    FedUReID,
    GPerXAN,
    LGFedAvg,
    Local,
    LotteryFL,
    PerFedAvg,
    PFedMe,
    Scaffold,
    StyleBank,
    SubFedAvg,
    TextAnchors,
    WeightedPav,
)
from fedsim.methods.base import Method
from fedsim.models import Neck
from fedsim.testing import check_method
from fedsim.training.labels import BottomUp, Clustering
from fedsim.training.settings import LocalTraining
from small import fit, labels_of, make_data, make_model, vector
from small_tower import small_tower

METHODS = {
    "FedPav-cdw": FedPav(weighting="cdw"),
    "FedPav-cdw-eval-kd": FedPav(weighting="cdw", cdw_mode="eval", distillation=Distillation(lr=0.01)),
    "FedPav-kd": FedPav(distillation=Distillation(every=2, epochs=2, view="seeded_train", target_norm="teacher")),
    "LGFedAvg": LGFedAvg(),
    "LGFedAvg-head": LGFedAvg(layers=2, share_head=True),
    "FedSGD": FedSGD(),
    "FedAtt": FedAtt(),
    "FedProto": FedProto(),
    "FedProto-images": FedProto(compares="images", weighting="uniform"),
    "GPerXAN": GPerXAN(),
    "GPerXAN-guide": GPerXAN(share_head=True, guide=0.5),
    "FedProx": FedProx(mu=0.1),
    "FedProx-backbone": FedProx(mu=0.1, share_neck=False, weighting="uniform"),
    "MOON": MOON(),
    "FedBABU": FedBABU(),
    "FedBABU-head": FedBABU(fine_tune_epochs=2, fine_tune="head", share_neck=False),
    "FedBN": FedBN(),
    "FedBN-head": FedBN(share_head=True),
    "Scaffold": Scaffold(global_lr=0.8),
    "FedNova": FedNova(),
    "Ditto": Ditto(),
    "PFedMe": PFedMe(inner_steps=2),
    "PerFedAvg": PerFedAvg(),
    "PerFedAvg-HF": PerFedAvg(variant="hessian_free", adapt_steps=2),
    "FedReID": FedReID(),
    "FedReID-text": FedReID(aggregated=0.5, views="same"),
    "FedReID-code": FedReID(start_mix=0.5, expert_from="global", views="same"),
    "FedReID-head": FedReID(share_head=True, share_neck=True),
    "FedReIDFineTune": FedReIDFineTune(mapping_epochs=2),
    "SKA": SKA(),
    "SKA-before": SKA(personal="before_aggregation", attn_local=False),
    "WeightedPav": WeightedPav(),
    "WeightedPav-invert": WeightedPav(invert=True, share_neck=True),
    "SKA-LSN-avg": SKA(dual=False, unseen="avg", avg_every=2),
    "LotteryFL": LotteryFL(start_accuracy=0.0, step=0.3),
    "SubFedAvg": SubFedAvg(min_accuracy=0.0, min_distance=0.0, step=0.3),
    "FedDIP": FedDIP(rounds=3, initial=0.3, reconfig_interval=2, lam=0.01, lam_steps=3),
    "FedCAPR": FedCAPR(reg_last_camera_only=True),
    "FedKLPR": FedKLPR(reg_from=1, crr=False, step=0.3, prune_from=1),
    "FedKLPR-zeros-clusters": FedKLPR(
        reg_from=1, sas=False, min_accuracy=0.0, plateau=1.0, tolerance=1.0, prune_from=1
    ),
    "FedALA": FedALA(start_epochs=3),
    "FedALA-all": FedALA(layers=None, threshold=1.0, eta=10.0),
    "FedAvg-clusters": FedAvg(),
    "LotteryFL-clusters": LotteryFL(start_accuracy=0.0, step=0.3),
    "SubFedAvg-clusters": SubFedAvg(min_accuracy=0.0, min_distance=0.0, step=0.3),
    "FedProx-clusters": FedProx(mu=0.1),
    "FedCAPR-clusters": FedCAPR(),
    "Local-keep": Local(),
    "FedReID-keep": FedReID(),
    "DACS": DACS(),
    "DACS-code": DACS(
        first_styled_round=0,
        statistics="unbiased",
        diversity="variance",
        expert_head="shared",
        authenticity_moves_head=True,
    ),
    "DACS-keep": DACS(style_lr=0.01),
    "StyleBank": StyleBank(),
    "StyleBank-random": StyleBank(styles="random"),
    "TextAnchors": TextAnchors(tower=small_tower(), prompt_epochs=2, prompt_lr=0.01),
    "FedUReID": FedUReID(precision=0.1, update=0.3),
    "FedUReID-bottom-up": FedUReID(update=0.3),
}
BOUNDS = {FedAvg, Local}


def _final_methods():
    members = [getattr(fedsim.methods, name) for name in fedsim.methods.__all__]
    return [cls for cls in members if issubclass(cls, Method)]


def _as_in_its_config(cls):
    """A method as configs/methods/NAME.yaml has it: a new one is tried without a line here."""
    path = Path(__file__).parents[2] / "configs" / "methods" / f"{cls.__module__.rpartition('.')[2]}.yaml"
    method = yaml.safe_load(path.read_text())["model"]["method"]
    return cls(**(method.get("init_args", {}) if isinstance(method, dict) else {}))


METHODS |= {
    cls.__name__: _as_in_its_config(cls)
    for cls in _final_methods()
    if cls not in BOUNDS | {type(method) for method in METHODS.values()}
}
FIRST = [*{type(method): name for name, method in reversed(METHODS.items())}.values()]
"""Of each method's settings, the first"""
WITH_MASKS = [name for name, method in METHODS.items() if "masks" in method.requires]
EPOCHS = {"SubFedAvg": 2}
CLUSTERING = Clustering(k1=6, k2=2, min_samples=2, replicate=2)


def test_every_method_is_tried():
    assert {type(method) for method in METHODS.values()} | BOUNDS == set(_final_methods())
    assert _as_in_its_config(FedProx) == FedProx(mu=0.01, share_neck=False, weighting="uniform")


# -- any number of ranks, and pauses -----------------------------------------------------------------------------------


def training_of(name):
    """The local training with which a method is tried."""
    cluster = CLUSTERING if name.endswith("-clusters") else None
    bottom_up = BottomUp(merge=0.3) if name.endswith("-bottom-up") else None
    keeps = name.endswith("-keep")
    return LocalTraining(
        batch_size=8, local_epochs=EPOCHS.get(name.removesuffix("-clusters"), 1), cluster=cluster, bottom_up=bottom_up,
        optimizer=partial(torch.optim.NAdam, lr=1e-3) if keeps else partial(torch.optim.SGD, lr=0.05),
        optimizer_state="keep" if keeps else None,
    )  # fmt: skip


def play(name, devices, rounds, ckpt_path=None, attack=None):
    """Train one method on clients that differ in size, a sample in each round, with dropout and augmentation."""
    training = training_of(name)
    selection = RandomFraction(1.0 if attack else 0.7)
    model = make_model(
        METHODS[name], neck=Neck(dim=8, dropout=0.2), selection=selection, client=training, attack=attack
    )
    data = make_data(
        SyntheticReID(clients=3, unseen=1, scale=0.1), size=(16, 8), augmentation=Augmentation(pad=1, flip=0.5),
        public="new0", labels=labels_of(METHODS[name]),
    )  # fmt: skip
    return fit(model, data, rounds, devices=devices, ckpt_path=ckpt_path)


@cache
def three_rounds(name):
    """A method after three rounds on one rank; several tests look at it."""
    return play(name, devices=1, rounds=3)


def everything(model):
    """All that is left when a run ends."""
    arch = "smallcnn"
    kept = {f"server/{name}": tensor for name, tensor in model.server.kept[arch].items()}
    kept |= {f"table/{name}": rows for name, rows in model.server.tables.items()}
    private = {f"{c}/{n}": t for c, client in model.parts.clients.items() for n, t in client.private_state().items()}
    return {"global": vector(model)} | kept | private


def play_two_rounds(folder, names):
    """What each of two ranks does."""
    for name in names:
        play(name, devices=2, rounds=2).trainer.save_checkpoint(folder / f"{name}.ckpt")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, request):
    """Two rounds on two ranks, of every method that is asked for."""
    folder = tmp_path_factory.mktemp("two-ranks")
    names = others.names_in(request, "test_two_rounds_on_two_ranks_and_one_more_on_one_are_three_on_one")
    run_on_ranks(partial(play_two_rounds, names=names), folder)
    return folder


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", others.some(METHODS, FIRST))
def test_two_rounds_on_two_ranks_and_one_more_on_one_are_three_on_one(checkpoints, name):
    whole, continued = three_rounds(name), play(name, 1, 3, ckpt_path=checkpoints / f"{name}.ckpt")
    a, b = everything(whole), everything(continued)
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), f"{key}: {int((a[key] != b[key]).sum())} of {a[key].numel()} entries differ"
    start = make_model(METHODS[name], neck=Neck(dim=8, dropout=0.2), client=LocalTraining(local_epochs=2, batch_size=8))
    data = make_data(size=(16, 8), public="new0", labels=labels_of(METHODS[name]))
    start.assemble(data, 0, 1, torch.device("cpu"))
    key = "global" if len(a["global"]) else "town0/state"
    assert not torch.equal(everything(start)[key], a[key]), "nothing was trained"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", others.some(METHODS, FIRST))
def test_every_method_passes_the_check_for_authors(name):
    check_method(METHODS[name], client=training_of(name))


@pytest.mark.parametrize("name", [name for name in FIRST if not name.endswith("-clusters")])  # these have no labels
def test_an_attack_on_batches_and_uploads_goes_with_it(name):
    model = play(name, devices=1, rounds=2, attack=Backdoor(["town1"], start=2, patch=2, boost=2.0))
    assert model.round_metrics["attack/clients"] == 1
    before = play(name, devices=1, rounds=2, attack=Backdoor(["town1"], start=3, patch=2))
    assert all(tensor.isfinite().all() for tensor in everything(model).values() if tensor.is_floating_point())
    assert any(not torch.equal(tensor, everything(before)[key]) for key, tensor in everything(model).items())


@pytest.mark.parametrize("name", others.some(WITH_MASKS, {*WITH_MASKS} & {*FIRST}))
def test_what_is_tried_with_masks_prunes(name):
    masks = [client.private_state()["kept.mask"] for client in three_rounds(name).parts.clients.values()]
    pruned = {mask.numpy().tobytes() for mask in masks if not mask.all()}
    assert pruned, "nobody has pruned"
    if not name.startswith("LotteryFL"):  # whose first masks are those of the same initial model
        assert len(pruned) == sum(not bool(mask.all()) for mask in masks)


@pytest.mark.parametrize("name", others.some(METHODS, FIRST))
def test_models_that_are_declared_beside_the_flat_model_are_those_that_are_made(name):
    """What fedsim describe counts."""
    model, method = three_rounds(name), METHODS[name]
    made = {role for one in model.parts.models.values() for role in one._replicas}
    assert made == set(method.replicas)


@pytest.mark.parametrize("name", others.some(METHODS, FIRST))
def test_models_that_clients_keep_are_those_that_are_declared(name):
    """What fedsim describe counts, too; smaller tensors need no declaration."""
    model, method = three_rounds(name), METHODS[name]
    declared = method.keeps
    for client in model.parts.clients.values():
        flat = client.model
        start = method.initial_state(flat).client
        kept = {n.removeprefix("kept."): t.numel() for n, t in client.private_state().items() if n != "state"}
        large = {n: k for n, k in kept.items() if k > 0.2 * flat.flat.num_model and n not in start}
        large = {n: k for n, k in large.items() if not n.startswith("optimizer")}
        flat.set_num_classes(client.num_classes)
        parts = {"model": flat.whole, "shared": flat.shared, "private": flat.private}
        sizes = {name: part.numel() for name, part in parts.items()}
        sizes["people"] = client.num_classes * flat.network.num_features
        assert large.keys() <= declared.keys() <= kept.keys()
        for kept_name, part in declared.items():
            size = client.num_classes * part if isinstance(part, int) else sizes[part]
            assert kept[kept_name] == pytest.approx(size, rel=0.05)


# -- what methods reduce to --------------------------------------------------------------------------------------------


def states(model):
    return {name: client.private_state()["state"] for name, client in model.parts.clients.items()}


def assert_same(a, b):
    """Compare global models and private states bit for bit."""
    assert torch.equal(vector(a), vector(b))
    for name, state in states(a).items():
        assert torch.equal(state, states(b)[name])


@pytest.mark.parametrize(
    ("method", "rounds"),
    [
        (FedProx(mu=0.0), 2),
        (MOON(mu=0.0), 2),
        (MOON(), 1),  # nobody has a previous model
        (Ditto(), 2),  # the personal models disturb nothing
        (APFL(weighting="size"), 2),
        (FedALA(eta=0.0), 2),  # W stays at 1
        (FedSGD(steps=None, share_head=False), 2),
        (FedPav(), 2),
        (FedPav(distillation=Distillation(every=3)), 2),
    ],
    ids=["FedProx", "MOON", "MOON-round-1", "Ditto", "APFL", "FedALA", "FedSGD", "FedPav", "FedPav-kd"],
)
def test_methods_without_what_sets_them_apart_are_fedavg(method, rounds):
    data = make_data(public="new0", augmentation=Augmentation(pad=2))
    plain = fit(
        make_model(FedAvg(share_head=False), neck=Neck(dim=8)), make_data(augmentation=Augmentation(pad=2)), rounds
    )
    assert_same(fit(make_model(method, neck=Neck(dim=8)), data, rounds), plain)


@pytest.mark.parametrize(
    ("method", "weighting"),
    [
        (LotteryFL(target=0.0, start_accuracy=0.0), "uniform"),
        (SubFedAvg(target=0.0), "uniform"),
        (FedDIP(target=0.0, lam=0.0), "size"),
    ],
    ids=["LotteryFL", "SubFedAvg", "FedDIP"],
)
def test_methods_that_prune_nothing_are_fedavg(method, weighting):
    client = LocalTraining(batch_size=8, local_epochs=2, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    plain = fit(make_model(FedAvg(share_head=False, weighting=weighting), client=client))
    assert_same(fit(make_model(method, client=client)), plain)


def test_scaffold_begins_as_fedavg():
    rounds = [fit(make_model(Scaffold()), rounds=n) for n in (1, 2)]
    plain = [fit(make_model(FedAvg(share_head=False, weighting="uniform")), rounds=n) for n in (1, 2)]
    assert_same(rounds[0], plain[0])
    assert not torch.equal(vector(rounds[1]), vector(plain[1]))


def test_fednova_with_equal_steps_is_fedavg():
    equal, unequal = make_data(limit_client_batches=2), make_data()
    assert_same(fit(make_model(FedNova()), equal), fit(make_model(FedAvg(share_head=False)), equal))
    assert not torch.equal(
        vector(fit(make_model(FedNova()), unequal)), vector(fit(make_model(FedAvg(share_head=False)), unequal))
    )


def test_a_single_step_is_fedsgd():
    one_batch = make_data(limit_client_batches=1)
    plain = fit(make_model(FedAvg()), one_batch)
    assert_same(fit(make_model(FedSGD(steps=1))), plain)
    assert not torch.equal(vector(plain), vector(fit(make_model(FedSGD(steps=2)))))


def test_private_necks_stay_private():
    model = fit(make_model(FedAvg(share_head=False, share_neck=False), neck=Neck(dim=8)))
    names = {entry.name for entry in model.parts.models["smallcnn"].flat.shared_entries}
    assert names
    assert all(name.startswith("backbone.") for name in names)


def test_fedbn_shares_no_norm():
    for share_head in (False, True):
        model = fit(make_model(FedBN(share_head=share_head), neck=Neck(dim=8)), rounds=1)
        flat_model = model.parts.models["smallcnn"]
        shared = {entry.name for entry in flat_model.flat.shared_entries}
        norms = {
            f"{path}.{name}"
            for path, module in flat_model.network.named_modules()
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
            for name, _ in [*module.named_parameters(), *module.named_buffers()]
        }
        assert norms
        assert not norms & shared
        assert ("head.weight" in shared) == ("neck.0.weight" in shared) == share_head
        assert not model.evaluator.plan.has_global
        start = make_model(FedBN(share_head=share_head), neck=Neck(dim=8))
        start.assemble(make_data(), 0, 1, torch.device("cpu"))
        assert not torch.equal(vector(model), vector(start))


# -- a fixed point -----------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A backbone without running statistics."""

    out_channels = 4

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images):
        return self.conv(images)


@pytest.mark.parametrize(
    "method",
    [
        FedAvg(share_head=False), FedPav(weighting="cdw"), FedPav(weighting="uniform"), FedAtt(epsilon=1.0), FedProx(),
        MOON(), Scaffold(), FedNova(), Ditto(), PFedMe(), SKA(), SKA(dual=False, unseen="avg"), GPerXAN(), FedReID(),
        FedReID(aggregated=0.5),
        FedCAPR(), FedUReID(), FedBABU(), FedSAM(), FedDyn(), APFL(), FedALA(), DACS(), StyleBank(),
        TextAnchors(tower=small_tower(), prompt_epochs=1),
        PerFedAvg(variant="hessian_free"),
    ],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
def test_equal_uploads_are_a_fixed_point_of_every_weighting(method):
    backbone = Plain()

    def model():
        still = LocalTraining(batch_size=8, optimizer=partial(torch.optim.SGD, lr=0.0))
        return make_model(method, backbone=backbone, neck=Neck(kind="none", dropout=0.0), client=still)

    start = model()
    start.assemble(make_data(), 0, 1, torch.device("cpu"))
    # exact sums have a grid of 2**-40
    torch.testing.assert_close(vector(fit(model()), "plain"), vector(start, "plain"), rtol=0, atol=2**-39)
