"""Training without identities: clusters of features, proxies of what is in them, and losses on these."""

from fedsim.clustering.bottom_up import merge_clusters
from fedsim.clustering.losses import ProxyLoss
from fedsim.clustering.proxies import Proxies, make_proxies, proxy_batches, update_memory
from fedsim.clustering.pseudo_labels import find_clusters
from fedsim.clustering.settings import BottomUp, Clustering, ClusterOverride

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
