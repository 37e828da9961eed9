"""A word in time to who puts an optimizer of rows into a wrapper that sums dense arrays.

``optax.MultiSteps`` adds each gradient to a dense array before it calls the optimizer. With
IndexedSlices that ends in JAX's error about two structures, raised where no code of ours
runs and which cannot say what to type; ``init`` is called earlier, and can.
"""

import sys
from types import FrameType

from jslices._densify import warn_dense

MESSAGE = (
    "optax.MultiSteps adds gradients to dense arrays as large as the parameters: JAX will "
    "refuse IndexedSlices there ('different types at key path'). To accumulate rows, type "
    "jslices.optim.multi_steps(tx, k, jax.eval_shape(jslices.grad(loss), params, batch)), "
    "or jslices.accumulate_gradients for micro-batches that are there together. If every "
    "gradient is dense, nothing has to change"
)


def warn_in_multi_steps() -> None:
    """Warns once for each line of the user's that is in ``optax.MultiSteps.init``."""
    steps = getattr(sys.modules.get("optax"), "MultiSteps", None)
    code = getattr(getattr(steps, "init", None), "__code__", None)
    if code is None:  # no Optax, or one that is made otherwise
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return warn_dense(MESSAGE)
        frame = frame.f_back
