"""A mark on a table that is about to be looked up, to notice a dense gradient of it.

The mark is the identity. Only plain ``jax.grad`` ever transposes it, and then says what it
costs: under :func:`jslices.grad` the lookups are found first and the mark is stepped over.
It is a primitive, and not a ``custom_vjp``, so that ``jvp``, ``linearize`` and ``hessian``
go through it as through any indexing.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jslices._densify import UserLine, human_bytes, warn_dense

mark_p = Primitive("jslices_table")

_quiet = contextvars.ContextVar("jslices_quiet", default=False)


def mark_table(table: jax.Array, num_ids: int, line: UserLine) -> jax.Array:
    """``table`` itself; its dense gradient will be warned of, naming ``line``."""
    return mark_p.bind(table, num_ids=num_ids, line=line)


@contextlib.contextmanager
def without_dense_warning() -> Iterator[None]:
    """Inside, a dense gradient of a marked table is somebody's decision."""
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


mark_p.def_impl(lambda table, **_: table)
mark_p.def_abstract_eval(lambda table, **_: table)
ad.deflinear2(mark_p, _transpose)
batching.defvectorized(mark_p)
mlir.register_lowering(mark_p, lambda _, table, **params: [table])
