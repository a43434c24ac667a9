"""Each method with clients that train a user's LightningModule: those that can, and those that name what is lacking."""

import re
from pathlib import Path

import pytest
import torch

import fedsim.methods
from fedsim.core.errors import ConfigError
from fedsim.data import SyntheticReID
from fedsim.evaluation.settings import Evaluation
from fedsim.federation.federation import Federation
from fedsim.methods import Distillation, FedPav, FedSGD, WeightedPav
from fedsim.methods.base import Method
from fedsim.training.settings import LocalTraining
from lightning_modules import Small, module_state
from small import fit, make_data

KINDS = {name: getattr(fedsim.methods, name) for name in fedsim.methods.__all__}
KINDS = {name: kind for name, kind in KINDS.items() if isinstance(kind, type) and issubclass(kind, Method)}
WORKS = {
    "Ditto": {}, "FedALA": {"start_epochs": 2}, "FedAtt": {}, "FedAvg": {}, "FedBN": {}, "FedDIP": {},
    "FedDyn": {}, "FedNova": {}, "FedPav": {}, "FedProx": {}, "FedRep": {"head_epochs": 1}, "FedSAM": {}, "FedSGD": {},
    "FedBABU": {"fine_tune_epochs": 1}, "IFCA": {}, "LGFedAvg": {"layers": 1}, "Local": {},
    "LotteryFL": {"start_accuracy": 0.0}, "MOON": {},
    "PFedMe": {"inner_steps": 2}, "Scaffold": {}, "SubFedAvg": {"min_accuracy": 0.0},
    "WeightedPav": {"share_neck": True},
}  # fmt: skip
"""methods that need only hooks that a module has -> settings of their test"""
LACKING = {
    "APFL", "DACS", "FedCAPR", "FedKLPR", "FedProto", "FedReID", "FedReIDFineTune", "FedSupWA", "FedUReID", "GPerXAN",
    "PerFedAvg", "SKA", "SSCU", "StyleBank", "TextAnchors",
}  # fmt: skip
"""methods that work on features, logits or layers of fedsim's own model, or step two models in turn"""


def train(name, rounds, ckpt_path=None, **options):
    client = LocalTraining(batch_size=8, local_epochs=2 if name == "SubFedAvg" else 1)
    public = "new0" if "distillation" in options else None
    data = make_data(SyntheticReID(clients=3, unseen=1, scale=0.1), public=public)
    model = Federation(
        KINDS[name](**WORKS[name] | options), Small, client=client, evaluation=Evaluation(test_during_fit=False)
    )
    return fit(model, data, rounds, ckpt_path=ckpt_path)


def test_a_limit_of_steps_counts_those_at_the_ends_of_epochs():
    data = make_data(SyntheticReID(clients=2, unseen=1, scale=0.1))
    rounds = {}
    for epochs in (1, 2):  # an epoch has fewer batches than a step accumulates, and ends with a step
        client = LocalTraining(batch_size=8, local_epochs=epochs, accumulate=99)
        rounds[epochs] = fit(Federation(FedSGD(), Small, client=client), data, 1)
    assert rounds[1].round_metrics["train/steps"] == rounds[2].round_metrics["train/steps"]
    assert torch.equal(*(module_state(model)["global"] for model in rounds.values()))


def test_every_method_is_in_one_of_the_lists():
    assert {*WORKS} | LACKING == {*KINDS}
    assert not {*WORKS} & LACKING


def test_the_pages_count_those_that_train_a_module_and_name_the_others():
    docs = Path(__file__).parents[2] / "docs"
    assert f"{len(WORKS)} of them train." in (docs / "methods.md").read_text()
    refusals = [line for line in (docs / "own_module.md").read_text().splitlines() if "refused with a module" in line]
    assert {*re.findall(r"`(\w+)`", " ".join(refusals))} >= LACKING


@pytest.mark.parametrize("name", WORKS)
def test_methods_train_a_module_and_continue_with_the_same_bits(name, tmp_path):
    whole = train(name, 3)
    train(name, 2).trainer.save_checkpoint(tmp_path / "two.ckpt")
    continued = train(name, 3, ckpt_path=tmp_path / "two.ckpt")
    a, b = module_state(whole), module_state(continued)
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key
    two = LocalTraining(local_epochs=2)  # SubFedAvg needs them
    start = Federation(KINDS[name](**WORKS[name]), Small, client=two)
    start.assemble(make_data(SyntheticReID(clients=3, unseen=1, scale=0.1)), 0, 1, torch.device("cpu"))
    key = "town0 state" if name == "Local" else "global"
    assert not torch.equal(module_state(start)[key], a[key])
    assert whole.trainer.test(whole, datamodule=make_data(), verbose=False)[0]["test/mAP"] > 0


def test_a_module_distils_from_features():
    model = train("FedPav", 2, distillation=Distillation(every=1, epochs=1))
    assert module_state(model)["global"].isfinite().all()
    assert not torch.equal(module_state(model)["global"], module_state(train("FedPav", 2))["global"])


@pytest.mark.parametrize(
    "method",
    [*(KINDS[name]() for name in sorted(LACKING)), FedPav(weighting="cdw")],
    ids=lambda method: type(method).__name__,
)
def test_methods_that_need_fedsims_own_model_say_so(method):
    model = Federation(method, Small)
    with pytest.raises(ConfigError, match=r"^model\.method: \w+, as it is configured, needs features") as caught:
        model.assemble(make_data(), 0, 1, torch.device("cpu"))
    assert type(method).__name__ in str(caught.value)


def test_methods_that_count_gradients_look_at_the_modules_optimizer():
    class Adam(Small):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    model = Federation(KINDS["Scaffold"](), Adam)
    with pytest.raises(ConfigError, match=r"^model\.client\.optimizer: Scaffold needs torch\.optim\.SGD"):
        model.assemble(make_data(), 0, 1, torch.device("cpu"))


def test_methods_that_keep_necks_private_name_the_remedy():
    with pytest.raises(ConfigError, match=r"^model\.method\.share_neck: WeightedPav keeps the neck private"):
        Federation(WeightedPav(), Small).assemble(make_data(), 0, 1, torch.device("cpu"))
