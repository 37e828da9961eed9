"""Row numbers as users pass them: made into arrays, checked, and settled by a mode."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.typing import ArrayLike

from jslices._rows.bounds import canonical_indices, in_32_bits, index_dtype
from jslices._rows.check import known_int

#: What becomes of an id outside ``[0, V)``. A read *fills* and a write *drops*; as in JAX
#: the two words name the same mode.
MODES = ("fill", "drop", "clip", "promise_in_bounds", "check")


class IdOutOfRangeError(IndexError, ValueError):
    """An id is not a row of the table. (checkify raises a ValueError for the same.)"""


def check_ids(ids: ArrayLike, num_rows: int) -> Any:
    """Raises if an id is not a row of the table: for a data pipeline, or inside jit.

    Args:
      ids: ``[*B]`` of any integer dtype and any rank: NumPy, JAX, or nested lists.
      num_rows: V, the number of rows of the table.

    Returns:
      ``ids`` themselves, unchanged, so that the call can be wrapped round them.

    Raises:
      IndexError: (also a ValueError) for the first id outside ``[0, V)``, negative ones
        included; it names its position, its value and the valid range. Under jit it is
        raised by ``jax.experimental.checkify``: ``checkify.checkify(jax.jit(step))``.
      TypeError: if ``ids`` are not integers, or ``num_rows`` is none.

    Cost: reads the K ids once. NumPy arrays and lists never leave the host.

    Example:
      >>> import numpy as np, jslices as js
      >>> js.check_ids(np.array([3, 0]), 5)
      array([3, 0])
      >>> js.check_ids([[1, 2], [7, 0]], 5)
      Traceback (most recent call last):
      jslices._rows.ids.IdOutOfRangeError: check_ids: ids[1, 0] = 7 is not in [0, 5)

    Source: the bounds check of ``tf.gather`` on a CPU and FBGEMM's ``BoundsCheckMode``
    FATAL, which report the position in the same way.
    """
    count = known_int(
        num_rows,
        f"check_ids wants num_rows as an int, got {num_rows!r}; pass table.shape[0]",
    )
    refuse_bad_ids(ids, count, "check_ids", "ids")
    return ids


def check_mode(mode: str, who: str) -> None:
    if mode not in MODES:
        raise ValueError(f"{who} got mode={mode!r}; it must be one of {MODES}")


def as_ids(ids: Any, who: str, name: str = "ids") -> jax.Array:
    """``ids`` as a JAX array; a bad id stays bad.

    With 64-bit types switched off JAX cuts NumPy's 64-bit integers to 32 bits, and
    2**32 + 3 would become row 3. Here what does not fit becomes the largest integer, or the
    smallest.
    """
    if ids is None or hasattr(ids, "dense_shape"):
        hint = "" if ids is None else "; pass its row numbers: slices.indices"
        raise TypeError(f"{who} wants integer {name}, got {ids}{hint}")
    host = on_host(ids)
    array: Any = jnp.asarray(ids) if host is None else in_32_bits(host)
    foreign = array.dtype.kind in "OSU"  # no numbers at all, which JAX knows nothing of
    if foreign or not jnp.issubdtype(array.dtype, jnp.integer):
        dtype = array.dtype if foreign else jnp.asarray(array).dtype
        raise TypeError(
            f"{who} wants integer {name}, got {dtype}{list(array.shape)}; cast them: "
            f"{name}.astype('int32')"
        )
    return jnp.asarray(array)


def settle(ids: jax.Array, num_rows: int, mode: str) -> jax.Array:
    """``ids`` with every bad one rewritten as the mode wants; no checking.

    Returns:
      ``[...]`` int32 (or int64), each in ``[0, V]``; V marks what reads the fill value
      and writes nothing. ``"promise_in_bounds"`` only widens them.
    """
    if mode == "promise_in_bounds":
        return ids.astype(index_dtype(num_rows, np.dtype(ids.dtype)))
    settled = canonical_indices(ids, num_rows)
    if mode != "clip" or num_rows == 0:
        return settled
    settled = jnp.minimum(settled, num_rows - 1)
    if jnp.issubdtype(ids.dtype, jnp.unsignedinteger):
        return settled
    return jnp.where(ids < 0, 0, settled)


def refuse_bad_ids(
    ids: Any,
    num_rows: int,
    who: str,
    name: str,
    exempt: jax.Array | np.ndarray | None = None,
) -> jax.Array | None:
    """Raises for the first id outside ``[0, V)``, at once or through checkify.

    Args:
      ids: ``[*B]``, as the user passed them.
      num_rows: V.
      who: the function that speaks.
      name: what it calls the ids.
      exempt: ``[*B]`` bool, ids that may be anything.

    Returns:
      None when the ids are concrete, and then good. Under jit: a bool, True if any is
      bad, for who wants to change nothing in that case.
    """
    host, numbers = on_host(ids), as_ids(ids, who, name)
    array: Any = numbers if host is None else host  # as given, for the message
    if array.size == 0:
        return None
    if isinstance(array, jax.core.Tracer) or isinstance(exempt, jax.core.Tracer):
        return _check_later(numbers, num_rows, f"{who}: {name}", exempt)
    array = np.asarray(array)
    bad = (array < 0) | (array >= num_rows)
    if exempt is not None:
        bad &= ~np.asarray(exempt)
    if not bad.any():
        return None
    at = np.unravel_index(int(np.argmax(bad)), bad.shape)
    raise IdOutOfRangeError(
        f"{who}: {name}{_brackets([str(i) for i in at])} = {array[at]} is not in "
        f"[0, {num_rows})"
    )


def on_host(ids: Any) -> np.ndarray | None:
    """NumPy's view of what is no JAX array yet."""
    if isinstance(ids, np.ndarray | np.generic | int | float | range):
        return np.asarray(ids)
    if isinstance(ids, list | tuple):
        if not any(isinstance(x, jax.Array) for x in jax.tree.leaves(ids)):
            return np.asarray(ids)
    return None


def _check_later(
    ids: jax.Array, num_rows: int, what: str, exempt: jax.Array | np.ndarray | None
) -> jax.Array:
    empty = canonical_indices(ids, num_rows)
    bad = empty == num_rows
    if exempt is not None:
        bad &= ~jnp.asarray(exempt)
    first = jnp.argmax(bad.reshape(-1))
    place = jnp.unravel_index(first, ids.shape) if ids.ndim else ()
    parts = {f"axis{i}": at for i, at in enumerate(place)}
    message = what + _brackets(["{" + name + "}" for name in parts])
    message += " = {value} is not in [0, " + str(num_rows) + ")"
    any_bad = jnp.any(bad)
    check: Any = checkify.check
    check(~any_bad, message, value=ids.reshape(-1)[first], **parts)
    return any_bad


def _brackets(parts: Sequence[str]) -> str:
    return f"[{', '.join(parts)}]" if parts else ""
