"""Mode ``"check"`` for indices that reach deeper than rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from jslices._rows.ids import IdOutOfRangeError, on_host, settle


def refuse_bad_elements(
    given: Any, indices: jax.Array, shape: tuple[int, ...], who: str
) -> jax.Array:
    """``indices``; raises for the first that leads nowhere, at once or through checkify.

    Args:
      given: ``[*B, d]``, the indices as the user passed them, for the message.
      indices: the same as an array.
      shape: of what they lead into; its rank is at least d.
      who: the function that speaks.

    Returns:
      ``[*B, d]``; under jit all of them lead nowhere if one does: nothing is written then.
    """
    host = on_host(given)
    if indices.size == 0:
        return indices
    message = who + ": indices{at} = [{value}] does not index into shape " + str([*shape])
    if host is None and isinstance(indices, jax.core.Tracer):
        return _check_later(indices, shape, message)
    array = np.asarray(indices) if host is None else host
    bad = ((array < 0) | (array >= shape[: array.shape[-1]])).any(-1)
    if not bad.any():
        return indices
    at = np.unravel_index(int(np.argmax(bad)), bad.shape)
    raise IdOutOfRangeError(message.format(at=_place(at), value=_list(array[at])))


def _check_later(indices: jax.Array, shape: tuple[int, ...], message: str) -> jax.Array:
    lengths = shape[: indices.shape[-1]]
    settled = [settle(indices[..., i], n, "drop") for i, n in enumerate(lengths)]
    bad = jnp.stack([x == n for x, n in zip(settled, lengths, strict=True)]).any(0)
    first, any_bad = jnp.argmax(bad.reshape(-1)), bad.any()
    place = jnp.unravel_index(first, bad.shape) if bad.ndim else ()
    places = {f"axis{i}": x for i, x in enumerate(place)}
    values = indices.reshape(-1, len(lengths))[first]
    numbers = {f"value{i}": x for i, x in enumerate(values)}
    at, value = ([f"{{{name}}}" for name in names] for names in (places, numbers))
    check: Any = checkify.check
    message = message.format(at=_place(at), value=_list(value))
    check(~any_bad, message, **places, **numbers)
    return jnp.where(any_bad, -1, jnp.stack(settled, -1))


def _list(parts: Any) -> str:
    return ", ".join(map(str, parts))


def _place(parts: Any) -> str:
    return f"[{_list(parts)}]" if len(parts) else ""
