"""Frequency scaling: what several occurrences of one row add up to."""

import jax.numpy as jnp

from jslices._rows.sums import check_combine
from jslices._slices import is_slices
from jslices.optim._engine.protocol import GradientTransformation
from jslices.optim.transforms.stateless import each_leaf


def combine_duplicates(combine: str) -> GradientTransformation:
    """Merges duplicate rows: a frequent row counts less than the sum of its occurrences.

    Untouched rows stay untouched. Dense arrays pass as they are: their duplicates were
    summed already, and the number of them is not known.

    Args:
      combine: ``"sum"``, ``"mean"`` (the sum divided by the number of occurrences), or
        ``"sqrtn"`` (divided by the square root of it).

    Returns:
      A stateless :class:`jslices.GradientTransformation`; put it first in a chain, as
      everything after it sees each row once.

    Raises:
      ValueError: for another ``combine``.

    Cost: a sort of K integers and two passes over ``K * D`` elements per IndexedSlices.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> grads = js.IndexedSlices(jnp.array([2., 4.]), jnp.array([1, 1]), (9,))
      >>> js.optim.combine_duplicates("mean").update(grads, ())[0].values
      Array([3., 0.], dtype=float32)

    Source: PyTorch's ``scale_grad_by_freq``, there for dense gradients only. See
    :meth:`jslices.IndexedSlices.coalesce`.
    """
    check_combine(combine, jnp.dtype("float32"))
    return each_leaf(lambda g: g.coalesce(combine=combine) if is_slices(g) else g)
