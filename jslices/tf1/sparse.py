"""Sparse tensors and gradients, as in ``tf.sparse``."""

from typing import NamedTuple

from jax.typing import ArrayLike

from jslices import accumulators
from jslices.tf1 import _ops

__all__ = ["SparseConditionalAccumulator", "SparseTensor", "mask"]
__dir__ = __all__.copy

SparseConditionalAccumulator = accumulators.SparseConditionalAccumulator
mask = _ops.sparse_mask


class SparseTensor(NamedTuple):
    """A sparse matrix of ids or weights, whose rows are bags.

    Only lookups take it, such as :func:`jslices.tf1.nn.embedding_lookup_sparse`.

    Attributes:
      indices: ``[K, 2]`` integers, the row and the column of each element.
      values: ``[K]``, the elements.
      dense_shape: ``(B, L)``, known before tracing.
    """

    indices: ArrayLike
    values: ArrayLike
    dense_shape: tuple[int, ...]
