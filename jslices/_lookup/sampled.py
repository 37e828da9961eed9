"""Losses over many classes that look at a few of them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jslices._lookup.candidates import log_uniform_candidate_sampler
from jslices._lookup.embedding import embedding_lookup
from jslices._lookup.partition import as_tables
from jslices._rows.ids import as_ids


def sampled_softmax_loss(
    weights: jax.Array | Sequence[jax.Array],
    biases: jax.Array | Sequence[jax.Array],
    labels: ArrayLike,
    inputs: ArrayLike,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: Any = None,
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
      num_classes: how many there are, V.
      num_true: T.
      sampled_values: ``(sampled [S], true_expected_count [B, T], sampled_expected_count
        [S])`` of some other sampler, instead of the log-uniform one.
      remove_accidental_hits: whether a drawn class that is true for an example is left out
        there.
      partition_strategy: for shards, as in :func:`embedding_lookup`.
      key: a ``jax.random`` key for the draw; needed without ``sampled_values``.

    Returns:
      ``[B]``, the loss of each example. A label outside ``[0, V)`` makes it NaN.

    Gradient: under :func:`jslices.grad` ``weights`` and ``biases`` get IndexedSlices of
    B T + S rows; a class that is both true and drawn has several, and they add.

    Raises:
      TypeError: if ``labels`` are not integers.
      ValueError: if shapes do not fit, neither a key nor samples are given, or classes are
        to be drawn that have no row.

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
    logits, targets = _sampled_logits(
        "sampled_softmax_loss",
        (weights, biases),
        (labels, inputs),
        (num_sampled, num_classes, num_true),
        sampled_values,
        remove_accidental_hits,
        partition_strategy,
        key,
    )
    return -jnp.sum(targets * jax.nn.log_softmax(logits), -1)


def nce_loss(
    weights: jax.Array | Sequence[jax.Array],
    biases: jax.Array | Sequence[jax.Array],
    labels: ArrayLike,
    inputs: ArrayLike,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: Any = None,
    remove_accidental_hits: bool = False,
    partition_strategy: str = "mod",
    *,
    key: jax.Array | None = None,
) -> jax.Array:
    """Noise-contrastive estimation: each true or drawn class is one yes-or-no question.

    Arguments, gradient, errors and cost are those of :func:`sampled_softmax_loss`:
    ``weights`` ``[V, D]``, ``biases`` ``[V]``, ``labels`` ``[B, T]`` or ``[B]``, ``inputs``
    ``[B, D]``. Here a drawn class that is true stays a wrong answer, unless
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
    logits, targets = _sampled_logits(
        "nce_loss",
        (weights, biases),
        (labels, inputs),
        (num_sampled, num_classes, num_true),
        sampled_values,
        remove_accidental_hits,
        partition_strategy,
        key,
    )
    losses = jnp.maximum(logits, 0) - logits * targets
    return jnp.sum(losses + jnp.log1p(jnp.exp(-jnp.abs(logits))), -1)


def _sampled_logits(
    who: str,
    tables: tuple[Any, Any],
    examples: tuple[Any, Any],
    counts: tuple[int, int, int],
    sampled_values: Any,
    remove_accidental_hits: bool,
    partition_strategy: str,
    key: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Logits and targets ``[B, T + S]``, those of the true classes first."""
    num_sampled, num_classes, num_true = counts
    inputs = jnp.asarray(examples[1])
    labels = _labels(examples[0], inputs, num_true, who)
    _check_tables(tables, inputs, num_classes if sampled_values is None else None, who)
    if sampled_values is None:
        if key is None:
            raise ValueError(
                f"{who} draws classes and needs key=jax.random.key(...), a new one each "
                "step, or sampled_values="
            )
        sampled_values = log_uniform_candidate_sampler(
            labels, num_sampled, num_classes, key=key
        )
    sampled, of_true, of_sampled = _samples(sampled_values, labels, who)
    # Labels may come in a dtype that cannot hold every class that is drawn.
    wide = jnp.promote_types(jnp.promote_types(labels.dtype, sampled.dtype), jnp.int32)
    ids = jnp.concatenate([labels.reshape(-1).astype(wide), sampled.astype(wide)])
    rows, offsets = (
        embedding_lookup(table, ids, partition_strategy=partition_strategy)
        for table in tables
    )
    count, dtype = labels.size, rows.dtype
    true_rows = rows[:count].reshape(*labels.shape, rows.shape[-1])
    true = jnp.einsum("bd,btd->bt", inputs, true_rows) + offsets[:count].reshape(
        labels.shape
    )
    drawn = inputs @ rows[count:].T + offsets[None, count:]
    true -= jnp.log(of_true).astype(dtype)
    drawn -= jnp.log(of_sampled).astype(dtype)[None]
    if remove_accidental_hits:
        hits = (labels[:, :, None] == sampled[None, None]).any(1)
        drawn = jnp.where(hits, jnp.finfo(drawn.dtype).min, drawn)
    logits = jnp.concatenate([true, drawn], 1)
    targets = [jnp.full_like(true, 1 / num_true), jnp.zeros_like(drawn)]
    return logits, jax.lax.stop_gradient(jnp.concatenate(targets, 1))


def _labels(given: Any, inputs: jax.Array, num_true: int, who: str) -> jax.Array:
    labels = as_ids(given, who, "labels")
    labels = labels[:, None] if labels.ndim == 1 else labels
    if inputs.ndim != 2 or labels.shape != (inputs.shape[0], num_true):
        raise ValueError(
            f"{who} wants inputs [B, D] and labels [B, num_true={num_true}], got inputs "
            f"{list(inputs.shape)} and labels {list(labels.shape)}"
        )
    return labels


def _check_tables(
    tables: tuple[Any, Any], inputs: jax.Array, num_classes: int | None, who: str
) -> None:
    """Refuses tables that do not fit the inputs, or hold fewer classes than are drawn."""
    weights, biases = (as_tables(table, who) for table in tables)
    if weights[0].shape[1:] != inputs.shape[1:] or biases[0].ndim != 1:
        raise ValueError(
            f"{who} wants weights [V, D={inputs.shape[1]}] and biases [V], got weights "
            f"{list(weights[0].shape)} and biases {list(biases[0].shape)}"
        )
    rows = min(sum(len(shard) for shard in table) for table in (weights, biases))
    if num_classes is not None and rows < num_classes:
        raise ValueError(
            f"{who} got num_classes={num_classes}, but weights and biases of {rows} rows"
        )


def _samples(
    given: Any, labels: jax.Array, who: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``sampled_values`` as arrays; they are constants for differentiation."""
    if len(given) != 3:
        raise ValueError(
            f"{who} wants sampled_values=(sampled [S], true_expected_count "
            f"{list(labels.shape)}, sampled_expected_count [S]), got {len(given)} of them"
        )
    sampled = as_ids(given[0], who, "sampled_values[0]")
    of_true, of_sampled = jnp.asarray(given[1]), jnp.asarray(given[2])
    if (
        sampled.ndim != 1
        or of_true.size != labels.size
        or of_sampled.shape != sampled.shape
    ):
        raise ValueError(
            f"{who} wants sampled_values=(sampled [S], true_expected_count "
            f"{list(labels.shape)}, sampled_expected_count [S]), got the shapes "
            f"{list(sampled.shape)}, {list(of_true.shape)} and {list(of_sampled.shape)}"
        )
    of_true = of_true.reshape(labels.shape)
    return sampled, jax.lax.stop_gradient(of_true), jax.lax.stop_gradient(of_sampled)
