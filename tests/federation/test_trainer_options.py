"""Every argument of Lightning's Trainer, and every callback of Lightning, works or is refused in one true line."""

import inspect

import lightning.pytorch
import pytest
import torch
from lightning import LightningModule
from lightning.pytorch import callbacks

import fedsim
from fedsim.core.errors import ConfigError
from fedsim.methods import FedAvg
from small import make_data, make_model

REFUSED = {
    "gradient_clip_val": (1.0, "model.client.grad_clip"), "accumulate_grad_batches": (2, "model.client.accumulate"),
    "overfit_batches": (1, "data.limit_client_batches"), "val_check_interval": (0.5, "check_val_every_n_epoch"),
    "sync_batchnorm": (True, "model.bn_stats"), "strategy": ("ddp", "leave it out"),
    "barebones": (True, "leave it out"),
    "reload_dataloaders_every_n_epochs": (1, "leave it out"), "precision": ("64-true", "32-true or bf16-mixed"),
}  # fmt: skip
"""argument -> a value that is refused, and a word of the line"""
WORKS = {
    "accelerator": "cpu", "devices": 1, "num_nodes": 1, "logger": False, "callbacks": [], "fast_dev_run": False,
    "max_epochs": 1, "min_epochs": 1, "max_steps": -1, "min_steps": 1, "max_time": "00:01:00:00",
    "limit_train_batches": 2, "limit_val_batches": 0, "limit_test_batches": 1.0, "limit_predict_batches": 1.0,
    "check_val_every_n_epoch": 1, "num_sanity_val_steps": 0, "log_every_n_steps": 1, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False, "deterministic": False, "benchmark": False,
    "inference_mode": True, "use_distributed_sampler": False, "profiler": "simple", "detect_anomaly": False,
    "plugins": None, "default_root_dir": None, "enable_autolog_hparams": False, "model_registry": None,
    "gradient_clip_algorithm": None,
}  # fmt: skip
"""argument -> a value with which a federation trains; also those that only belong to others"""


def try_fit(**options):
    defaults = {"accelerator": "cpu", "max_epochs": 1, "limit_val_batches": 0, "enable_progress_bar": False}
    trainer = fedsim.Trainer(**defaults | options)
    batches = None if "limit_train_batches" in options else 1
    trainer.fit(make_model(FedAvg(share_head=False)), datamodule=make_data(limit_client_batches=batches))
    return trainer


def test_every_argument_of_lightning_is_in_one_of_the_tables():
    arguments = {*inspect.signature(lightning.pytorch.Trainer.__init__).parameters} - {"self"}
    assert arguments == {*WORKS} | {*REFUSED}
    assert not {*WORKS} & {*REFUSED}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_of_another_meaning_is_refused_in_one_line(name):
    value, remedy = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        try_fit(**{name: value})
    assert str(caught.value).startswith(f"trainer.{name}: "), str(caught.value)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_value_of_another_type_is_refused_for_each_argument():
    class Foreign:
        pass

    for name in WORKS:
        with pytest.raises(ConfigError) as caught:
            fedsim.Trainer(**{name: Foreign()})
        assert str(caught.value).startswith(f"trainer.{name}: expected "), str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("max_epochs", 1.5), ("callbacks", [3]), ("logger", "csv"), ("precision", "f")]
)
def test_a_value_that_is_nearly_right_is_refused(name, value):
    with pytest.raises(ConfigError, match=rf"^trainer\.{name}: "):
        fedsim.Trainer(**{name: value})


def test_one_batch_and_two_limits_are_refused():
    with pytest.raises(ConfigError, match=r"^trainer\.limit_train_batches: 1 .*set data\.limit_client_batches to 1"):
        fedsim.Trainer(limit_train_batches=1)
    trainer = fedsim.Trainer(accelerator="cpu", limit_train_batches=2, enable_progress_bar=False)
    with pytest.raises(ConfigError, match=r"^data\.limit_client_batches: trainer\.limit_train_batches is 2"):
        trainer.fit(make_model(FedAvg(share_head=False)), datamodule=make_data(limit_client_batches=1))


def test_all_other_arguments_work():
    assert try_fit(**WORKS).current_epoch == 1
    assert try_fit(strategy="auto").current_epoch == 1


SOUND = {
    "Callback": {}, "DeviceStatsMonitor": {}, "EarlyStopping": {"monitor": "train/loss"}, "LambdaCallback": {},
    "LearningRateMonitor": {}, "ModelCheckpoint": {}, "ModelSummary": {}, "RichModelSummary": {}, "Timer": {},
    "TQDMProgressBar": {}, "RichProgressBar": {}, "ProgressBar": {}, "Checkpoint": {}, "PredictionWriter": None,
    "BasePredictionWriter": None, "ThroughputMonitor": None,
}  # fmt: skip
"""callback -> its arguments; None: it needs a class of the user's, or a function of single batches"""
OF_A_STEP = {
    "BackboneFinetuning": {}, "BaseFinetuning": {}, "BatchSizeFinder": {},
    "GradientAccumulationScheduler": {"scheduling": {0: 2}}, "LearningRateFinder": {},
    "ModelPruning": {"pruning_fn": "l1_unstructured"}, "OnExceptionCheckpoint": {"dirpath": "unused"},
    "StochasticWeightAveraging": {"swa_lrs": 0.1}, "WeightAveraging": {}, "EMAWeightAveraging": {},
    "SpikeDetection": {},
}  # fmt: skip
"""callbacks that act on an optimizer's step, or save half a round -> their arguments"""


def test_every_callback_of_lightning_is_in_one_of_the_tables():
    kinds = {name for name in callbacks.__all__ if inspect.isclass(getattr(callbacks, name))}
    assert kinds <= {*SOUND} | {*OF_A_STEP}, kinds - {*SOUND} - {*OF_A_STEP}


@pytest.mark.parametrize("name", [name for name in OF_A_STEP if hasattr(callbacks, name)])
def test_a_callback_of_a_step_is_refused_in_one_line(name):
    with pytest.raises(ConfigError, match=rf"^trainer\.callbacks: {name}[^\n]*$"):
        try_fit(callbacks=[getattr(callbacks, name)(**OF_A_STEP[name])], enable_checkpointing=True)


def test_what_is_no_federation_is_refused_in_one_line():
    class Plain(LightningModule):
        pass

    with pytest.raises(ConfigError, match=r"^model: fedsim\.Trainer trains a Federation, and this is Plain; give"):
        fedsim.Trainer(accelerator="cpu").fit(Plain())
    loader = torch.utils.data.DataLoader([1])
    with pytest.raises(ConfigError, match=r"^data: .*give datamodule=FederatedDataModule"):
        fedsim.Trainer(accelerator="cpu").fit(make_model(FedAvg()), loader)
