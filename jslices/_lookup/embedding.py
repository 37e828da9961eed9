"""``embedding_lookup``: the lookup that people write."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jslices._bounds import take_rows
from jslices._densify import current_user_line
from jslices._lookup.mark import mark_table

MODES = ("fill", "clip", "promise_in_bounds")


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
    if jnp.issubdtype(table.dtype, jnp.inexact):
        table = mark_table(table, ids.size, current_user_line())
    return take_rows(table, ids, mode=mode)
