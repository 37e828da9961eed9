"""Random optimizers in random wrappers, stepped at random, against Optax's dense steps.

An optimizer is drawn as text that means one thing in jslices and another in Optax.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import examples
from helpers import assert_close, fast_jit
from hypothesis import given
from hypothesis import strategies as st
from test_random_programs import program

import jslices as js

V, D = 6, 3
TABLES = {"a": (V, D), "b": (V, D)}  # as in random programs
FROZEN = {"a": np.arange(V) == 1, "b": np.arange(V) > 3, "w": None}
SCHEDULE = optax.linear_schedule(0.1, 0.02, 3)
SHAPES = {
    name: js.IndexedSlices(np.zeros((V, D), np.float32), np.zeros(V, np.int32), shape)
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
    "clip_by_global_norm": js.optim.clip_by_global_norm,
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
    'masked({}, {{"a": True, "b": False, "w": True}})',
]
AROUND += ['partition({{"x": {}, "y": adam(0.1)}}, {{"a": "x", "b": "y", "w": "x"}})']
AROUND += ["multi_steps({}, 2)"]
OPTIMIZERS = st.recursive(
    st.builds(str.format, st.sampled_from(ALONE), RATES),
    lambda inner: st.builds(str.format, st.sampled_from(AROUND), inner),
    max_leaves=3,
)


@st.composite
def programs(draw):
    rng = draw(st.randoms(use_true_random=False))
    return program(lambda *options: rng.choice(options), x64=False, sure=True)


#: For each table the ids of a step, or that it is left out.
IDS = st.none() | st.lists(st.integers(-1, V), min_size=V, max_size=V)
IDS = st.fixed_dictionaries(dict.fromkeys(TABLES, IDS))
#: These, or a program that reads tables.
STEPS = st.lists(IDS | programs().filter(lambda drawn: drawn.sure), min_size=1, max_size=4)


def of_ids(ids, rng):
    """``gradients(params)`` of rows with these ids."""
    grads = {}
    for name, numbers in ids.items():
        indices = jnp.array([] if numbers is None else numbers, jnp.int32)
        rows = jnp.asarray(rng.normal(size=(len(indices), D)), jnp.float32)
        grads[name] = js.IndexedSlices(rows, indices, TABLES[name])
    return lambda params: grads


def of_program(names, code):
    """``gradients(params)`` of a random program, for the optimizer of this text."""

    def short(grad):  # in any order such numbers have the same sum
        rows = jnp.clip(jnp.round(16 * jnp.nan_to_num(grad.values)), -64, 64) / 16
        grad = js.IndexedSlices(rows, grad.indices, grad.dense_shape)
        return grad.coalesce(V) if "multi_steps" in code else grad  # which knows how many

    def gradients(params):
        tables = {name: params[name] for name in TABLES}
        grads = js.grad(names["loss"])(names["P"] | tables, names["A"])
        return {name: short(grads[name]) for name in TABLES}

    return gradients


def without_zeros(grad):
    """Without entries of rows whose gradient is zero, which a dense one does not tell."""
    moves = (grad.to_dense() != 0).any(axis=1)
    moves = moves.at[grad.indices].get(mode="fill", fill_value=False)
    return js.IndexedSlices(grad.values, jnp.where(moves, grad.indices, V), (V, D))


def check(code, steps, untouched, method):
    ours, theirs = both(code, untouched)
    rng = np.random.default_rng(1)
    sizes = {**TABLES, "w": (3,)}
    start = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    steps = [
        (
            of_ids(step, rng) if isinstance(step, dict) else of_program(step.names(), code),
            jnp.asarray(rng.normal(size=3), jnp.float32),
        )
        for step in steps
    ]

    def caught_up(params, state, grads):
        if untouched == "lazy":
            return params, state
        ids = {name: grads[name].indices for name in TABLES} | {"w": None}
        return ours.catch_up(params, state, ids)

    def step(params, state, grads):
        if method == "apply":
            return ours.apply(grads, state, params)
        updates, state = ours.update(grads, state, params)
        return js.apply_updates(params, updates), state

    def dense_step(params, state, grads):
        whole = lambda g: g.to_dense() if js.is_slices(g) else g  # noqa: E731
        grads = jax.tree.map(whole, grads, is_leaf=js.is_slices)
        updates, state = theirs.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def rows(params, grads):  # those that are there
        return [js.embedding_lookup(params[name], grads[name].indices) for name in TABLES]

    @fast_jit
    def run(start):
        found, wanted = (start, ours.init(start)), (start, theirs.init(start))
        read = []
        for gradients, dw in steps:
            found = caught_up(*found, gradients(found[0]))
            grads = gradients(found[0])
            read.append([rows(params, grads) for params in (found[0], wanted[0])])
            grads = {name: without_zeros(grads[name]) for name in TABLES} | {"w": dw}
            found, wanted = step(*found, grads), dense_step(*wanted, grads)
        found = ours.flush(*found) if untouched == "exact" else found
        return found[0], wanted[0], read

    found, wanted, read = jax.device_get(run(start))
    for name in sizes:
        moved = wanted[name] != start[name]
        np.testing.assert_array_equal(found[name][~moved], start[name][~moved])
    for x, y in ((found, wanted), *read):
        assert_close(x, y, rtol=1e-4, atol=2e-5)


METHODS = st.sampled_from(["update", "apply"])
UNTOUCHED = st.sampled_from(["lazy", "exact"])


@examples(4)
@given(OPTIMIZERS, STEPS, UNTOUCHED, METHODS)
def test_a_few_random_optimizers(code, steps, untouched, method):
    check(code, steps, untouched, method)


@pytest.mark.fuzz
@pytest.mark.slow
@examples(40)
@given(OPTIMIZERS, STEPS, UNTOUCHED, METHODS)
def test_random_optimizers(code, steps, untouched, method):
    check(code, steps, untouched, method)
