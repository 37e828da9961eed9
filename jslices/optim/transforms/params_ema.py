"""An exponential moving average of the parameters, row by row."""

from jslices._typing import Transformation
from jslices.optim.engine.arguments import Decay
from jslices.optim.engine.constructors import combinator
from jslices.optim.engine.protocol import GradientTransformation


@combinator
def params_ema(tx: Transformation, decay: Decay) -> GradientTransformation:
    """Keep an exponential moving average of the parameters, in the step of an optimizer.

    ``ema = decay * ema + (1 - decay) * params`` after each step, from the parameters that
    ``tx.init`` gets. Rows that are not read wait, and make up for it in closed form, also
    under an exact optimizer, which moves them meanwhile.

    Untouched rows: as ``tx`` treats them, and so are duplicates and out-of-range ids.

    Args:
      tx: an optimizer of jslices; ``chain``, ``partition``, ``multi_steps``,
        ``freeze_rows`` and the like go around ``params_ema(tx, decay)``.
      decay: above 0, below 1.

    Returns:
      The optimizer, whose state has the average as ``ema``, like params and at least
      float32; all of its rows are up to date after ``tx.flush(params, state)``. Rows catch
      up before they are read, of a lazy ``tx`` too: :func:`jslices.train_step` sees to it.

    Raises:
      TypeError: if ``tx`` is not an optimizer of jslices.
      ValueError: for one whose rows move in a way that has no closed form here, or decay
        faster than the average.

    Cost: ``D`` numbers a row more, read and written with it, up to seven for missed steps.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx, table = js.optim.params_ema(js.sgd(1.0), 0.5), jnp.zeros((3, 1))
      >>> step = js.train_step(lambda table, ids: table[ids].sum(), tx)
      >>> table, state, value = step(table, tx.init(table), jnp.array([0]))
      >>> table, state, value = step(table, state, jnp.array([1]))
      >>> tx.flush(table, state)[1].ema.ravel()
      Array([-0.75, -0.5 ,  0.  ], dtype=float32)

    Source: ``optax.incremental_update(params, ema, 1 - decay)`` after each step.
    """
    make = tx.averaged if isinstance(tx, GradientTransformation) else None
    if make is None or not decay:
        raise TypeError(
            f"params_ema wants a plain optimizer of jslices, decay above 0, got {tx!r}, "
            f"{decay}; links and wrappers go around it: ema = jslices.optim.params_ema("
            "jslices.adam(1e-3), 0.999), then jslices.optim.freeze_rows(ema, frozen)"
        )
    return make(float(decay))
