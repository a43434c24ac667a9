"""Bytes of n float32 elements, nnz of them not zero, in the encodings that pruning papers count.

The figures of paper 004 count ``bitmap``. It is smaller than ``dense`` below a density of 31/32, and smaller than
``index`` above 1/32.
"""

from __future__ import annotations

from typing import Literal

Encoding = Literal["dense", "bitmap", "index", "min"]

_VALUE = 4  # bytes of a float32


def dense_bytes(num_elements: int) -> int:
    """Return the bytes of all elements, zeros included: ``4 n``.

    >>> dense_bytes(64)
    256
    """
    _check(num_elements, 0)
    return _VALUE * num_elements


def bitmap_bytes(num_elements: int, num_nonzero: int) -> int:
    """Return the bytes of one bit per element (in whole bytes) and the values that are not zero: ``n / 8 + 4 nnz``.

    >>> bitmap_bytes(64, num_nonzero=3)
    20
    """
    _check(num_elements, num_nonzero)
    return -(-num_elements // 8) + _VALUE * num_nonzero


def index_bytes(num_elements: int, num_nonzero: int) -> int:
    """Return the bytes of the values that are not zero, and their 32-bit positions: ``(4 + 4) nnz``.

    >>> index_bytes(64, num_nonzero=3)
    24
    """
    _check(num_elements, num_nonzero)
    return (4 + _VALUE) * num_nonzero


def sparse_bytes(num_elements: int, num_nonzero: int, encoding: Encoding, has_mask: bool = False) -> int:
    """Return the bytes of a payload in an encoding; ``min`` is the shortest of the three others.

    ``has_mask``: the receiver already has the mask; only values are counted, ``4 nnz``, except with ``dense``.

    >>> [sparse_bytes(64, 3, encoding) for encoding in ("dense", "bitmap", "index", "min")]
    [256, 20, 24, 20]
    >>> sparse_bytes(64, 3, "min", has_mask=True)
    12
    """
    dense = dense_bytes(num_elements)
    if encoding == "dense":
        return dense
    lengths = {"bitmap": bitmap_bytes(num_elements, num_nonzero), "index": index_bytes(num_elements, num_nonzero)}
    if has_mask:
        return dense_bytes(num_nonzero)
    return min(dense, *lengths.values()) if encoding == "min" else lengths[encoding]


def _check(num_elements: int, num_nonzero: int) -> None:
    if not 0 <= num_nonzero <= num_elements:
        raise ValueError(f"num_nonzero: {num_nonzero} is not between 0 and num_elements ({num_elements})")
