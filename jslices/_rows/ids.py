"""Row numbers as users pass them: converted, checked, and normalized by a ``mode``."""

from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.typing import ArrayLike

from jslices._arguments import OneOf
from jslices._rows import access

#: What an id outside ``[0, V)`` does. As in JAX, "fill" and "drop" are one mode: a read
#: fills, a write drops.
MODE = OneOf("fill", "drop", "clip", "promise_in_bounds", "check")


class IdOutOfRangeError(IndexError, ValueError):
    """An id is not a row of the table. (checkify raises a ValueError for the same.)"""


def check_ids(ids: ArrayLike, num_rows: int) -> Any:
    """Raises if an id is not a row of the table, in a data pipeline or under jit.

    Args:
      ids: ``[*B]`` of any integer dtype and any rank: NumPy, JAX, or nested lists.
      num_rows: V, the number of rows of the table.

    Returns:
      ``ids`` unchanged, so that ``check_ids(ids, num_rows)`` can replace ``ids``.

    Raises:
      IndexError: (also a ValueError) for the first id outside ``[0, V)``, negative ones
        included, with its position, its value and the valid range. Under jit it goes
        through ``jax.experimental.checkify``: ``checkify.checkify(jax.jit(step))``.
      TypeError: if ``ids`` are not integers or ``num_rows`` is not an int.

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
    message = f"check_ids wants num_rows as an int, got {num_rows!r}; pass table.shape[0]"
    count = access.static_int(num_rows, message)
    refuse_bad_ids(ids, count, "check_ids", "ids")
    return ids


def check_mode(mode: str, caller: str) -> None:
    MODE.check(caller, "mode", mode)


def as_ids(ids: ArrayLike, caller: str, name: str = "ids") -> jax.Array:
    """``ids`` as a JAX array, in which a bad id stays bad.

    Without 64-bit types JAX truncates NumPy's int64 to 32 bits, and 2**32 + 3 would become
    row 3. Here ids that do not fit become the largest or smallest integer.
    """
    if ids is None or hasattr(ids, "dense_shape"):
        hint = "" if ids is None else "; pass its row numbers: slices.indices"
        raise TypeError(f"{caller} wants integer {name}, got {ids}{hint}")
    try:
        host = on_host(ids)
    except ValueError as error:  # NumPy's, of lists
        raise ValueError(
            f"{caller} got {name} of different lengths; pad them by -1, or combine them in "
            "bags: jslices.embedding_lookup_sparse(table, (values, row_splits)), which "
            "says how to make these of lists"
        ) from error
    array: Any = jnp.asarray(ids) if host is None else access.in_32_bits(host)
    foreign = array.dtype.kind in "OSU"  # not numbers, which jnp.issubdtype would refuse
    if foreign or not jnp.issubdtype(array.dtype, jnp.integer):
        dtype = array.dtype if foreign else jnp.asarray(array).dtype
        help = f"cast them: {name}.astype('int32')"
        if dtype == np.bool_:
            help = f"of a mask take np.flatnonzero(mask) for {name}"
        if foreign:
            help = (
                "jslices.dynamic gives strings rows; TensorFlow hashes them, [farmhash."
                "fingerprint64(x) % V for x in words] of `pip install pyfarmhash`"
            )
        raise TypeError(
            f"{caller} wants integer {name}, got {dtype}{list(array.shape)}; {help}"
        )
    return jnp.asarray(array)


def settle(ids: jax.Array, num_rows: int, mode: str) -> jax.Array:
    """``ids`` with every bad one rewritten as ``mode`` says; nothing is checked.

    Returns:
      ``[...]`` int32 (or int64), each in ``[0, V]``; V reads the fill value and writes
      nothing. ``"promise_in_bounds"`` only widens the dtype.
    """
    if mode == "promise_in_bounds":
        return ids.astype(access.index_dtype(num_rows, np.dtype(ids.dtype)))
    if mode == "clip" and num_rows != 0:
        return access.clipped_indices(ids, num_rows)
    return access.canonical_indices(ids, num_rows)


def refuse_bad_ids(
    ids: ArrayLike,
    num_rows: int,
    caller: str,
    name: str,
    exempt: jax.Array | np.ndarray | None = None,
) -> jax.Array | None:
    """Raises for the first id outside ``[0, V)``, at once or through checkify.

    ``caller`` is the public function, which calls the ids ``[*B]`` by this ``name``. Those
    ``exempt``, bool ``[*B]``, may be anything.

    Returns:
      None when the ids are concrete (and good). Under jit a bool ``[]``, True if any is
      bad, for callers that then change nothing.
    """
    host, numbers = on_host(ids), as_ids(ids, caller, name)
    array: Any = numbers if host is None else host  # as given, for the message
    if array.size == 0:
        return None
    if isinstance(array, jax.core.Tracer) or isinstance(exempt, jax.core.Tracer):
        array, bad = numbers, access.canonical_indices(numbers, num_rows) == num_rows
        bad = bad if exempt is None else bad & ~jnp.asarray(exempt)
    else:
        array = np.asarray(array)
        bad = (array < 0) | (array >= num_rows)
        bad = bad if exempt is None else bad & ~np.asarray(exempt)
    message = f"{caller}: {name}{{at}} = {{value}} is not in [0, {num_rows})"
    return refuse_first(bad, array, message)


def refuse_first(bad: Any, ids: Any, message: str) -> Any:
    """Raises for the first of ``ids`` that is ``bad``; the result is as above.

    ``bad`` is bool ``[*B]``, of NumPy or traced, and ``ids`` ``[*B]``, or ``[*B, d]`` with
    d numbers at each place. In the message that is the ``{value}``, and its place ``{at}``.
    """
    if not isinstance(bad, jax.core.Tracer):
        if not bad.any():
            return None
        here = np.unravel_index(int(np.argmax(bad)), bad.shape)
        raise IdOutOfRangeError(_filled_in(message, here, np.ravel(ids[here])))
    first, any_bad = jnp.argmax(bad.reshape(-1)), bad.any()
    position = jnp.unravel_index(first, bad.shape) if bad.ndim else ()
    places = {f"axis{i}": x for i, x in enumerate(position)}
    values = {f"value{i}": x for i, x in enumerate(ids.reshape(bad.size, -1)[first])}
    at, value = ([f"{{{name}}}" for name in names] for names in (places, values))
    check: Any = checkify.check
    check(~any_bad, _filled_in(message, at, value), **places, **values)
    return any_bad


def _filled_in(message: str, at: Collection[object], values: Iterable[object]) -> str:
    place = f"[{', '.join(map(str, at))}]" if at else ""
    return message.format(at=place, value=", ".join(map(str, values)))


def on_host(ids: ArrayLike) -> np.ndarray | None:
    """``ids`` as a NumPy array if no part of them is a JAX array yet; else None."""
    if isinstance(ids, np.ndarray | np.generic | int | float | range):
        return np.asarray(ids)
    if isinstance(ids, list | tuple):
        if not any(isinstance(x, jax.Array) for x in jax.tree.leaves(ids)):
            return np.asarray(ids)
    elif hasattr(ids, "__array__") and not isinstance(ids, jax.Array):
        # A tensor of PyTorch, say, which JAX would truncate to 32 bits.
        return None if hasattr(ids, "__jax_array__") else np.asarray(ids)
    return None
