"""Rules for the hooks, arguments, weights and results of a user's module; each refusal is one line."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from fedsim.core.errors import ConfigError

_NEEDS_A_LOOP = {
    "backward": "fedsim computes gradients itself",
    "optimizer_zero_grad": "fedsim clears gradients itself",
    "train_dataloader": "images come from the section data",
    "transfer_batch_to_device": "batches are on the device already",
    "configure_callbacks": "callbacks belong to the whole run: trainer.callbacks",
    "on_save_checkpoint": "checkpoints hold tensors of the module only: register a buffer",
    "on_load_checkpoint": "checkpoints hold tensors of the module only: register a buffer",
}
"""hooks of Lightning that a client has no use for -> the reason, or the replacement"""


def named(module: LightningModule) -> str:
    """Return the beginning of an error line about a module."""
    return f"model.module: {type(module).__name__}"


def has_own(module: LightningModule, hook: str) -> bool:
    """Return whether a module's class overrides a hook of Lightning."""
    defined = getattr(type(module), hook, None)
    return defined is not None and defined is not getattr(LightningModule, hook, None)


def check_module(module: LightningModule) -> None:
    """Raise ConfigError unless a module has what a client needs and nothing that needs a Trainer's loop."""
    if not module.automatic_optimization:
        raise ConfigError(
            f"{named(module)} optimizes manually, but a client's steps are the method's; "
            "leave automatic_optimization on and return the loss"
        )
    for hook in ("training_step", "configure_optimizers"):
        if not has_own(module, hook):
            raise ConfigError(f"{named(module)} has no {hook}; define it")
    if not callable(getattr(module, "embed", None)) and not has_own(module, "forward"):
        raise ConfigError(f"{named(module)} gives no features; define embed(images), or forward(images)")
    for hook, reason in _NEEDS_A_LOOP.items():
        if has_own(module, hook):
            raise ConfigError(f"{named(module)} defines {hook}, which is never called: {reason}; leave it out")
    _check_arguments(module)
    _check_weights(module)


def _check_arguments(module: LightningModule) -> None:
    """Refuse a ``training_step`` that takes more than a batch and its number."""
    arguments = list(inspect.signature(module.training_step).parameters.values())
    required = [p for p in arguments if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    if len(required) > 2 or "dataloader_iter" in {p.name for p in arguments}:
        names = ", ".join(p.name for p in arguments)
        raise ConfigError(f"{named(module)}: training_step({names}) is called with batch and batch_idx; take these")


def _check_weights(module: LightningModule) -> None:
    """Refuse parameters that a flat buffer cannot hold."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"{named(module)}: {name} has no shape yet; use no lazy layers")
        if parameter.dtype is not torch.float32:
            raise ConfigError(f"{named(module)}: {name} is {parameter.dtype}; keep float32 weights (see bf16-mixed)")


def takes_batch_number(module: LightningModule) -> bool:
    """Return whether ``training_step`` takes ``batch_idx``."""
    parameters = inspect.signature(module.training_step).parameters.values()
    return len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def begin_batch(module: LightningModule, batch: Any, number: int) -> Any:
    """Call the hooks before a training step; return the batch that they make of ``batch``."""
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        batch = getattr(module, hook)(batch, 0)
    if module.on_train_batch_start(batch, number) == -1:
        raise ConfigError(
            f"{named(module)}: on_train_batch_start returned -1, but batches are the method's; return None"
        )
    return batch


def end_batch(module: LightningModule, returned: Any, batch: Any, number: int) -> None:
    """Call the hook after a training step, which ``returned`` something."""
    outputs = returned if isinstance(returned, dict) else {"loss": returned}
    outputs = {name: value.detach() if isinstance(value, Tensor) else value for name, value in outputs.items()}
    module.on_train_batch_end(outputs, batch, number)


def loss_of(module: LightningModule, returned: Any) -> Tensor:
    """Return the loss (scalar) that ``training_step`` returned: a tensor, or a dict with one."""
    loss = returned.get("loss") if isinstance(returned, dict) else returned
    if loss is None:
        has = "None" if returned is None else f"a dict without loss ({', '.join(map(str, returned))})"
        raise ConfigError(
            f"{named(module)}: training_step returned {has}; return a loss for every batch, such as "
            "0 * features.sum() where there is nothing to learn"
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1 or (torch.is_grad_enabled() and not loss.requires_grad):
        problem = "no tensor" if not isinstance(loss, Tensor) else f"of shape {list(loss.shape)}"
        problem = "without gradient" if isinstance(loss, Tensor) and loss.numel() == 1 else problem
        raise ConfigError(f"{named(module)}: the loss of training_step is {problem}; return a scalar with gradient")
    return loss.reshape(())


def features_of(module: LightningModule, images: Tensor) -> Tensor:
    """Return the features [B, D] of images [B, 3, H, W], by ``embed``, or by ``forward`` where there is none."""
    hook = "embed" if callable(getattr(module, "embed", None)) else "forward"
    features = getattr(module, hook)(images)
    # by shapes: len() is a plain number, and an export that meets one serves that number of images alone
    if not isinstance(features, Tensor) or features.dim() != 2 or features.shape[0] != images.shape[0]:
        problem = f"shape {list(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(
            f"{named(module)}: {hook} returned {problem} for {len(images)} images; return features [B, D]"
            + ("" if hook == "embed" else ", or define embed(images) that does")
        )
    return features
