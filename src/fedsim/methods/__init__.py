"""Federated methods: one file each, nothing but hooks."""

from fedsim.methods.fedavg import FedAvg
from fedsim.methods.fedpav import FedPav
from fedsim.methods.local import Local

__all__ = ["FedAvg", "FedPav", "Local"]
