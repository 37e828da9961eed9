"""Drawing classes for a sampled loss, frequent ones more often."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jslices._rows.bounds import INT32_MAX
from jslices._rows.ids import as_ids
from jslices._rows.sort import sort_ids


class Candidates(NamedTuple):
    """What a candidate sampler gives; expected counts are those of one whole draw."""

    sampled_candidates: jax.Array  #: ``[S]`` int32, the classes drawn.
    true_expected_count: jax.Array  #: ``[*B]`` float32, of each of the true classes.
    sampled_expected_count: jax.Array  #: ``[S]`` float32, of each class drawn.


def log_uniform_candidate_sampler(
    true_classes: ArrayLike,
    num_sampled: int,
    range_max: int,
    *,
    key: jax.Array,
    unique: bool = True,
) -> Candidates:
    """Classes drawn with ``P(k) = log((k + 2) / (k + 1)) / log(range_max + 1)``.

    That is about Zipf's law for classes numbered from the most to the least frequent.

    Args:
      true_classes: ``[*B]`` integers, the classes whose expected counts are wanted.
      num_sampled: S, how many to draw.
      range_max: N, the number of classes; at most 2^31 - 1.
      key: a ``jax.random`` key; the same key draws the same classes.
      unique: whether to draw until S different classes are found, each kept once.

    Returns:
      :class:`Candidates`: ``sampled_candidates`` ``[S]`` int32 in ``[0, N)``,
      ``true_expected_count`` ``[*B]`` and ``sampled_expected_count`` ``[S]``, float32. The
      expected count of class k is ``S P(k)``, or, drawing T times until S are unique,
      ``1 - (1 - P(k))^T``. All are constants for differentiation.

    Raises:
      TypeError: if ``true_classes`` are not integers.
      ValueError: if ``range_max`` is not in ``[1, 2^31)``, or more unique classes are
        wanted than there are.

    Cost: O(S log S) for each round of S draws; mostly one to three rounds, many only if S
    is near N. No array of N elements is made.

    Example:
      >>> import jax, jslices as js
      >>> key = jax.random.key(0)
      >>> drawn = js.log_uniform_candidate_sampler([[0]], 5, 1000, key=key)
      >>> drawn.sampled_candidates.shape, drawn.true_expected_count.shape
      ((5,), (1, 1))

    Source: ``tf.random.log_uniform_candidate_sampler``, whose draws come from a global
    generator. Classes beyond 2^23 are drawn as evenly as the others, for which 32-bit
    logarithms alone would be too coarse.
    """
    who = "log_uniform_candidate_sampler"
    if not 1 <= range_max <= INT32_MAX:
        raise ValueError(f"{who} got range_max={range_max}; it must be in [1, 2^31)")
    if num_sampled < 1 or (unique and num_sampled > range_max):
        raise ValueError(
            f"{who} got num_sampled={num_sampled}, unique={unique} of {range_max} classes; "
            "it must be at least 1, and not more than the classes if they are to be unique"
        )
    tries: Any = num_sampled
    if unique:
        sampled, tries = _draw_unique(key, num_sampled, range_max)
    else:
        sampled = _draw(key, num_sampled, range_max)

    def expected(classes: jax.Array) -> jax.Array:
        classes = classes.astype(jnp.float32)
        chance = jnp.log1p(1 / (classes + 1)) / math.log(range_max + 1)
        return -jnp.expm1(tries * jnp.log1p(-chance)) if unique else tries * chance

    classes = as_ids(true_classes, who, "true_classes")
    return Candidates(sampled, expected(classes), expected(sampled))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, count: int, range_max: int) -> jax.Array:
    """``[count]`` int32, log-uniform.

    ``k + 1`` is log-uniform in ``[1, N + 1)``: any power of two below it is equally likely,
    and within an octave the exponent's fraction is uniform. Drawing the two apart keeps all
    bits of the fraction; bits below those of a float are drawn evenly.
    """
    which, where, low = jax.random.split(key, 3)
    octaves = math.log2(range_max + 1)
    octave = jnp.floor(jax.random.uniform(which, (count,)) * octaves).astype(jnp.int32)
    octave = jnp.minimum(octave, math.ceil(octaves) - 1)
    width = jnp.minimum(1.0, octaves - octave)
    fraction = jax.random.uniform(where, (count,)) * width
    offset = jnp.expm1(fraction * math.log(2.0)) * jnp.exp2(jnp.minimum(octave, 23))
    shift = jnp.maximum(octave - 23, 0)
    bits = jax.random.bits(low, (count,), jnp.uint32) & ((1 << shift) - 1).astype(
        jnp.uint32
    )
    numbers = (offset.astype(jnp.int32) << shift) + bits.astype(jnp.int32)
    return jnp.minimum((1 << octave) - 1 + numbers, range_max - 1)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw_unique(key: jax.Array, count: int, range_max: int) -> tuple[jax.Array, jax.Array]:
    """The first ``count`` different classes of a sequence of draws, and its length."""

    def more(state: Any) -> jax.Array:
        return state[2] < count

    def draw(state: Any) -> Any:
        key, chosen, _, tries = state
        key, now = jax.random.split(key)
        pool = jnp.concatenate([chosen, _draw(now, count, range_max)])
        ordered, positions = sort_ids(pool)
        fresh = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
        first = jnp.zeros_like(fresh).at[positions].set(fresh, unique_indices=True)
        rank = jnp.cumsum(first & (pool < range_max), dtype=jnp.int32)
        slots = jnp.where(first & (pool < range_max), rank - 1, count)
        chosen = jnp.full_like(chosen, range_max).at[slots].set(pool, mode="drop")
        found = rank[-1]
        # The draw that completed the set was the last that counts.
        used = jnp.where(found < count, count, jnp.argmax(rank >= count) - count + 1)
        return key, chosen, found, tries + used.astype(jnp.int32)

    start = (
        key,
        jnp.full((count,), range_max, jnp.int32),
        jnp.zeros((), jnp.int32),
        jnp.zeros((), jnp.int32),
    )
    _, chosen, _, tries = jax.lax.while_loop(more, draw, start)
    return chosen, tries
