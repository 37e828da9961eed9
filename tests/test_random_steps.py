"""Random optimizers in random wrappers, stepped at random, against Optax's dense steps.

An optimizer is drawn as text that means one thing in jslices and another in Optax.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import PROGRAMS, fast_jit
from hypothesis import given, settings
from hypothesis import strategies as st

import jslices as js

V, D, K = 5, 2, 3
TABLES = {"table": (V, D), "other": (V, D)}
FROZEN = {"table": np.arange(V) == 1, "other": np.arange(V) > 3, "w": None}
SCHEDULE = optax.linear_schedule(0.1, 0.02, 3)
SHAPES = {
    name: js.IndexedSlices(np.zeros((K, D), np.float32), np.zeros(K, np.int32), shape)
    for name, shape in TABLES.items()
} | {"w": np.zeros(3, np.float32)}


def freeze(tx):
    """``js.optim.freeze_rows`` in Optax: frozen rows get no gradient, and do not move."""

    def free(name, x):
        array = FROZEN.get(name) is not None and isinstance(x, jax.Array)
        return jnp.where(FROZEN[name][:, None], 0, x) if array else x

    def update(grads, state, params=None):
        grads = {name: free(name, x) for name, x in grads.items()}
        updates, state = tx.update(grads, state, params)
        return {name: free(name, x) for name, x in updates.items()}, state

    return optax.GradientTransformation(tx.init, update)


def lazy(tx):
    """``tx`` undone in the rows of tables, and of its state, that get no gradient."""

    def update(grads, state, params=None):
        def kept(path, new, old):
            names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            if not names or names[-1] not in TABLES:
                return new
            return jnp.where((grads[names[-1]] != 0).any(axis=1, keepdims=True), new, old)

        found = tx.update(grads, state, params)
        before = jax.tree.map(jnp.zeros_like, found[0]), state
        return jax.tree_util.tree_map_with_path(kept, found, before)

    return optax.GradientTransformation(tx.init, update)


NAMES = ("sgd", "adam", "adamw", "amsgrad", "lion", "rmsprop", "adadelta", "adagrad")
OURS = {
    **vars(js.optim),
    "clip_by_global_norm": js.optim.clip_global_norm,
    "multi_steps": lambda tx, k: js.optim.multi_steps(tx, k, SHAPES),
    "freeze": lambda tx: js.optim.freeze_rows(tx, FROZEN),
}
THEIRS = {
    **vars(optax),
    "multi_steps": lambda tx, k: optax.MultiSteps(tx, k).gradient_transformation(),
    "freeze": freeze,
}


def both(code, untouched):
    """The optimizer of jslices, and Optax's dense one."""
    ours, theirs = {**OURS, "SCHEDULE": SCHEDULE}, {**THEIRS, "SCHEDULE": SCHEDULE}
    for name in NAMES:
        how = {} if name == "adagrad" else {"untouched": untouched}  # which has no other
        ours[name] = functools.partial(getattr(js, name), **how)
        if untouched == "lazy":
            theirs[name] = lambda *args, make=theirs[name], **how: lazy(make(*args, **how))
    return eval(code, ours), eval(code, theirs)


RATES = st.sampled_from(["0.1", "SCHEDULE"])
ALONE = ["sgd({})", "adam({})", "sgd({}, momentum=0.9)", "adamw({}, weight_decay=0.1)"]
ALONE += ["amsgrad({})", "lion({}, weight_decay=0.1)", "rmsprop({}, momentum=0.5)"]
ALONE += ["adadelta({})", "adagrad({})", "sgd({}, momentum=0.9, nesterov=True)"]
AROUND = ["chain(clip(0.5), {})", "chain(clip_by_global_norm(0.9), {})", "freeze({})"]
AROUND += [
    "chain(scale(0.5), {})",
    'masked({}, {{"table": True, "other": False, "w": True}})',
]
AROUND += [
    'partition({{"a": {}, "b": adam(0.1)}}, {{"table": "a", "other": "b", "w": "a"}})'
]
AROUND += ["multi_steps({}, 2)"]
OPTIMIZERS = st.recursive(
    st.builds(str.format, st.sampled_from(ALONE), RATES),
    lambda inner: st.builds(str.format, st.sampled_from(AROUND), inner),
    max_leaves=3,
)
#: For each table the ids of a step, or that it is left out.
IDS = st.none() | st.lists(st.integers(-1, V), min_size=K, max_size=K)
STEPS = st.lists(st.fixed_dictionaries(dict.fromkeys(TABLES, IDS)), min_size=1, max_size=4)


def gradients_of(steps):
    rng = np.random.default_rng(0)
    for step in steps:
        grads = {"w": jnp.asarray(rng.normal(size=3), jnp.float32)}
        for name, ids in step.items():
            ids = jnp.array([] if ids is None else ids, jnp.int32)
            rows = jnp.asarray(rng.normal(size=(len(ids), D)), jnp.float32)
            grads[name] = js.IndexedSlices(rows, ids, TABLES[name])
        yield grads


def check(code, steps, untouched, method):
    ours, theirs = both(code, untouched)
    rng = np.random.default_rng(1)
    sizes = {**TABLES, "w": (3,)}
    start = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}

    def step(params, state, grads):
        if untouched == "exact":
            ids = {name: grads[name].indices for name in TABLES} | {"w": None}
            params, state = ours.catch_up(params, state, ids)
        if method == "apply":
            return ours.apply(grads, state, params)
        updates, state = ours.update(grads, state, params)
        return js.apply_updates(params, updates), state

    def dense_step(params, state, grads):
        whole = lambda g: g.to_dense() if js.is_slices(g) else g  # noqa: E731
        grads = jax.tree.map(whole, grads, is_leaf=js.is_slices)
        updates, state = theirs.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @fast_jit
    def run(start, grads):
        found, wanted = (start, ours.init(start)), (start, theirs.init(start))
        for grad in grads:
            found, wanted = step(*found, grad), dense_step(*wanted, grad)
        found = ours.flush(*found) if untouched == "exact" else found
        return found[0], wanted[0]

    found, wanted = jax.device_get(run(start, list(gradients_of(steps))))
    for name in sizes:
        moved = wanted[name] != start[name]
        np.testing.assert_array_equal(found[name][~moved], start[name][~moved])
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=2e-5)


METHODS = st.sampled_from(["update", "apply"])
UNTOUCHED = st.sampled_from(["lazy", "exact"])


@settings(max_examples=8)
@given(OPTIMIZERS, STEPS, UNTOUCHED, METHODS)
def test_a_few_random_optimizers(code, steps, untouched, method):
    check(code, steps, untouched, method)


@pytest.mark.fuzz
@pytest.mark.slow
@settings(max_examples=2 * PROGRAMS)
@given(OPTIMIZERS, STEPS, UNTOUCHED, METHODS)
def test_random_optimizers(code, steps, untouched, method):
    check(code, steps, untouched, method)
