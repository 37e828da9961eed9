"""Ids of 64 bits for programs without 64-bit types, and the hash that places them."""

import hashlib
import warnings
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

WORD = np.dtype("uint32")
#: Both words of padding, which is what negative ids become, and of a row without an owner.
NOBODY = np.uint32(0xFFFFFFFF)


class WideIds(NamedTuple):
    """Ids of 64 bits, each as two words: a pytree, for jitted functions.

    :func:`wide_ids` makes them. Both words of padding are ``2**32 - 1``.
    """

    low: Any  #: uint32 ``[*K]``, of JAX, or of NumPy before they are passed to a step
    high: Any  #: uint32 ``[*K]``

    def to_int64(self) -> np.ndarray:
        """The ids, int64 ``[*K]``, -1 for padding; ``.view("uint64")`` for unsigned ones.

        On the host: not under ``jax.jit``.
        """
        words = np.stack([np.asarray(self.low), np.asarray(self.high)], -1)
        return words.astype("<u4").view("<i8")[..., 0]  # type: ignore[no-any-return]


def wide_ids(ids: Any) -> WideIds:
    """Ids of any kind as :class:`WideIds`, which JAX does not cut to 32 bits.

    Call it before the jitted step: where 64-bit types are switched off, which they are by
    default, JAX drops the upper half of an int64 array as it enters a jitted function.

    Args:
      ids: ``[*K]``: integers of NumPy or JAX of any dtype, lists of them, PyTorch tensors;
        or strings, ``str`` or ``bytes``. Negative integers are padding, all alike: hashes
        that come with a sign are ``ids.view("uint64")``. A string becomes the first 63 bits
        of its BLAKE2b digest of 8 bytes (UTF-8, read as a little-endian number, shifted
        right by one), the same on every machine; 63 bits of a million strings collide with
        a probability of 5e-8. Under ``jit``: integers.

    Returns:
      :class:`WideIds` of arrays ``[*K]``, of NumPy if ``ids`` are on the host.

    Raises:
      TypeError: for anything else, floats and bools for instance.
      OverflowError: for integers of more than 64 bits.

    Warns:
      UserWarning: for negative ids other than -1, which look like signed hashes.

    Cost: K reads; of strings a microsecond each.

    Example:
      >>> import numpy as np
      >>> from jslices import dynamic
      >>> ids = dynamic.wide_ids(np.array([2**40 + 3, -1]))
      >>> ids.high
      array([       256, 4294967295], dtype=uint32)
      >>> ids.to_int64()
      array([1099511627779,            -1])
      >>> dynamic.wide_ids(["cat", "dog"]).to_int64()
      array([1714832134300930969, 5750585903842312732])

    Source: ours.
    """
    if isinstance(ids, WideIds):
        return ids
    if isinstance(ids, jax.Array):
        return _of_jax(ids)
    array = np.asarray(ids)
    if not array.size:
        array = array.astype(np.int64)
    elif array.dtype.kind in "US" and not hasattr(ids, "dtype"):
        array = np.asarray(ids, object)  # NumPy makes strings of numbers among strings
    if array.dtype.kind in "USO":
        array = _of_objects(array)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"wide_ids wants integers or strings, got {array.dtype}{[*array.shape]}; "
            'type ids.astype("int64") if these are whole numbers'
        )
    if array.dtype.kind == "i":
        if array.min(initial=0) < -1:
            warnings.warn(
                f"wide_ids got negative ids ({array.min()} is one): they are padding, and "
                'get no rows. Hashes with a sign are ids.view("uint64")',
                stacklevel=2,
            )
        array = np.maximum(array, -1)
    wide = array.astype("<i8" if array.dtype.kind == "i" else "<u8", order="C")
    words = wide[..., None].view("<u4").astype(WORD, copy=False)
    return WideIds(words[..., 0].copy(), words[..., 1].copy())


def _of_jax(ids: jax.Array) -> WideIds:
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(
            f"wide_ids wants integers or strings, got {ids.dtype}{[*ids.shape]}"
        )
    low, high = ids.astype(WORD), jnp.zeros(ids.shape, WORD)
    if ids.dtype.itemsize == 8:
        high = jax.lax.shift_right_logical(ids, ids.dtype.type(32)).astype(WORD)
    if jnp.issubdtype(ids.dtype, jnp.signedinteger):
        low, high = (jnp.where(ids < 0, NOBODY, word) for word in (low, high))
    return WideIds(low, high)


def _of_objects(array: np.ndarray) -> np.ndarray:
    """Strings, or integers that are too large for an array, as integers of 64 bits."""
    items = array.ravel().tolist()
    if all(isinstance(x, str | bytes) for x in items):
        numbers = np.fromiter(map(_digest, items), np.int64, len(items))
        return numbers.reshape(array.shape)
    if not all(isinstance(x, int) for x in items):
        return array
    if min(items) < -(2**63) or max(items) >= 2**64:
        raise OverflowError(
            "wide_ids: an id has more than 64 bits; hash it, or pass it as a string: "
            "wide_ids([str(x) for x in ids])"
        )
    return array.astype(np.int64 if max(items) < 2**63 else np.uint64)


def _digest(text: str | bytes) -> int:
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def is_padding(ids: WideIds) -> jax.Array:
    return (ids.low == NOBODY) & (ids.high == NOBODY)


def hashed(ids: WideIds, use: str) -> jax.Array:
    """A hash of ids, another for each use of it: uint32; of NumPy, if the ids are.

    MurmurHash3 (x86, 32 bits; Austin Appleby) of the 8 bytes of each.
    """
    h = ids.low * WORD.type(0) + WORD.type(zlib.crc32(use.encode()))
    for word in ids:
        k = _rotated(word * WORD.type(0xCC9E2D51), 15) * WORD.type(0x1B873593)
        h = _rotated(h ^ k, 13) * WORD.type(5) + WORD.type(0xE6546B64)
    h ^= WORD.type(8)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> shift)) * WORD.type(factor)
    return h ^ (h >> 16)


def _rotated(x: jax.Array, by: int) -> jax.Array:
    return (x << by) | (x >> (32 - by))
