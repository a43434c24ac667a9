"""Pure functions: tensors in, tensors out, one equation each."""

from fedsim.functional.encodings import bitmap_bytes, dense_bytes, index_bytes, sparse_bytes
from fedsim.functional.losses import batch_hard_triplet, smoothed_cross_entropy
from fedsim.functional.statistics import central_variance, second_moments
from fedsim.functional.weighting import normalise, size_weights, uniform_weights

__all__ = [
    "batch_hard_triplet",
    "bitmap_bytes",
    "central_variance",
    "dense_bytes",
    "index_bytes",
    "normalise",
    "second_moments",
    "size_weights",
    "smoothed_cross_entropy",
    "sparse_bytes",
    "uniform_weights",
]
