"""Rows of 16 or 8 bits, rounded stochastically by bits that belong to each element.

The bits of an element depend only on the key, the number of its row and its place in the
row: they are the same whether the row is alone or among others, in whatever order, on every
platform and however the table is divided among devices.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.typing import DTypeLike

from jslices import _jax
from jslices._rows.access import canonical_indices, height_of, set_rows, take_rows
from jslices._rows.sums import sum_duplicates
from jslices._typing import Key

#: The bits of a threefry key, uint32 ``[2]``.
KeyBits = jax.Array


def is_narrow(dtype: DTypeLike) -> bool:
    """Whether arrays of this dtype can be rounded stochastically: floats of 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2


def key_bits(key: Key, caller: str) -> KeyBits:
    """The bits of a typed key, or of an old one (uint32 ``[2]``, or ``[4]`` of ``rbg``).

    Of a generator with longer keys only the key is used: its bits differ between platforms.

    Raises:
      TypeError: for anything but one key.
    """
    dtype, shape = getattr(key, "dtype", None), np.shape(key)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (typed and shape == ()) and not (dtype == np.uint32 and shape in ((2,), (4,))):
        got = repr(key) if dtype is None else f"{dtype}{list(shape)}"
        raise TypeError(
            f"{caller} wants one random key, got key={got}; type key=jax.random.key(0), or "
            "for each step another one: key=jax.random.fold_in(jax.random.key(0), step)"
        )
    words = jax.random.key_data(key) if typed else jnp.asarray(key)
    bits, *more = words.reshape(-1, 2)
    for pair in more:
        bits = jnp.stack(_hash(bits, *pair))
    return bits


def fold_in(bits: KeyBits, number: int) -> KeyBits:
    """The key for part ``number``, in ``[0, 2**32)``, of the use of a key."""
    # Different from all numbers that jax.random draws with the same key.
    return jnp.stack(_hash(bits, jnp.uint32(number), jnp.uint32(0x524F554E)))


def add_rounding(param: jax.Array, update: jax.Array, bits: KeyBits) -> jax.Array:
    """``param`` ``[V, *D]`` plus ``update``, every element rounded stochastically."""
    total = jnp.atleast_1d(param.astype(jnp.float32) + update.astype(jnp.float32))
    numbers = jnp.arange(total.shape[0])
    return round_rows(total, numbers, bits, param.dtype).reshape(param.shape)


def add_rows_rounding(
    table: jax.Array,
    indices: jax.Array,
    rows: jax.Array,
    distinct: bool,
    bits: KeyBits,
    number: Callable[[jax.Array], jax.Array] = lambda indices: indices,
) -> jax.Array:
    """``table`` with rows added, each row named rounded once, after its sum.

    As :func:`jslices._rows.sums.add_rows`; random bits are those of ``number(indices)``, as
    the table may be a part of a larger one. Cost: unless the rows are
    distinct, numbering them, a gather and a scatter of ``K * D`` elements.
    """
    rows = rows.astype(jnp.float32)
    num_rows = height_of(table, rows)
    indices = canonical_indices(indices, num_rows)
    if not distinct:
        rows, indices, _ = sum_duplicates(rows, indices, num_rows, None, order="any")
    axes = 1 + table.ndim - rows.ndim
    total = take_rows(table, indices, mode="clip", row_axes=axes).astype(jnp.float32) + rows
    return set_rows(table, indices, round_rows(total, number(indices), bits, table.dtype))


@functools.partial(jax.jit, static_argnums=3, inline=True)
def round_rows(
    rows: jax.Array, numbers: jax.Array, bits: KeyBits, dtype: DTypeLike
) -> jax.Array:
    """``rows`` in 16 or 8 bits, each element one of its two neighbours, right in the mean.

    Args:
      rows: float32 ``[n, *D]``.
      numbers: integers ``[n]``, the number of each row in its table. More axes may number
        the rows of both.
      bits: of the key.
      dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.

    Returns:
      ``[n, *D]``. A number of ``dtype`` stays as it is; otherwise the neighbour farther
      from zero is taken with a probability that is the share of the gap below the number,
      in units of 2**-16. NaN and infinities stay; finite numbers become infinite only where
      rounding to nearest makes them so. In float8_e4m3fn, which has no infinities, numbers
      beyond the largest one become that.

    Cost: ``n * D / 4`` hashes, of about 80 integer operations each.
    """
    stored, narrow = jnp.finfo(jnp.float32), jnp.finfo(dtype)
    dropped = stored.nmant - narrow.nmant
    deepest = min(16, 32 - dropped)  # more bits that subnormals drop
    # The exponents of both, as they are stored, from that of the subnormals on.
    lowest = int(narrow.minexp - stored.minexp) + 1
    word = lax.bitcast_convert_type(rows, jnp.uint32)
    exponent = (word >> stored.nmant) & 0xFF
    fraction = word & ((1 << stored.nmant) - 1)
    fraction |= jnp.where(exponent > 0, jnp.uint32(1 << stored.nmant), jnp.uint32(0))
    exponent = jnp.maximum(exponent, 1)
    # A subnormal has fewer bits; those that the random ones cannot resolve go first.
    below = jnp.maximum(exponent, lowest) - exponent
    fraction >>= jnp.minimum(jnp.maximum(below, deepest) - deepest, 31)
    shift = dropped + jnp.minimum(below, deepest)
    # The dropped bits, as a share of 2**32, are compared with 16 random bits and a half.
    random = (_random16(numbers, rows.shape, bits) << 16) | 0x8000
    up = fraction << (32 - shift) > random
    magnitude = (exponent + below - lowest) << narrow.nmant
    magnitude += (fraction >> shift) + up.astype(jnp.uint32)
    rounded = ((word >> 31) << (narrow.bits - 1)) | magnitude
    bits_of = jnp.dtype(f"uint{narrow.bits}")
    largest = int(np.asarray(narrow.max, dtype).view(bits_of))
    if jnp.dtype(dtype) == jnp.float8_e4m3fn:
        rows = jnp.where(jnp.isnan(rows), rows, jnp.clip(rows, -448, 448))
    narrower = lax.bitcast_convert_type(rounded.astype(bits_of), dtype)
    return jnp.where(magnitude <= largest, narrower, rows.astype(dtype))


def _random16(numbers: jax.Array, shape: tuple[int, ...], bits: KeyBits) -> jax.Array:
    """Random numbers of 16 bits, uint32 ``[n, *D]``."""
    axes = numbers.ndim
    length = math.prod(shape[axes:])
    blocks = (*numbers.shape, -(-length // 4))
    rows = lax.broadcast_in_dim(numbers.astype(jnp.uint32), blocks, range(axes))
    words = _hash(bits, rows, lax.broadcasted_iota(jnp.uint32, blocks, axes))
    quarters = [part for word in words for part in (word & 0xFFFF, word >> 16)]
    return jnp.concatenate(quarters, axis=axes)[..., :length].reshape(shape)


def _hash(bits: KeyBits, first: jax.Array, second: jax.Array) -> tuple[Any, Any]:
    """Threefry of the counters ``first`` and ``second``, uint32 of any shape."""
    every = (bits, first, second)
    bits, first, second = _jax.as_varying_as(every, *every)
    one, other = threefry2x32_p.bind(bits[0], bits[1], first, second)
    return one, other
