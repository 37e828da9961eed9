"""The loss of two towers: each query's item among the items of the batch."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import jslices as js
from jslices import extend
from jslices.retrieval.arguments import by_query, floats


def in_batch_softmax_loss(
    queries: jax.Array,
    items: jax.Array,
    item_ids: ArrayLike,
    log_q: ArrayLike | None = None,
    *,
    temperature: float | jax.Array = 1.0,
) -> jax.Array:
    """Softmax cross entropy of each query's item among the items of the batch.

    The logit of item j for query i is ``queries[i] . items[j] / temperature - log_q[j]``.
    Another place of the batch with the item that query i has is left out for it: an
    accidental hit.

    Args:
      queries: ``[B, D]`` of any floating dtype.
      items: ``[B, D]``, the row of each query's item.
      item_ids: integers ``[B]``. They are only compared, so any number will do.
      log_q: floats ``[B]``, the log of the probability that an item is in a batch; None
        corrects nothing. Popular items are else punished, as they often are negatives.
      temperature: above 0.

    Returns:
      ``[B]`` losses, float32 or wider. Gradients are those of queries, items, ``log_q`` and
      temperature; of tables that these are looked up in, rows.

    Raises:
      TypeError: if queries or items are not floats, or ``item_ids`` not integers.
      InvalidArgumentError: (a ValueError) if shapes do not fit, for a temperature of 0.

    Cost: B^2 D products and ``[B, B]`` logits.

    Example:
      >>> import jax.numpy as jnp
      >>> from jslices.retrieval import in_batch_softmax_loss
      >>> rows, log_q = jnp.eye(3), jnp.log(jnp.array([0.5, 0.5, 0.25]))
      >>> in_batch_softmax_loss(rows, rows, [7, 7, 2], log_q).shape
      (3,)

    Source: the ``Retrieval`` task of TensorFlow Recommenders with
    ``candidate_sampling_probability=exp(log_q)``, which it clips at 1e-6, and
    ``remove_accidental_hits``; it sums the losses (Yi et al., 2019).
    """
    caller = "in_batch_softmax_loss"
    extend.Number(above=0).check(caller, "temperature", temperature)
    queries, items = floats(queries, caller, "queries"), floats(items, caller, "items")
    ids = extend.as_ids(item_ids, caller, "item_ids")
    bias = jnp.zeros(ids.shape) if log_q is None else jnp.asarray(log_q)
    if queries.ndim != 2 or not (
        queries.shape == items.shape and ids.shape == bias.shape == queries.shape[:1]
    ):
        raise js.InvalidArgumentError(
            f"{caller} wants queries and items [B, D], item_ids and log_q [B], got "
            f"{', '.join(str(list(x.shape)) for x in (queries, items, ids, bias))}; of "
            "several items for each query pass one at a time"
        )
    return _in_batch(queries, items, ids, bias, temperature)


@extend.on_any_mesh(by_query)
def _in_batch(
    queries: jax.Array,
    items: jax.Array,
    ids: jax.Array,
    log_q: jax.Array,
    temperature: float | jax.Array,
) -> jax.Array:
    logits = queries @ items.T / temperature - log_q.astype(queries.dtype)[None]
    other = ~jnp.eye(len(ids), dtype=bool)
    # No number that is only very small: it would be large for logits of another size.
    logits = jnp.where((ids[:, None] == ids[None]) & other, -jnp.inf, logits)
    return jax.nn.logsumexp(logits, -1) - jnp.diagonal(logits)
