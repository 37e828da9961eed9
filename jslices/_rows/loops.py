"""Gathers of rows that XLA:CPU copies with vector instructions, whatever their length.

LLVM unrolls the loop over a row completely while its elements times the instructions for
each stay below about 300, and what it has unrolled it leaves scalar. A gather spends four
instructions on an element, so rows of 32 to 79 elements, 64 among them, are copied one
element at a time: 65 ns for a row of 64 where a row of 80 takes 28 (jax 0.10.2 and 0.12).
So on a CPU the loop is given some instructions more, which change nothing; the loop then
stays a loop and becomes vector code. (Full unrolling runs before the loop vectorizer.)
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jslices._rows.identity import identity, zero_from

#: Rows of so many elements are copied by a scalar loop if nothing is done.
SCALAR = range(32, 80)


def row_loop(rows: jax.Array, ids: jax.Array) -> jax.Array:
    """``rows`` ``[..., *D]`` as they are, just gathered at ``ids`` ``[...]``."""
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
    zero = zero_from(ids).astype(bits).reshape(-1, 1)
    for i in range(max(1, math.ceil(320 / length) - 4)):
        flat = flat ^ zero if i % 2 == 0 else flat + zero
    flat = lax.bitcast_convert_type(flat, rows.dtype)
    # XLA repeats cheap operations in each of their uses, and would take these away from
    # the gather above. A second gather ends the loop: those it does not repeat.
    here = jnp.arange(flat.shape[0], dtype=jnp.int32)
    return flat.at[here].get(mode="promise_in_bounds").reshape(rows.shape)


row_loop_p = identity("row_loop", _more_instructions)
