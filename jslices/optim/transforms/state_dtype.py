"""An optimizer state of another dtype than the parameters."""

from typing import Annotated

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jslices._arguments import StateDtype
from jslices._typing import Gradients, Params, PyTree, Transformation
from jslices.optim.engine.constructors import combinator
from jslices.optim.engine.protocol import GradientTransformation
from jslices.optim.transforms.base import as_transformation, renumbering


@combinator
def with_state_dtype(
    tx: Transformation, dtype: Annotated[DTypeLike, StateDtype(complex=False)]
) -> GradientTransformation:
    """Give the state of an optimizer a dtype of its own.

    For tables of 16 bits: means and sums of many steps need more. In bfloat16 a mean that
    decays by 0.999 stays where it is, as nearest rounding undoes the decay, and a sum of
    squares stops growing at 256 times what is added.

    Untouched rows: as ``tx`` treats them, and so are duplicates and out-of-range ids.

    Args:
      tx: an optimizer of jslices or of Optax, or what combinators make of some.
      dtype: a floating dtype, for every array of the state that would have that of its
        parameter. Arrays with a dtype of their own (``mu_dtype``, clocks) keep it.

    Returns:
      A :class:`jslices.GradientTransformation` that steps as ``tx`` does and keeps the
      dtypes of its state: for jslices with any gradients; for Optax if its own arithmetic
      does, and in ``apply`` with a key.

    Raises:
      TypeError: if ``dtype`` is not floating, or ``tx`` not a transformation.

    Cost: none in a step; ``init``, unless jitted, makes the parameters in ``dtype``.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> table = jnp.ones((1000, 8), jnp.bfloat16)
      >>> tx = js.optim.with_state_dtype(js.rowwise_adagrad(0.1), "float32")
      >>> tx.init(table).sum_of_squares.dtype
      dtype('float32')

    Source: ours; ``optax.adam`` has ``mu_dtype``, for the first of its two means.
    """
    tx, wide = as_transformation("with_state_dtype", tx), jnp.dtype(dtype)

    def cast(x: ArrayLike) -> ArrayLike:
        floating = jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)
        return jnp.asarray(x, wide) if floating else x

    in_dtype = lambda params: jax.tree.map(cast, params)  # noqa: E731

    def plan(grads: Gradients, params: Params, platform: str | None = None) -> PyTree:
        return tx.plan(grads, jax.eval_shape(in_dtype, params), platform)

    of_rows = renumbering(lambda tx: with_state_dtype(tx, wide), tx)
    return tx.replace(init=lambda p: tx.init(in_dtype(p)), plan=plan, of_rows=of_rows)
