"""Gathered rows that XLA copies by vector instructions on a CPU, and only once on a GPU.

What makes it do so stands behind primitives that are the identity: only the lowering for
one platform knows more, every transformation may drop them, and other platforms see
nothing.
"""

import functools
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


def gathered_once(rows: jax.Array) -> jax.Array:
    """``rows``, just gathered from a table, unchanged.

    XLA:GPU repeats a gather in each kernel that reads its rows. If one of these runs after
    the table is written, the gradient of a dense layer say, the whole table is copied first
    (jax 0.12). On a GPU the rows are therefore kept from then on.
    """
    return gathered_once_p.bind(rows)


def _jvp(
    primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    return primitive.bind(*primals), tangents[0]


row_loop_p = Primitive("row_loop")
row_loop_p.def_impl(lambda rows, ids: rows)
row_loop_p.def_abstract_eval(lambda rows, ids: rows)
ad.primitive_jvps[row_loop_p] = functools.partial(_jvp, row_loop_p)
batching.primitive_batchers[row_loop_p] = lambda args, dims: (args[0], dims[0])
mlir.register_lowering(row_loop_p, lambda _, rows, ids: [rows])
_on_cpu = mlir.lower_fun(_more_instructions, multiple_results=False)
mlir.register_lowering(row_loop_p, _on_cpu, platform="cpu")

gathered_once_p = Primitive("gathered_once")
gathered_once_p.def_impl(lambda rows: rows)
gathered_once_p.def_abstract_eval(lambda rows: rows)
ad.primitive_jvps[gathered_once_p] = functools.partial(_jvp, gathered_once_p)
batching.defvectorized(gathered_once_p)
mlir.register_lowering(gathered_once_p, lambda _, rows: [rows])
_on_gpu = mlir.lower_fun(lax.optimization_barrier, multiple_results=False)
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(gathered_once_p, _on_gpu, platform=_platform)
