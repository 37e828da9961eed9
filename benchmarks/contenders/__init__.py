"""What is compared: a step of the same model in each framework, one framework a file.

A module here has ``VERSION`` and ``make(optimizer, num_rows, dim, rate, ...)``, which
returns ``(step, convert)``: ``step(ids)`` does one whole training step and returns its
loss, which may not be there yet; ``convert`` makes the framework's ids of NumPy's.
``wait(loss)`` waits for it. The model reads rows of a table, and its loss is half their
mean square sum.
"""

import os
from typing import NamedTuple

RATE = 1e-3
OPTIMIZERS = ("sgd", "adagrad", "adam")
FUSED = ("sgd", "adagrad", "rowwise_adagrad")  # FBGEMM's on a CPU
STATE_ARRAYS = {"sgd": 0, "rowwise_adagrad": 0, "adagrad": 1, "adam": 2}
BAG = 20  # ids a bag, where rows are read as sums of bags


class Kind(NamedTuple):
    """How a contender is made: arguments of its module's ``make``.

    ``whole``: whether a step passes over the whole table.
    """

    module: str
    arguments: dict
    whole: bool
    optimizers: tuple = OPTIMIZERS


OURS = (*OPTIMIZERS, "rowwise_adagrad")
EXACT = "jslices, exact"
CONTENDERS = {
    "jslices": Kind("with_jslices", {}, False, OURS),
    "jslices, memory kept": Kind("with_jslices", {"keep": True}, False, OURS),
    "JAX refs": Kind("with_refs", {}, False, ("sgd",)),
    "PyTorch sparse": Kind("with_torch", {"sparse": True}, False),
    "FBGEMM": Kind("with_fbgemm", {}, False, FUSED),
    "TensorFlow sparse": Kind("with_tensorflow", {"keras": False}, False),
    "Optax dense": Kind("with_optax", {}, True),
    "PyTorch dense": Kind("with_torch", {"sparse": False}, True),
    "Keras": Kind("with_tensorflow", {"keras": True}, True),
    EXACT: Kind("with_jslices", {"untouched": "exact"}, False, ("adam",)),
    # The same rows, read otherwise (--reads).
    "jslices, one-hot": Kind("with_jslices", {"read": "one_hot"}, False),
    "jslices, BCOO": Kind("with_jslices", {"read": "bcoo"}, False),
    "jslices, lookup": Kind("with_jslices", {"read": "lookup"}, False),
    "jslices, bags of 20": Kind("with_jslices", {"read": "bags"}, False, OURS),
    "PyTorch, bags of 20": Kind("with_torch", {"sparse": True, "read": "bags"}, False),
    "FBGEMM, bags of 20": Kind("with_fbgemm", {"read": "bags"}, False, FUSED),
}
READS = {
    name: kind.arguments["read"]
    for name, kind in CONTENDERS.items()
    if "read" in kind.arguments
}
OTHER_READS = [name for name in READS if CONTENDERS[name].module == "with_jslices"]
BAGS = [name for name, read in READS.items() if read == "bags"]
USUAL = [name for name in CONTENDERS if name not in READS and name != EXACT]
ON_GPU = ["jslices", EXACT, "PyTorch sparse", "Optax dense", "PyTorch dense"]

#: What the environment of a contender has on each device. They share the memory of a GPU.
DEVICES = {
    "cpu": {"JAX_PLATFORMS": "cpu"},
    "gpu": {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
}


def on_gpu():
    """Whether this process runs on a GPU."""
    return DEVICES["gpu"].items() <= os.environ.items()
