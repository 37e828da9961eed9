"""What is compared: a step of the same model in each framework, one framework a file.

A module here has ``VERSION`` and ``make(optimizer, num_rows, dim, rate, ...)``, which
returns ``(step, convert)``: ``step(ids)`` does one whole training step and returns its
loss, which may not be there yet; ``convert`` makes the framework's ids of NumPy's.
``wait(loss)`` waits for it. The model reads rows of a table, and its loss is half their
mean square sum.
"""

RATE = 1e-3
OPTIMIZERS = ("sgd", "adagrad", "adam")
STATE_ARRAYS = {"sgd": 0, "adagrad": 1, "adam": 2}

#: name -> (module, arguments, whether a step passes over the whole table)
CONTENDERS = {
    "jslices": ("with_jslices", {}, False),
    "jslices, memory kept": ("with_jslices", {"keep": True}, False),
    "PyTorch sparse": ("with_torch", {"sparse": True}, False),
    "TensorFlow sparse": ("with_tensorflow", {"keras": False}, False),
    "Optax dense": ("with_optax", {}, True),
    "PyTorch dense": ("with_torch", {"sparse": False}, True),
    "Keras": ("with_tensorflow", {"keras": True}, True),
}
