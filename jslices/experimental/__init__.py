"""Tables whose gradient under plain ``jax.grad`` is rows: a type of JAX's own.

    params = {"table": jslices.experimental.table(array), "w": w}
    grads = jax.grad(loss)(params, ids)  # grads["table"] is an IndexedSlices

For code that calls ``jax.grad`` itself. ``jax.experimental.hijax`` may still change.
"""

import sys as _sys

import jax as _jax

try:
    from jax.experimental.hijax import HiPrim as _HiPrim  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "jslices.experimental wants jax 0.12 and Python 3.12; this is jax "
        f"{_jax.__version__} on Python {_sys.version[:4]}. Type jslices.grad instead of "
        "jax.grad: its gradients are the same rows"
    ) from _error

from jslices.experimental.table import Table, arrays, like, table

__all__ = ["Table", "arrays", "like", "table"]
__dir__ = __all__.copy
