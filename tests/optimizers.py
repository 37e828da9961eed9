"""One table of optimizers and their settings, and the oracles they are compared with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import numpy_dense

import jslices as js

V, D = 9, 3
SCHEDULE = optax.cosine_decay_schedule(0.1, 10)

# (name, keyword arguments). Optax has these under the same names; the results are equal on
# dense gradients, and on rows as well, since each element is stepped by itself.
SHARED = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("adagrad", {}),
    ("adagrad", {"initial_accumulator_value": 0.0, "eps": 1e-3}),
    ("adam", {}),
    ("adam", {"b1": 0.8, "b2": 0.95, "eps": 1e-3, "eps_root": 1e-4}),
    ("adam", {"nesterov": True}),
    ("adamw", {}),
    ("adamw", {"weight_decay": 0.1, "nesterov": True}),
    ("adamw", {"weight_decay": optax.linear_schedule(0.1, 0.0, 5)}),
    ("adamw", {"weight_decay": 0.1, "mask": {"table": True, "w": False}}),
    ("amsgrad", {}),
    ("amsgrad", {"bias_correction_mu": False, "bias_correction_nu": False}),
    ("rmsprop", {}),
    ("rmsprop", {"momentum": 0.9, "initial_scale": 1.0, "eps_in_sqrt": False}),
    ("rmsprop", {"centered": True, "momentum": 0.9, "nesterov": True, "eps": 1e-2}),
    ("rmsprop", {"bias_correction": True, "decay": 0.8}),
    ("adadelta", {}),
    ("adadelta", {"weight_decay": 0.1, "rho": 0.8}),
    ("lion", {}),
    ("lion", {"weight_decay": 0.0, "b1": 0.8}),
    ("lion", {"weight_decay": 0.1, "mask": lambda params: {"table": False, "w": True}}),
]
# Norms and means are those of the whole array for a dense gradient, of a row for slices.
BY_ROW = [
    ("lamb", {}),
    ("lamb", {"weight_decay": 0.1, "mask": {"table": True, "w": False}}),
    ("adafactor", {"learning_rate": 0.1}),
    ("adafactor", {"min_dim_size_to_factor": 1}),
    ("adafactor", {"momentum": 0.9, "weight_decay_rate": 0.01, "factored": False}),
]
# Not in Optax.
OWN = [
    ("rowwise_adagrad", {}),
    ("sgd", {"weight_decay": 0.1, "mask": {"table": True, "w": False}}),
    ("adagrad", {"eps_in_sqrt": False, "initial_accumulator_value": 0.0}),
    ("adam", {"bias_correction": "row"}),
    ("rowwise_adagrad", {"initial_accumulator_value": 0.1, "eps": 1e-3}),
    ("rowwise_adagrad", {"weight_decay": 0.1, "mask": {"table": True, "w": False}}),
    ("partial_rowwise_adam", {}),
    ("partial_rowwise_adam", {"weight_decay": optax.linear_schedule(0.1, 0.0, 5)}),
    ("ftrl", {}),
    ("ftrl", {"beta": 0.5, "l1_regularization_strength": 0.01}),
    (
        "ftrl",
        {
            "learning_rate_power": -0.6,
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.02,
            "l2_shrinkage_regularization_strength": 0.03,
        },
    ),
    ("proximal_adagrad", {}),
    (
        "proximal_adagrad",
        {"l1_regularization_strength": 0.1, "l2_regularization_strength": 0.2},
    ),
]
ALL = [*SHARED, *BY_ROW, *OWN]
# The first settings of each optimizer.
FIRST = [*{name: (name, kwargs) for name, kwargs in reversed(ALL)}.values()][::-1]
# Settings with which an optimizer keeps other arrays than with its first ones.
OTHER_STATE = [case for case in ALL if {"momentum", "min_dim_size_to_factor"} & {*case[1]}]
OTHER_STATE += [case for case in OWN if "row" in case[1].values()]
# One of each kind: without state, with arrays as large as the table, with numbers for each
# row, with factors; and those that read parameters, or take norms of their rows.
KINDS = ("sgd", "adam", "rowwise_adagrad", "adafactor", "ftrl", "lamb")
KINDS = [case for case in FIRST if case[0] in KINDS]
# One without a second state array, one with two, one that reads the parameters.
THREE = [("sgd", {"momentum": 0.9}), ("adam", {}), ("ftrl", {})]

IDS = {
    "unique": [7, 0, 3, 8, 1, 2],
    "duplicated": [2, 5, 2, 2, 8, 5],
    "padded": [4, V, -1, 4, V + 3, 0],
    "empty": [V, -1, V, V + 3, -1, V],
    "all_equal": [6] * 6,
}


def label(case):
    if isinstance(case, dict):
        return "-".join(f"{k}={v}" for k, v in case.items() if isinstance(v, int | float))
    return "schedule" if callable(case) else str(case)


def make(module, name, rate, kwargs):
    """The optimizer of that name; ``rate`` unless the settings have a learning rate."""
    if "learning_rate" in kwargs:
        return getattr(module, name)(**kwargs)
    return getattr(module, name)(rate, **kwargs)


def rng_tree(rng, dtype=jnp.float32):
    shapes = {"table": (V, D), "w": (4,)}
    return {name: drawn(rng, shape, dtype) for name, shape in shapes.items()}


def drawn(rng, shape, dtype=jnp.float32):
    """Normal numbers; placed by ``device_put``, which compiles nothing."""
    return jax.device_put(np.asarray(rng.normal(size=shape), dtype))


def slices_of(rng, ids, shape=(V, D), dtype=jnp.float32):
    values = drawn(rng, (len(ids), *shape[1:]), dtype)
    return js.IndexedSlices(values, jax.device_put(np.array(ids, np.int32)), shape)


def only_touched(tx):
    """A step of ``tx`` on dense gradients, undone in the rows that no index names."""

    def step(params, state, grads):
        table = jax.device_get(grads["table"])
        dense = numpy_dense(table.values.astype(np.float32), table.indices, (V, D))
        touched = np.isin(np.arange(V), table.indices)
        given = {**grads, "table": dense.astype(table.values.dtype)}
        updates, new_state = jax.device_get(tx.update(given, state, params))
        params, state = jax.device_get((params, state))
        new = jax.tree.map(np.add, params, updates)

        def kept(path, old, new):
            if jax.tree_util.DictKey("table") not in path or old.shape[:1] != (V,):
                return np.asarray(new, old.dtype)
            rows = touched.reshape(-1, *(1,) * (old.ndim - 1))
            return np.where(rows, new, old).astype(old.dtype)

        keep = jax.tree_util.tree_map_with_path
        return keep(kept, params, new), keep(kept, state, new_state)

    return step


def each_row(tx):
    """``tx`` with every row of the table as a parameter by itself."""
    axes = {"table": 0, "w": None}

    def init(params):
        return jax.vmap(tx.init, in_axes=(axes,), axis_size=V)(params)

    @jax.jit
    def update(grads, state, params):
        updates, state = jax.vmap(tx.update, in_axes=(axes, 0, axes))(grads, state, params)
        return {**updates, "w": updates["w"][0]}, state

    return optax.GradientTransformation(init, update)
