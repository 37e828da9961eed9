"""Sparse tensors and gradients, as in ``tf.sparse``."""

from typing import NamedTuple

from jax.typing import ArrayLike

from jslices.accumulators import (
    SparseConditionalAccumulator as SparseConditionalAccumulator,
)
from jslices.tf1._ops import sparse_mask as mask

__all__ = ["SparseConditionalAccumulator", "SparseTensor", "mask"]


class SparseTensor(NamedTuple):
    """A sparse matrix of ids or weights.

    For :func:`jslices.tf1.nn.embedding_lookup_sparse`, where each row is a bag.

    Attributes:
      indices: ``[K, 2]`` integers, the row and the column of each element.
      values: ``[K]``, the elements.
      dense_shape: ``(B, L)``, known before tracing.

    Example:
      >>> import jax.numpy as jnp, jslices.tf1 as tf
      >>> ids = tf.SparseTensor([[0, 0], [0, 1], [2, 0]], [1, 3, 2], (3, 2))
      >>> tf.nn.embedding_lookup_sparse(jnp.arange(4.0), ids, None, combiner="sum")
      Array([4., 0., 2.], dtype=float32)

    Source: ``tf.SparseTensor``, which other operations use as well.
    """

    indices: ArrayLike
    values: ArrayLike
    dense_shape: tuple[int, ...]
