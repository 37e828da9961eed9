"""Sorting row numbers and remembering where each one stood, fast on every platform.

XLA:CPU sorts one 64-bit operand about five times faster than two 32-bit ones, so there
the row number and its position are packed into one integer. 64-bit integers are
switched off in most programs, hence a primitive: the packing exists only in its CPU
lowering, and no other transformation ever meets a 64-bit value. Everywhere else the
ordinary two-operand sort is used (on a GPU it is a radix sort already).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

sort_ids_p = Primitive("sort_ids")
sort_ids_p.multiple_results = True


@jax.jit
def sort_ids(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sorts non-negative ``ids`` along the last axis.

    Args:
      ids: ``[..., K]`` int32 or int64, none negative.

    Returns:
      ``(sorted, positions)``, both ``[..., K]``: ``sorted[k] == ids[positions[k]]``,
      equal ids in their original order; positions are int32. Cost: O(K log K).
    """
    ordered, positions = sort_ids_p.bind(ids)
    return ordered, positions


def _two_operands(ids: jax.Array) -> Sequence[jax.Array]:
    positions = lax.broadcasted_iota(jnp.int32, ids.shape, ids.ndim - 1)
    return lax.sort((ids, positions), dimension=ids.ndim - 1, num_keys=1)


def _packed(ids: jax.Array) -> Sequence[jax.Array]:
    if ids.dtype != jnp.int32:
        return _two_operands(ids)
    with jax.enable_x64(True):
        positions = lax.broadcasted_iota(jnp.int64, ids.shape, ids.ndim - 1)
        keys = lax.sort((ids.astype(jnp.int64) << 32) | positions)
        low = (keys & 0xFFFFFFFF).astype(jnp.int32)
        return [(keys >> 32).astype(jnp.int32), low]


def _abstract(ids: jax.core.ShapedArray) -> Sequence[jax.core.ShapedArray]:
    return [ids.update(weak_type=False), ids.update(dtype=np.int32, weak_type=False)]


def _batch(
    args: Sequence[jax.Array], dims: Sequence[int]
) -> tuple[Sequence[jax.Array], Sequence[int]]:
    (ids,), (dim,) = args, dims
    return sort_ids_p.bind(jnp.moveaxis(ids, dim, 0)), (0, 0)


sort_ids_p.def_abstract_eval(_abstract)
sort_ids_p.def_impl(_two_operands)
batching.primitive_batchers[sort_ids_p] = _batch
mlir.register_lowering(sort_ids_p, mlir.lower_fun(_two_operands))
mlir.register_lowering(sort_ids_p, mlir.lower_fun(_packed), platform="cpu")
