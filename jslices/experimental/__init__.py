"""Tables whose gradient under plain ``jax.grad`` is rows: a type of JAX's own.

    from jslices import experimental

    params = {"table": experimental.table(array), "w": w}
    grads = jax.grad(loss)(params, ids)  # grads["table"] is an IndexedSlices

For code that calls ``jax.grad`` itself: trainers, ``nnx.value_and_grad``, NumPyro, jaxopt.
It rests on ``jax.experimental.hijax``, which JAX still changes: so may this module. Where
one's own code takes the gradient, :func:`jslices.grad` does the same for plain arrays.
"""

import sys as _sys

import jax as _jax

try:
    from jax.experimental.hijax import HiPrim as _HiPrim  # noqa: F401
except ImportError as _error:
    _python = ".".join(map(str, _sys.version_info[:2]))
    raise ImportError(
        "jslices.experimental wants jax.experimental.hijax as of jax 0.12, which needs "
        f"Python 3.12; this is jax {_jax.__version__} on Python {_python}. Type "
        "jslices.grad instead of jax.grad: its gradients are the same rows"
    ) from _error

from jslices.experimental.call import arrays as arrays
from jslices.experimental.call import like as like
from jslices.experimental.table import Table as Table
from jslices.experimental.table import table as table

__all__ = ["Table", "arrays", "like", "table"]
