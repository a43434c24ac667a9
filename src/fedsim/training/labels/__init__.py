"""Training without identities: clusters of features, proxies of what is in them, and losses on these."""

from fedsim.training.labels.bottom_up import merge_clusters
from fedsim.training.labels.losses import ProxyLoss
from fedsim.training.labels.proxies import Proxies, make_proxies, proxy_batches, update_memory
from fedsim.training.labels.pseudo_labels import find_clusters
from fedsim.training.labels.settings import BottomUp, Clustering, ClusterOverride

__all__ = [
    "BottomUp",
    "ClusterOverride",
    "Clustering",
    "Proxies",
    "ProxyLoss",
    "find_clusters",
    "make_proxies",
    "merge_clusters",
    "proxy_batches",
    "update_memory",
]
