"""fedsim: federated person re-identification on PyTorch Lightning and torch.distributed.

Nothing heavy is imported here: ``fedsim --help`` must not wait for torch.
"""

from fedsim._version import __version__

__all__ = ["__version__"]
