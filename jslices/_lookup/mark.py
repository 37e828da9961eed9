"""The mark on a looked-up table: plain ``jax.grad`` of it warns of the dense gradient."""

import contextvars
from typing import Any

import jax
from jax.interpreters import ad, batching

from jslices._densify import UserLine, human_bytes, warn_at_line
from jslices._jax import identity_primitive
from jslices._place.hints import hinted

#: True where a dense gradient of a marked table is intended: no warning.
dense_is_intended = contextvars.ContextVar("jslices_dense_is_intended", default=False)


def mark_table(
    table: jax.Array, line: UserLine, caller: str, num_ids: int | None = None
) -> jax.Array:
    """``table`` unchanged, but marked: a dense gradient of it warns and names ``line``.

    Only plain ``jax.grad`` ever transposes the mark, and the warning says what that costs.
    Under :func:`jslices.grad` lookups are found first and the mark is stepped over. It is a
    primitive and not a ``custom_vjp``, so that ``jvp``, ``linearize`` and ``hessian`` go
    through it as through any indexing.
    """
    return mark_p.bind(table, line=line, caller=caller, num_ids=num_ids)


def _transpose(
    cotangent: Any, table: Any, *, line: UserLine, caller: str, num_ids: int | None
) -> tuple[Any]:
    if not isinstance(cotangent, ad.Zero) and not dense_is_intended.get():
        size = human_bytes(cotangent.size * cotangent.dtype.itemsize)
        few = "" if num_ids is None else f", although {num_ids} rows were looked up"
        warn_at_line(
            f"jax.grad gives the table {cotangent.dtype}{list(cotangent.shape)} of this "
            f"{caller} a dense gradient of {size}{few}; jslices.grad and "
            "jslices.value_and_grad give those rows only that are looked up",
            line,
        )
        hinted.add(("dense", cotangent.shape))
    return (cotangent,)


mark_p = identity_primitive("jslices_table")
ad.deflinear2(mark_p, _transpose)
batching.defvectorized(mark_p)
