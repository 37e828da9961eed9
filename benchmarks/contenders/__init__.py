"""What is compared: a step of the same model in each framework, one framework a file.

A module here has ``VERSION`` and ``make(optimizer, num_rows, dim, rate, ...)``, which
returns ``(step, convert)``: ``step(ids)`` does one whole training step and returns its
loss, which may not be there yet; ``convert`` makes the framework's ids of NumPy's.
``wait(loss)`` waits for it. The model reads rows of a table, and its loss is half their
mean square sum.
"""

from typing import NamedTuple

RATE = 1e-3
OPTIMIZERS = ("sgd", "adagrad", "adam")
STATE_ARRAYS = {"sgd": 0, "adagrad": 1, "adam": 2}


class Kind(NamedTuple):
    """How a contender is made: arguments of its module's ``make``.

    ``whole``: whether a step passes over the whole table.
    """

    module: str
    arguments: dict
    whole: bool
    optimizers: tuple = OPTIMIZERS


CONTENDERS = {
    "jslices": Kind("with_jslices", {}, False),
    "jslices, memory kept": Kind("with_jslices", {"keep": True}, False),
    "JAX refs": Kind("with_refs", {}, False, ("sgd",)),
    "PyTorch sparse": Kind("with_torch", {"sparse": True}, False),
    "FBGEMM": Kind("with_fbgemm", {}, False, ("sgd", "adagrad")),  # no Adam on a CPU
    "TensorFlow sparse": Kind("with_tensorflow", {"keras": False}, False),
    "Optax dense": Kind("with_optax", {}, True),
    "PyTorch dense": Kind("with_torch", {"sparse": False}, True),
    "Keras": Kind("with_tensorflow", {"keras": True}, True),
    # The same rows, read otherwise (--reads).
    "jslices, one-hot": Kind("with_jslices", {"read": "one_hot"}, False),
    "jslices, BCOO": Kind("with_jslices", {"read": "bcoo"}, False),
    "jslices, lookup": Kind("with_jslices", {"read": "lookup"}, False),
    "jslices, bags of 20": Kind("with_jslices", {"read": "bags"}, False),
}
OTHER_READS = [name for name, kind in CONTENDERS.items() if "read" in kind.arguments]
