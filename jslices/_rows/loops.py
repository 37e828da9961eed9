"""Gathered rows that XLA:CPU copies by vector instructions, whatever their length.

What makes it do so is a longer form of the same value. It stands behind a primitive that is
the identity: only its lowering for a CPU knows that form, every transformation may drop it,
and other platforms see nothing.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

#: Gathered rows of so many elements would be copied by a scalar loop (see ``row_loop``).
SCALAR = range(32, 80)


def row_loop(rows: jax.Array, ids: jax.Array) -> jax.Array:
    """``rows`` ``[..., *D]``, just gathered at ``ids`` ``[...]``, unchanged.

    LLVM unrolls the loop over a row completely while its elements times the instructions
    for each stay below about 300, and code that it has unrolled stays scalar (full
    unrolling runs before the loop vectorizer). A gather spends four instructions on an
    element, so rows of 32 to 79 elements, 64 among them, are copied one element at a time:
    65 ns for a row of 64 where a row of 80 takes 28 (jax 0.10.2 and 0.12). On a CPU such
    rows therefore get some more instructions, which change no value; the loop then remains
    a loop and is vectorized.
    """
    if math.prod(rows.shape[ids.ndim :]) in SCALAR and rows.size:
        return row_loop_p.bind(rows, ids)
    return rows


def _more_instructions(rows: jax.Array, ids: jax.Array) -> jax.Array:
    width = rows.dtype.itemsize * 8
    length = math.prod(rows.shape[ids.ndim :])
    if width not in (16, 32) or jnp.issubdtype(rows.dtype, jnp.complexfloating):
        return rows
    bits = np.dtype(f"int{width}")
    flat = lax.bitcast_convert_type(rows.reshape(-1, length), bits)
    # One of two neighbouring integers is even; no compiler sees that these are zeros.
    zero = ((ids * (ids + 1)) & 1).astype(bits).reshape(-1, 1)
    for i in range(max(1, math.ceil(320 / length) - 4)):
        flat = flat ^ zero if i % 2 == 0 else flat + zero
    flat = lax.bitcast_convert_type(flat, rows.dtype)
    # XLA repeats cheap operations in each of their users, which would take these away from
    # the gather above. It does not repeat a gather, so a second one ends the loop.
    here = jnp.arange(flat.shape[0], dtype=jnp.int32)
    return flat.at[here].get(mode="promise_in_bounds").reshape(rows.shape)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return row_loop_p.bind(*primals), tangents[0]


row_loop_p = Primitive("row_loop")
row_loop_p.def_impl(lambda rows, ids: rows)
row_loop_p.def_abstract_eval(lambda rows, ids: rows)
ad.primitive_jvps[row_loop_p] = _jvp
batching.primitive_batchers[row_loop_p] = lambda args, dims: (args[0], dims[0])
mlir.register_lowering(row_loop_p, lambda _, rows, ids: [rows])
_on_cpu = mlir.lower_fun(_more_instructions, multiple_results=False)
mlir.register_lowering(row_loop_p, _on_cpu, platform="cpu")
