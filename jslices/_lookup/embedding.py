"""``embedding_lookup``: the lookup that people write."""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jslices._bounds import add_rows, take_rows
from jslices._densify import UserLine, current_user_line, human_bytes, warn_dense
from jslices._slices import IndexedSlices

#: The name under which the lookup stands in a traced program, so that it is recognised
#: there (and in a profile).
LOOKUP_NAME = "jslices_embedding_lookup"
MODES = ("fill", "clip", "promise_in_bounds")

_quiet = contextvars.ContextVar("jslices_quiet", default=False)


def embedding_lookup(params: jax.Array, ids: ArrayLike, *, mode: str = "fill") -> jax.Array:
    """The rows of a table with the given row numbers.

    Under :func:`jslices.grad` and its relatives the gradient of ``params`` is an
    IndexedSlices. Plain ``table[ids]`` and ``jnp.take(table, ids, axis=0)`` do the same
    there; what this adds is one meaning for every bad id.

    Args:
      params: ``[V, *D]``, the table.
      ids: ``[*B]`` of any integer dtype and any rank.
      mode: what an id outside ``[0, V)`` reads; a negative id never wraps round.
        ``"fill"``: NaN (the smallest integer in an integer table), so that it is seen,
        and no gradient. ``"clip"``: the nearest row, which gets the gradient as well.
        ``"promise_in_bounds"``: undefined, for ids known to be right.

    Returns:
      ``[*B, *D]`` of the dtype of ``params``. Duplicate ids read the same row, and their
      gradients add up.

    Raises:
      TypeError: if ``ids`` are not integers or ``params`` is not one array.
      ValueError: for an unknown ``mode`` or a table without rows' axis.

    Cost: reads ``K * D`` elements, K the number of ids. Under plain ``jax.grad`` the
    gradient is the ordinary dense ``[V, *D]``, with a :class:`DensificationWarning`.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> table = jnp.arange(6.0).reshape(3, 2)
      >>> js.embedding_lookup(table, [2, 0, -1])
      Array([[ 4.,  5.],
             [ 0.,  1.],
             [nan, nan]], dtype=float32)
      >>> js.grad(lambda t: js.embedding_lookup(t, [2, 0, 2]).sum())(table).indices
      Array([2, 0, 2], dtype=int32)

    Source: ``tf.nn.embedding_lookup``, where a bad id is an error on the CPU and reads
    zeros on a GPU.
    """
    if isinstance(params, list | tuple):
        raise TypeError(
            f"embedding_lookup wants one table, got a {type(params).__name__} of "
            f"{len(params)}; join the shards first: jnp.concatenate(params)"
        )
    table, ids = jnp.asarray(params), jnp.asarray(ids)
    if table.ndim < 1:
        raise ValueError("embedding_lookup wants a table [V, *D], got a scalar")
    if ids.size == 0 and not jnp.issubdtype(ids.dtype, jnp.integer):
        ids = ids.astype(jnp.int32)  # jnp.asarray([]) is float32
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(
            f"embedding_lookup wants integer ids, got {ids.dtype}{list(ids.shape)}; "
            "cast them: ids.astype('int32')"
        )
    if mode not in MODES:
        raise ValueError(f"embedding_lookup got mode={mode!r}; it must be one of {MODES}")
    return _lookup(table, ids, mode, current_user_line())


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table: jax.Array, ids: jax.Array, mode: str, line: UserLine) -> jax.Array:
    return _named_lookup(table, ids, mode)


def _read(table: jax.Array, ids: jax.Array, mode: str) -> jax.Array:
    return take_rows(table, ids, mode=mode)


_read.__name__ = _read.__qualname__ = LOOKUP_NAME
_named_lookup = jax.jit(_read, static_argnums=2)


def _forward(table: jax.Array, ids: jax.Array, mode: str, line: UserLine) -> Any:
    # The table's shape travels as the static part of an empty pytree.
    shape_only = IndexedSlices.tree_unflatten(table.shape, (None, None))
    return _named_lookup(table, ids, mode), (ids, shape_only)


def _backward(mode: str, line: UserLine, residuals: Any, rows: jax.Array) -> Any:
    ids, shape_only = residuals
    shape = shape_only.dense_shape
    if not _quiet.get():
        dense = human_bytes(shape[0] * rows.nbytes / max(ids.size, 1))
        warn_dense(
            f"jax.grad gives the table of shape {shape} of this embedding_lookup a "
            f"dense gradient of {dense}, although {ids.size} rows were looked up; "
            "jslices.grad and jslices.value_and_grad give those rows only",
            line,
        )
    flat = ids.reshape(-1)
    if mode == "clip":
        flat = jnp.clip(flat, 0, shape[0] - 1)
    gradient = jnp.zeros(shape, rows.dtype)
    return add_rows(gradient, flat, rows.reshape(-1, *shape[1:])), None


_lookup.defvjp(_forward, _backward)


@contextlib.contextmanager
def without_dense_warning() -> Iterator[None]:
    """Inside, a dense gradient of ``embedding_lookup`` is somebody's decision."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)
