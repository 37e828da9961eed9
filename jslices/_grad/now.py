"""Tables as they are now, after the steps that their rows missed: a row-wise primitive.

What missed steps do to a row depends on the row, on what is kept with it and on what all
rows share. So ``now(table)[ids] == now(table[ids])``, and reads of rows go through it as
through any row-wise function. Its derivative is that of the identity: a gradient is one by
the rows as they are now. Only a derivative through steps, by which their state changes too,
is that of what missed steps do.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jslices._place.boundary import like_first, on_any_mesh
from jslices._rows import access
from jslices._typing import PyTree

now_p = Primitive("now")


class Missed(NamedTuple):
    """What missed steps do, each of ``(p, rows, shared)``.

    Attributes:
      rows: of some rows of the table, and the same rows of what is kept with it.
      whole: of the whole table; None where a caller sees to it that there are none.
    """

    rows: Callable[[Any, PyTree, PyTree], Any]
    whole: Callable[[Any, PyTree, PyTree], Any] | None


def as_now(missed: Missed, p: jax.Array, rows: PyTree, shared: PyTree) -> jax.Array:
    """``p`` ``[V, *D]`` after missed steps, with the derivative of ``p``.

    ``rows`` is a tree of arrays with rows for those of ``p``, ``shared`` one of others.
    """
    operands, tree = jax.tree.flatten((rows, shared))
    how = {"missed": missed, "tree": tree, "count": len(jax.tree.leaves(rows))}
    return now_p.bind(jnp.asarray(p), *map(jnp.asarray, operands), **how, whole=True)  # type: ignore[no-any-return]


@on_any_mesh(like_first)
def _missed(
    p: Any, *operands: Any, missed: Missed, tree: Any, count: int, whole: bool
) -> Any:
    rows, shared = tree.unflatten(operands)
    if whole:
        return p if missed.whole is None else missed.whole(p, rows, shared)
    return missed.rows(p, rows, shared)


def _compute(p: Any, *operands: Any, count: int, whole: bool, **params: Any) -> Any:
    if p.shape[:1] == (1,) and not whole:
        # Slices, which XLA reads anew wherever they are used.
        p, *rows = access.at_once([p, *operands[:count]])
        operands = *rows, *operands[count:]
    now = _missed(p, *operands, count=count, whole=whole, **params)
    # Kept, or XLA computes them again where they are read, from state written since.
    return now if whole else lax.optimization_barrier(now)


now_p.def_impl(jax.jit(_compute, static_argnames=("missed", "tree", "count", "whole")))
now_p.def_abstract_eval(lambda p, *operands, **params: p)
mlir.register_lowering(now_p, mlir.lower_fun(_compute, multiple_results=False))


def _jvp(primals: Any, tangents: Any, *, missed: Missed, **params: Any) -> Any:
    """The identity's for a gradient at these; in one through steps, their derivative."""
    alone = all(type(x) is ad.Zero for x in tangents[1:])
    if alone and missed.whole is not None:
        return now_p.bind(*primals, missed=missed, **params), tangents[0]
    of_rows = functools.partial(_missed, missed=missed, **params)
    _, tangent = jax.jvp(of_rows, primals, tuple(map(ad.instantiate_zeros, tangents)))
    return now_p.bind(*primals, missed=missed, **params), tangent


ad.primitive_jvps[now_p] = _jvp


def _batched(args: Any, axes: Any, **params: Any) -> Any:
    return jax.vmap(functools.partial(_compute, **params), in_axes=axes)(*args), 0


batching.primitive_batchers[now_p] = _batched
