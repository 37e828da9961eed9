"""Losses over many classes that read a few of them, drawn at random."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jslices._lookup.embedding import as_tables, embedding_lookup
from jslices._place.boundary import by_first_axis, on_any_mesh
from jslices._rows.access import INT32_MAX
from jslices._rows.ids import as_ids, settle
from jslices._rows.sums import sort_ids, starts_of_runs

#: ``(sampled [S], true_expected_count, sampled_expected_count [S])``.
Samples = tuple[ArrayLike, ArrayLike, ArrayLike]
_Draws = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def sampled_softmax_loss(
    weights: jax.Array | Sequence[jax.Array],
    biases: jax.Array | Sequence[jax.Array],
    labels: ArrayLike,
    inputs: ArrayLike,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: Samples | None = None,
    remove_accidental_hits: bool = True,
    partition_strategy: str = "mod",
    *,
    key: jax.Array | None = None,
) -> jax.Array:
    """Softmax cross entropy over the true classes and a few drawn ones, for training.

    The logit of class c is ``inputs . weights[c] + biases[c] - log(expected count of c)``;
    the T true classes of an example share the target equally.

    Args:
      weights: ``[V, D]`` floats, a row a class, or a list of shards.
      biases: ``[V]``, or a list of shards.
      labels: ``[B, T]`` integers, or ``[B]`` for one true class each.
      inputs: ``[B, D]``.
      num_sampled: S, how many classes to draw; all examples share them.
      num_classes: V, how many there are.
      num_true: T.
      sampled_values: ``(sampled [S], true_expected_count [B, T], sampled_expected_count
        [S])`` from a sampler other than the log-uniform one.
      remove_accidental_hits: whether a drawn class is left out where it is a true one.
      partition_strategy: for shards, as in :func:`embedding_lookup`.
      key: a ``jax.random`` key for the draw; needed without ``sampled_values``.

    Returns:
      ``[B]``, the loss of each example. A label outside ``[0, V)`` makes it NaN.

    Gradient: under :func:`jslices.grad` those of ``weights`` and ``biases`` are
    IndexedSlices of B T + S rows; those of a class that is both true and drawn add.

    Raises:
      TypeError: if ``labels`` are not integers.
      ValueError: if shapes do not fit, neither a key nor samples are given, or there are
        fewer rows than classes to draw from.

    Cost: reads ``(B T + S) D`` elements of ``weights`` and multiplies ``B S D``.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> weights, biases, inputs = jnp.ones((100, 4)), jnp.zeros(100), jnp.ones((2, 4))
      >>> loss = lambda w: js.sampled_softmax_loss(
      ...     w, biases, [3, 7], inputs, 5, 100, key=jax.random.key(0)
      ... ).sum()
      >>> js.grad(loss)(weights).values.shape
      (7, 4)

    Source: ``tf.nn.sampled_softmax_loss`` (Jean et al., 2014, arXiv:1412.2007); there the
    draw is not reproducible by a key.
    """
    arrays = (weights, biases), (labels, inputs), sampled_values, key
    counts, caller = (num_sampled, num_classes, num_true), "sampled_softmax_loss"
    how: Any = {"remove_hits": remove_accidental_hits, "strategy": partition_strategy}
    logits, targets = _sampled_logits(*arrays, caller=caller, counts=counts, **how)
    return -jnp.sum(targets * jax.nn.log_softmax(logits), -1)


def nce_loss(
    weights: jax.Array | Sequence[jax.Array],
    biases: jax.Array | Sequence[jax.Array],
    labels: ArrayLike,
    inputs: ArrayLike,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: Samples | None = None,
    remove_accidental_hits: bool = False,
    partition_strategy: str = "mod",
    *,
    key: jax.Array | None = None,
) -> jax.Array:
    """Noise-contrastive estimation: each true or drawn class is a binary classification.

    Arguments, gradient, errors and cost are those of :func:`sampled_softmax_loss`:
    ``weights`` ``[V, D]``, ``biases`` ``[V]``, ``labels`` ``[B, T]`` or ``[B]``, ``inputs``
    ``[B, D]``. Here a drawn class that is also true counts as a negative, unless
    ``remove_accidental_hits`` is set.

    Returns:
      ``[B]``: the sum of the logistic losses, with target ``1 / T`` for true classes, 0 for
      drawn ones.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> weights, biases, inputs = jnp.zeros((100, 4)), jnp.zeros(100), jnp.ones((2, 4))
      >>> key = jax.random.key(0)
      >>> js.nce_loss(weights, biases, [3, 7], inputs, 5, 100, key=key).shape
      (2,)

    Source: ``tf.nn.nce_loss`` (Gutmann and Hyvarinen, 2010).
    """
    arrays = (weights, biases), (labels, inputs), sampled_values, key
    counts = num_sampled, num_classes, num_true
    how: Any = {"remove_hits": remove_accidental_hits, "strategy": partition_strategy}
    logits, targets = _sampled_logits(*arrays, caller="nce_loss", counts=counts, **how)
    losses = jnp.maximum(logits, 0) - logits * targets
    return jnp.sum(losses + jnp.log1p(jnp.exp(-jnp.abs(logits))), -1)


@on_any_mesh(lambda *args: by_first_axis(args[1][1], *args))
def _sampled_logits(
    tables: tuple[Any, Any],
    examples: tuple[Any, Any],
    sampled_values: Samples | None,
    key: jax.Array | None,
    *,
    caller: str,
    counts: tuple[int, int, int],
    remove_hits: bool,
    strategy: str,
) -> tuple[jax.Array, jax.Array]:
    """Logits and targets ``[B, T + S]``, those of the true classes first."""
    num_sampled, num_classes, num_true = counts
    inputs = jnp.asarray(examples[1])
    labels = _labels(examples[0], inputs, num_true, caller)
    _check_tables(tables, inputs, num_classes if sampled_values is None else None, caller)
    if sampled_values is None:
        if key is None:
            raise ValueError(
                f"{caller} draws classes and needs key=jax.random.key(...), a new one each "
                "step, or sampled_values="
            )
        sampled_values = log_uniform_candidate_sampler(
            labels, num_sampled, num_classes, key=key
        )
    sampled, of_true, of_sampled = _samples(sampled_values, labels, caller)
    # The dtype of the labels may be too narrow for some class that is drawn.
    wide = jnp.promote_types(jnp.promote_types(labels.dtype, sampled.dtype), jnp.int32)
    ids = jnp.concatenate([labels.reshape(-1).astype(wide), sampled.astype(wide)])
    rows, offsets = (embedding_lookup(x, ids, partition_strategy=strategy) for x in tables)
    count, dtype = labels.size, rows.dtype
    true_rows = rows[:count].reshape(*labels.shape, rows.shape[-1])
    true = jnp.einsum("bd,btd->bt", inputs, true_rows)
    true += offsets[:count].reshape(labels.shape)
    drawn = inputs @ rows[count:].T + offsets[None, count:]
    true -= jnp.log(of_true).astype(dtype)
    drawn -= jnp.log(of_sampled).astype(dtype)[None]
    if remove_hits:
        hits = (labels[:, :, None] == sampled[None, None]).any(1)
        drawn = jnp.where(hits, jnp.finfo(drawn.dtype).min, drawn)
    logits = jnp.concatenate([true, drawn], 1)
    targets = [jnp.full_like(true, 1 / num_true), jnp.zeros_like(drawn)]
    return logits, jax.lax.stop_gradient(jnp.concatenate(targets, 1))


def _labels(
    original: ArrayLike, inputs: jax.Array, num_true: int, caller: str
) -> jax.Array:
    labels = as_ids(original, caller, "labels")
    labels = labels[:, None] if labels.ndim == 1 else labels
    if inputs.ndim != 2 or labels.shape != (inputs.shape[0], num_true):
        raise ValueError(
            f"{caller} wants inputs [B, D] and labels [B, num_true={num_true}], got inputs "
            f"{list(inputs.shape)} and labels {list(labels.shape)}"
        )
    return labels


def _check_tables(
    tables: tuple[Any, Any], inputs: jax.Array, num_classes: int | None, caller: str
) -> None:
    """Refuses tables that do not fit the inputs or have fewer rows than classes."""
    weights, biases = (as_tables(table, caller) for table in tables)
    if weights[0].shape[1:] != inputs.shape[1:] or biases[0].ndim != 1:
        raise ValueError(
            f"{caller} wants weights [V, D={inputs.shape[1]}] and biases [V], got weights "
            f"{list(weights[0].shape)} and biases {list(biases[0].shape)}"
        )
    rows = min(sum(len(shard) for shard in table) for table in (weights, biases))
    if num_classes is not None and rows < num_classes:
        raise ValueError(
            f"{caller} got num_classes={num_classes}, but weights and biases of {rows} rows"
        )


def _samples(
    original: Samples, labels: jax.Array, caller: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``sampled_values`` as arrays, constants for differentiation."""
    wanted = (
        f"{caller} wants sampled_values=(sampled [S], true_expected_count "
        f"{list(labels.shape)}, sampled_expected_count [S]), got"
    )
    if len(original) != 3:
        raise ValueError(f"{wanted} {len(original)} of them")
    sampled = as_ids(original[0], caller, "sampled_values[0]")
    of_true, of_sampled = jnp.asarray(original[1]), jnp.asarray(original[2])
    sizes_fit = of_true.size == labels.size and of_sampled.shape == sampled.shape
    if sampled.ndim != 1 or not sizes_fit:
        raise ValueError(
            f"{wanted} the shapes {list(sampled.shape)}, {list(of_true.shape)} and "
            f"{list(of_sampled.shape)}"
        )
    of_true = of_true.reshape(labels.shape)
    return sampled, jax.lax.stop_gradient(of_true), jax.lax.stop_gradient(of_sampled)


