"""Row gradients in Keras 3, on its JAX backend.

Keras' ``fit`` gives an ``Embedding`` a gradient as large as its table, and its optimizers
read and write all of it at every step. Two calls change that::

    model = jk.row_gradients(model)                      # a train step with row gradients
    model.compile(jk.Optimizer(js.adam, 1e-3), "mse")    # an optimizer that takes them

:mod:`jslices.keras.optimizer` keeps the state of an optimizer of jslices in Keras'
variables; :mod:`jslices.keras.training` is the train step.
"""

from jslices._install import install_command

try:
    import keras
except ImportError as error:  # Keras itself, or TensorFlow, its default backend
    raise ImportError(
        f"jslices.keras needs Keras 3 on its JAX backend: {install_command('keras')}, and "
        "set the environment variable KERAS_BACKEND=jax before Keras is imported"
    ) from error

if keras.backend.backend() != "jax":
    raise ImportError(
        f"jslices.keras needs Keras on its JAX backend, not {keras.backend.backend()}: set "
        "the environment variable KERAS_BACKEND=jax before Keras is imported"
    )

from jslices.keras.optimizer import Optimizer as Optimizer
from jslices.keras.training import row_gradients as row_gradients

__all__ = ["Optimizer", "row_gradients"]
__dir__ = __all__.copy
