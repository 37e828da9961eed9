"""What the gradient of a lookup becomes: rows under :func:`jslices.grad`, else dense.

JAX insists that the cotangent of an array has the shape of the array, so a table cannot get
slices. ``lookup_rows`` therefore takes one more argument, a *cotangent slot*: an
IndexedSlices of zeros that is never read. Its cotangent is the row gradient, and the table
gets none. ``mark_table`` notices when the gradient of a table becomes dense instead.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jslices._densify import UserLine, human_bytes, warn_dense
from jslices._rows.bounds import take_rows
from jslices._rows.loops import gathered_once
from jslices._slices import IndexedSlices


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def lookup_rows(
    table: jax.Array, ids: jax.Array, slot: IndexedSlices, mode: Any, fill_value: Any
) -> jax.Array:
    """Rows ``[n, *D]`` of ``table`` ``[V, *D]`` at ``ids`` ``[n]``.

    The gradient goes to the cotangent slot: IndexedSlices with ``values`` ``[n, *D]`` and
    ``indices`` None. Integers have no cotangent, so the ids are returned separately.
    """
    del slot
    return gathered_once(take_rows(table, ids, mode=mode, fill_value=fill_value))


def _forward(
    table: jax.Array, ids: jax.Array, slot: IndexedSlices, mode: Any, fill_value: Any
) -> tuple[jax.Array, IndexedSlices]:
    rows = lookup_rows.fun(table, ids, slot, mode, fill_value)
    shape_only = IndexedSlices.tree_unflatten(slot.dense_shape, (None, None))
    return rows, shape_only


def _backward(
    mode: Any, fill_value: Any, shape_only: IndexedSlices, rows: jax.Array
) -> tuple[None, None, IndexedSlices]:
    del mode, fill_value
    slices = IndexedSlices.tree_unflatten(shape_only.dense_shape, (rows, None))
    return None, None, slices


lookup_rows.defvjp(_forward, _backward)


_quiet = contextvars.ContextVar("jslices_quiet", default=False)


def mark_table(table: jax.Array, num_ids: int, line: UserLine) -> jax.Array:
    """``table`` unchanged, but marked: a dense gradient of it warns and names ``line``.

    Only plain ``jax.grad`` ever transposes the mark, and the warning says what that costs.
    Under :func:`jslices.grad` lookups are found first and the mark is stepped over. It is a
    primitive and not a ``custom_vjp``, so that ``jvp``, ``linearize`` and ``hessian`` go
    through it as through any indexing.
    """
    return mark_p.bind(table, num_ids=num_ids, line=line)


@contextlib.contextmanager
def without_dense_warning() -> Iterator[None]:
    """Within this context a dense gradient of a marked table is intended: no warning."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def _transpose(cotangent: Any, table: Any, *, num_ids: int, line: UserLine) -> tuple[Any]:
    if not isinstance(cotangent, ad.Zero) and not _quiet.get():
        size = human_bytes(cotangent.size * cotangent.dtype.itemsize)
        warn_dense(
            f"jax.grad gives the table {cotangent.dtype}{list(cotangent.shape)} of this "
            f"embedding_lookup a dense gradient of {size}, although {num_ids} rows were "
            "looked up; jslices.grad and jslices.value_and_grad give those rows only",
            line,
        )
    return (cotangent,)


mark_p = Primitive("jslices_table")
mark_p.def_impl(lambda table, **_: table)
mark_p.def_abstract_eval(lambda table, **_: table)
ad.deflinear2(mark_p, _transpose)
batching.defvectorized(mark_p)
mlir.register_lowering(mark_p, lambda _, table, **params: [table])