class Candidates(NamedTuple):
    """What a candidate sampler returns; expected counts are those of one whole draw."""

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
      true_classes: ``[*B]`` integers, classes whose expected counts are returned as well.
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
      ValueError: if ``range_max`` is not in ``[1, 2^31)``, or there are fewer classes than
        unique ones to draw.

    Cost: O(S log S) for each round of S draws; mostly one to three rounds, many only if S
    is near N. No array of N elements is made.

    Example:
      >>> import jax, jslices as js
      >>> key = jax.random.key(0)
      >>> drawn = js.log_uniform_candidate_sampler([[0]], 5, 1000, key=key)
      >>> drawn.sampled_candidates.shape, drawn.true_expected_count.shape
      ((5,), (1, 1))

    Source: ``tf.random.log_uniform_candidate_sampler``, whose draws come from a global
    generator. Classes beyond 2^23 are drawn as evenly as the others, although 32-bit
    logarithms alone would be too coarse for them.
    """
    caller = "log_uniform_candidate_sampler"
    _check_numbers(caller, num_sampled, range_max, unique)

    def chance(classes: jax.Array) -> jax.Array:
        classes = classes.astype(jnp.float32)
        return jnp.log1p(1 / (classes + 1)) / math.log(range_max + 1)

    classes = as_ids(true_classes, caller, "true_classes")
    return _candidates(classes, chance, unique, key, num_sampled, range_max)


def fixed_unigram_candidate_sampler(
    true_classes: ArrayLike,
    num_sampled: int,
    range_max: int,
    *,
    key: jax.Array,
    unigrams: ArrayLike | Sequence[float],
    unique: bool = True,
    distortion: float | jax.Array = 1.0,
    num_reserved_ids: int = 0,
    num_shards: int = 1,
    shard: int = 0,
) -> Candidates:
    """Classes drawn by their counts: ``P(k) = counts[k] ** distortion / (sum of these)``.

    All else is as in :func:`log_uniform_candidate_sampler`. A true class ``[*B]`` outside
    ``[0, N)`` is expected 0 times.

    Args:
      unigrams: ``[N n - R]`` numbers, the count of each class but the reserved ones. Under
        ``jax.jit`` an argument, as ``distortion`` may be: other counts compile nothing.
      distortion: 1 draws by the counts, 0 draws all alike, 0.75 is that of word2vec.
      num_reserved_ids: R, how many of the first classes have no count and are not drawn.
      num_shards, shard: of n shards one draws; its class k is ``k n + shard`` of all.

    Raises:
      ValueError: also if a count is negative, or too few are above 0 to draw so many. Of
        traced counts negative ones are 0, and N, whose row reads NaN, fills the places.

    Cost: O(N) to sum counts, in float64, and O(S log N), for each round of S draws; many
    rounds only if few classes have most of the counts, or S is near N.

    Example:
      >>> import jax, jslices as js
      >>> key, counts = jax.random.key(0), [0, 5, 0, 1]
      >>> drawn = js.fixed_unigram_candidate_sampler([[1]], 2, 4, key=key, unigrams=counts)
      >>> sorted(drawn.sampled_candidates.tolist())
      [1, 3]

    Source: ``tf.random.fixed_unigram_candidate_sampler``, which raises for true classes out
    of range, and counts ``S P(k)`` of unique classes too if no draw came twice.
    """
    caller = "fixed_unigram_candidate_sampler"
    _check_numbers(caller, num_sampled, range_max, unique)
    counts: Any = jnp.asarray(unigrams, jnp.float32)  # of 64 bits none wraps around
    own = range(shard, num_reserved_ids + counts.size, max(1, num_shards))
    if counts.ndim != 1 or len(own) != range_max or not 0 <= shard < num_shards:
        raise ValueError(
            f"{caller} wants unigrams [range_max * num_shards - num_reserved_ids], got "
            f"{list(counts.shape)} for {range_max=}, {num_shards=}, {num_reserved_ids=}, "
            f"{shard=}"
        )
    weights = jax.lax.stop_gradient(jnp.maximum(counts, 0) ** distortion)
    weights = jnp.pad(weights, (num_reserved_ids, 0))[shard::num_shards]
    above, below = (weights > 0).sum(), (counts < 0).sum()
    few = below | (above < (num_sampled if unique else 1))
    if not isinstance(few, jax.core.Tracer) and few:
        raise ValueError(
            f"{caller} is to draw {num_sampled} classes, unique={unique}, and of the "
            f"counts {above} are above 0, {below} below; type unigrams.clip(1)"
        )
    shares = weights / jnp.maximum(weights.sum(), jnp.finfo(weights.dtype).tiny)

    def chance(classes: jax.Array) -> jax.Array:
        rows = settle(classes, range_max, "fill")
        return shares.at[rows].get(mode="fill", fill_value=0)

    classes = as_ids(true_classes, caller, "true_classes")
    return _candidates(classes, chance, unique, key, num_sampled, range_max, weights)


def _check_numbers(caller: str, num_sampled: int, range_max: int, unique: bool) -> None:
    if not 1 <= range_max <= INT32_MAX:
        raise ValueError(f"{caller} got range_max={range_max}; it must be in [1, 2^31)")
    if num_sampled < 1 or (unique and num_sampled > range_max):
        raise ValueError(
            f"{caller} got num_sampled={num_sampled}, unique={unique} of {range_max} "
            "classes; it must be at least 1, and at most the number of classes if they are "
            "to be unique"
        )


def _candidates(
    true_classes: jax.Array, chance: Any, unique: bool, key: jax.Array, *how: Any
) -> Candidates:
    """Draws; ``how`` are the arguments of ``_draw``, and each class has a ``chance``."""
    sampled, tries = _draw_unique(key, *how) if unique else (_draw(key, *how), how[0])

    def expected(classes: jax.Array) -> jax.Array:
        p = chance(classes)
        return -jnp.expm1(tries * jnp.log1p(-p)) if unique else tries * p

    return Candidates(sampled, expected(true_classes), expected(sampled))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(
    key: jax.Array, count: int, range_max: int, weights: jax.Array | None = None
) -> jax.Array:
    """``[count]`` int32, log-uniform, or by weights ``[range_max]``.

    ``k + 1`` is log-uniform in ``[1, N + 1)``: all octaves (powers of two) are equally
    likely, and within one the logarithm is uniform. Drawing the two separately keeps all
    bits of the fraction; bits below the precision of a float are drawn uniformly.
    """
    if weights is not None:
        high, low = jax.random.bits(key, (2, count), jnp.uint32)
        with jax.enable_x64(True):  # sums of 32 bits would lose the rare classes of many
            sums = jnp.cumsum(weights.astype(jnp.float64))
            share = (high + low.astype(jnp.float64) * 2.0**-32) * 2.0**-32
            return jnp.searchsorted(sums, share * sums[-1], "right").astype(jnp.int32)
    which, where, low = jax.random.split(key, 3)
    octaves = math.log2(range_max + 1)
    octave = jnp.floor(jax.random.uniform(which, (count,)) * octaves).astype(jnp.int32)
    octave = jnp.minimum(octave, math.ceil(octaves) - 1)
    width = jnp.minimum(1.0, octaves - octave)
    fraction = jax.random.uniform(where, (count,)) * width
    offset = jnp.expm1(fraction * math.log(2.0)) * jnp.exp2(jnp.minimum(octave, 23))
    shift = jnp.maximum(octave - 23, 0)
    mask = ((1 << shift) - 1).astype(jnp.uint32)
    bits = jax.random.bits(low, (count,), jnp.uint32) & mask
    numbers = (offset.astype(jnp.int32) << shift) + bits.astype(jnp.int32)
    return jnp.minimum((1 << octave) - 1 + numbers, range_max - 1)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw_unique(
    key: jax.Array, count: int, range_max: int, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The first ``count`` different classes of a sequence of draws, and its length."""
    possible: Any = count
    if weights is not None:
        possible = jnp.minimum(count, jnp.sum(weights > 0, dtype=jnp.int32))

    def more(state: _Draws) -> jax.Array:
        return state[2] < possible

    def draw(state: _Draws) -> _Draws:
        key, chosen, _, tries = state
        key, now = jax.random.split(key)
        pool = jnp.concatenate([chosen, _draw(now, count, range_max, weights)])
        ordered, positions = sort_ids(pool)
        fresh = starts_of_runs(ordered)
        first = jnp.zeros_like(fresh).at[positions].set(fresh, unique_indices=True)
        rank = jnp.cumsum(first & (pool < range_max), dtype=jnp.int32)
        places = jnp.where(first & (pool < range_max), rank - 1, count)
        chosen = jnp.full_like(chosen, range_max).at[places].set(pool, mode="drop")
        distinct = rank[-1]
        # The draw that completed the set was the last that counts.
        used = jnp.where(distinct < count, count, jnp.argmax(rank >= count) - count + 1)
        return key, chosen, distinct, tries + used.astype(jnp.int32)

    nothing, zero = jnp.full((count,), range_max, jnp.int32), jnp.zeros((), jnp.int32)
    _, chosen, _, tries = jax.lax.while_loop(more, draw, (key, nothing, zero, zero))
    return chosen, tries
