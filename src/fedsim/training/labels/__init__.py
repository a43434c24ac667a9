"""Training without identities: clusters of features, their proxies, and losses on proxies."""

from fedsim.training.labels.settings import BottomUp, Clustering, ClusterOverride

__all__ = ["BottomUp", "ClusterOverride", "Clustering"]
