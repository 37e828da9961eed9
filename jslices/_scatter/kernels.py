"""What a scatter does to rows, given normalized row numbers.

In every function ``ref`` is ``[V, *D]`` (several of its axes may number the rows),
``indices`` ``[K]`` in ``[0, V]``, where V drops, and ``rows`` ``[K, *D]`` of the dtype of
``ref``. The meaning is that of a loop over K, in order. All work in place when ``ref`` is
donated, and give the same on every backend (sums and products up to rounding).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jslices._rows import access
from jslices._rows.access import DROP, height_of, places_of, set_rows
from jslices._rows.sums import add_rows, sort_ids, starts_of_runs
from jslices._typing import Arrays

Kernel = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def update(ref: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """If several rows have one place, the last stays.

    XLA leaves open which of several writes wins, so all but the last are dropped first.
    Cost: a sort of K integers, one scatter.
    """
    if indices.shape[0]:
        ordered, positions = sort_ids(indices)
        last = jnp.where(_is_last(ordered), ordered, height_of(ref, rows))
        indices = jnp.zeros_like(indices).at[positions].set(last, unique_indices=True)
    return set_rows(ref, indices, rows)


def subtract(ref: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """Differences accumulate; unsigned integers wrap, as they do in a loop."""
    return add_rows(ref, indices, -rows)


@jax.custom_jvp
def multiply(ref: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """Products compound. Cost: one scatter; its derivative also sorts K integers."""
    return places_of(ref, indices, rows).multiply(rows, **DROP)


@multiply.defjvp
def _multiply_jvp(primals: Arrays, tangents: Arrays) -> tuple[jax.Array, jax.Array]:
    # JAX differentiates a scatter of products only if the indices are unique.
    _, tangent = jax.jvp(_multiply_by_products, primals, tangents)
    return multiply(*primals), tangent


def _multiply_by_products(ref: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    unique, products = _products(indices, rows, height_of(ref, rows))
    return set_rows(ref, unique, _ones_or_rows(ref, unique, rows) * products)


def divide(ref: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """Floats are divided once, by the product of their divisors; integers by each in turn.

    Products of 16-bit floats are computed in float32, whose range they hardly leave.
    Integers truncate towards zero at every division.
    """
    if jnp.issubdtype(ref.dtype, jnp.integer):
        return _divide_integers(ref, indices, rows)
    return _divide_floats(ref, indices, rows)


@jax.custom_jvp
def _divide_floats(ref: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    unique, products = _products(indices, wide, height_of(ref, rows))
    quotients = _ones_or_rows(ref, unique, rows) / products
    return set_rows(ref, unique, quotients.astype(ref.dtype))


@_divide_floats.defjvp
def _divide_jvp(primals: Arrays, tangents: Arrays) -> tuple[jax.Array, jax.Array]:
    # The rule does not change the derivative. But without it the rows of ref that are read
    # here would look like a lookup of the user's; ref is used whole.
    return jax.jvp(_divide_floats.fun, primals, tangents)


def minimum(ref: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """The smallest stays; a NaN wins, as in ``jnp.minimum``."""
    return places_of(ref, indices, rows).min(rows, **DROP)


def maximum(ref: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """The largest stays; a NaN wins, as in ``jnp.maximum``."""
    return places_of(ref, indices, rows).max(rows, **DROP)


KERNELS: dict[str, Kernel] = {
    "add": add_rows,
    "sub": subtract,
    "update": update,
    "mul": multiply,
    "div": divide,
    "min": minimum,
    "max": maximum,
}


def _ones_or_rows(ref: jax.Array, unique: jax.Array, rows: jax.Array) -> jax.Array:
    """The rows of ``ref`` that ``unique`` names, ones for V; ``rows`` are like them."""
    return access.take_rows(ref, unique, fill_value=1, row_axes=1 + ref.ndim - rows.ndim)


def _is_last(ordered: jax.Array) -> jax.Array:
    return jnp.concatenate([ordered[1:] != ordered[:-1], jnp.ones((1,), bool)])


def _products(
    indices: jax.Array, rows: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """The product of the rows of each index, where it occurs last in sorted order.

    Returns:
      ``(indices [K], products [K, *D])``, the indices unique except for V. This is a scan
      over segments, whose derivative is right where a factor is zero, too.
    """
    if indices.shape[0] == 0:
        return indices, rows
    ordered, positions = sort_ids(indices)

    def combine(left: Arrays, right: Arrays) -> Arrays:
        (left_starts, before), (right_starts, after) = left, right
        factor = access.where_rows(~right_starts, before, 1)
        return left_starts | right_starts, factor * after

    _, products = lax.associative_scan(combine, (starts_of_runs(ordered), rows[positions]))
    return jnp.where(_is_last(ordered), ordered, num_rows), products


def _divide_integers(ref: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    # Not one division by the product of the divisors, which may overflow. XLA defines
    # x / 0 as -1, all bits set; in TensorFlow it kills the process.
    num_rows, row_axes = height_of(ref, rows), 1 + ref.ndim - rows.ndim
    if num_rows == 0 or indices.shape[0] == 0:
        return ref
    size = (*(1,) * row_axes, *rows.shape[1:])

    def body(k: jax.Array, ref: jax.Array) -> jax.Array:
        index = indices[k]
        near = access.places(jnp.minimum(index, num_rows - 1), ref.shape, row_axes)
        start = (*near, *(jnp.zeros_like(index) for _ in rows.shape[1:]))
        row = lax.dynamic_slice(ref, start, size)
        row = jnp.where(index < num_rows, lax.div(row, rows[k].reshape(size)), row)
        return lax.dynamic_update_slice(ref, row, start)

    return lax.fori_loop(0, indices.shape[0], body, ref)
