"""Labels of clients without identities: clusters of features, and the settings of the clustering."""

from fedsim.training.labels.settings import BottomUp, Clustering, ClusterOverride

__all__ = ["BottomUp", "ClusterOverride", "Clustering"]
