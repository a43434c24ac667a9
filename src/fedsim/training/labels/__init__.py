"""Training without identities: clusters of features, proxies of what is in them, and losses on these."""

from fedsim.training.labels.settings import BottomUp, Clustering, ClusterOverride

__all__ = ["BottomUp", "ClusterOverride", "Clustering"]
