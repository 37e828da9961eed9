"""Hashes of the last tokens of a text: the same 64 bits in NumPy and under jit.

JAX has no 64-bit integers unless a flag turns all of them on, so a number is a pair of
uint32. A hash needs tokens alone: the host can compute, before a step, which rows of tables
the step will read.
"""

import jax
import jax.numpy as jnp
import numpy as np

NGRAMS = 2, 3  # tokens that a head hashes, in turn
MULTIPLIER = 0xD6E8FEB86659FD93
SEED = 0x9E3779B97F4A7C15
HALF = np.uint32(0xFFFF)


def high_half(a, b):
    """The upper 32 of the 64 bits of ``a * b``, of uint32."""
    a0, a1, b0, b1 = a & HALF, a >> 16, b & HALF, b >> 16
    middle = a1 * b0 + (a0 * b0 >> 16)
    other = a0 * b1 + (middle & HALF)
    return a1 * b1 + (middle >> 16) + (other >> 16)


def pair(number):
    """Upper and lower half of 64 bits: uint32 of the same shape."""
    number = np.asarray(number, np.uint64)
    return (number >> np.uint64(32)).astype("uint32"), number.astype("uint32")


def multiplied(x, y):
    """The product of pairs, modulo 2**64."""
    (x1, x0), (y1, y0) = x, y
    return high_half(x0, y0) + x0 * y1 + x1 * y0, x0 * y0


def hashed_ngrams(tokens, layers, heads, num_rows):
    """The row of each table that each position reads: int32 ``[layers, heads, B, T]``.

    ``tokens`` are integers ``[B, T]``, NumPy's or JAX's, and so is the result; the numbers
    are the same, and need no 64-bit types. Head h hashes the last ``NGRAMS[h % 2]`` tokens;
    what stands before the first one is the token 2**32 - 1. ``num_rows`` below 2**31.

    The state begins with a number of the table. Each token, the oldest first, is xored into
    its lower half; it is multiplied by an odd number modulo 2**64; and its upper half is
    xored into the lower. The row is ``num_rows * upper half / 2**32``, rounded down.
    """
    xp = jnp if isinstance(tokens, jax.Array) else np
    shape = layers, heads, 1, 1
    numbers = np.arange(1, layers * heads + 1, dtype=object).reshape(shape)
    upper, lower = pair((numbers * SEED % 2**64).astype(np.uint64))
    length = np.resize(NGRAMS, heads)[:, None, None]  # tokens of each head
    farthest, count = max(NGRAMS) - 1, tokens.shape[1]
    before = ((0, 0), (farthest, 0))
    tokens = xp.pad(tokens.astype("uint32"), before, constant_values=np.uint32(2**32 - 1))
    for back in range(farthest, -1, -1):
        token = tokens[:, farthest - back :][:, :count]
        new = multiplied((upper, lower ^ token), pair([MULTIPLIER]))
        used = back < length
        upper = xp.where(used, new[0], upper)
        lower = xp.where(used, new[1] ^ new[0], lower)
    upper, _ = multiplied((upper, lower), pair([MULTIPLIER]))
    return high_half(upper, np.full(1, num_rows, "uint32")).astype("int32")
