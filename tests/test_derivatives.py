"""Derivatives through an update: empty entries and rows not named have no part in them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import fast_jit, slow_unless
from optimizers import FIRST, KINDS, OTHER_STATE, D, label, make

import jslices as js

# Rows of the table, and entries: how they are stepped follows from it.
SIZES = {"together": (9, 6), "all rows": (600, 512), "in chunks": (40_000, 9_000)}
# They take roots of moments: where these are zero, the derivative is infinite.
QUICK = [
    ("adam", {}),
    ("lamb", {}),
    ("adafactor", {"min_dim_size_to_factor": 1}),
    ("adafactor", {"momentum": 0.9, "weight_decay_rate": 0.01, "factored": False}),
]
FROM_OPTAX = ("from_optax", {})


def optimizer(name, kwargs):
    if name == "from_optax":
        return js.from_optax(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)))
    return make(js, name, 0.1, kwargs)


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def derivatives(tx, num_rows):
    """``f(ids, values)``: of all that a step returns, by all floats that it is given."""
    params = {"table": jnp.ones((num_rows, D)), "w": jnp.ones(2)}

    def size(params, values, state, ids):
        rows = js.IndexedSlices(values, ids, (num_rows, D))
        results = tx.apply({"table": rows, "w": jnp.ones(2)}, state, params)
        return sum((x**2).sum() for x in jax.tree.leaves(results) if is_float(x))

    grad = fast_jit(jax.grad(size, (0, 1, 2), allow_int=True))
    return lambda ids, values: grad(params, values, tx.init(params), ids)


# Together each optimizer, with all the arrays that it may keep. All rows: what is not named
# is guarded around the rule, whatever it is. Chunks have the derivative of rows together.
SETTINGS = {
    "together": [*FIRST, *(case for case in OTHER_STATE if case not in FIRST)],
    "all rows": [*KINDS, *(case for case in QUICK if case not in KINDS)],
    "in chunks": QUICK,
}


@pytest.mark.parametrize(
    "name, kwargs, way",
    slow_unless(
        [(*case, way) for way in SIZES for case in (*SETTINGS[way], FROM_OPTAX)],
        lambda case: (
            (case[2] == "together" and case[:2] in QUICK)
            or (case[2] == "all rows" and case[0] == "adafactor" and len(case[1]) == 3)
        ),
    ),
    ids=label,
)
def test_they_are_finite_whatever_is_empty(name, kwargs, way):
    """Rows at the end have no history: their moments are zero."""
    num_rows, count = SIZES[way]
    derivatives_at = derivatives(optimizer(name, kwargs), num_rows)
    values = np.linspace(1.0, 2.0, count * D, dtype=np.float32).reshape(count, D)
    named = np.random.default_rng(0).integers(0, num_rows // 2, count)
    for empty in (num_rows, -1, num_rows + 3):
        for some in (named, np.full(count, empty)):
            ids = np.where(np.arange(count) % 3 == 1, empty, some).astype(np.int32)
            found = derivatives_at(ids, values)
            for path, x in jax.tree.leaves_with_path(found):
                assert not is_float(x) or np.isfinite(x).all(), (path, ids[:4])


@pytest.mark.parametrize(
    "name, kwargs", slow_unless(QUICK, lambda case: case == QUICK[-1]), ids=label
)
def test_they_are_those_without_empty_entries(name, kwargs):
    derivatives_at = derivatives(optimizer(name, kwargs), 9)
    values = np.linspace(1.0, 2.0, 5 * D, dtype=np.float32).reshape(5, D)
    params, rows, state = derivatives_at(np.array([4, 2, 4, 9, -1], np.int32), values)
    wanted = derivatives_at(np.array([4, 2, 4], np.int32), values[:3])
    assert not rows[3:].any()
    for x, y in zip(
        *map(jax.tree.leaves, ((params, rows[:3], state), wanted)), strict=True
    ):
        if is_float(x):
            np.testing.assert_allclose(x, y, 1e-5, 1e-6)


@pytest.mark.parametrize(
    "options, power",
    slow_unless(
        itertools.product([{"momentum": 0.9}, {"weight_decay": 0.3}], [2, 1]),
        lambda case: case == ({"momentum": 0.9}, 2),
    ),
)
def test_through_exact_steps_a_derivative_is_that_of_dense_ones(options, power):
    """By the first table and the rate; and of a linear loss, whose state is constant."""
    decay, momentum = options.get("weight_decay", 0.0), options.get("momentum")
    batches, table = jnp.array([[0], [1], [0]]), jnp.ones((3, 1))
    loss = lambda t, ids: (t[ids] ** power).sum()  # noqa: E731

    def dense(table, rate):
        tx = optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, momentum))
        state = tx.init(table)
        for ids in batches:
            value, grads = jax.value_and_grad(loss)(table, ids)
            updates, state = tx.update(grads, state, table)
            table = optax.apply_updates(table, updates)
        return value + loss(table, jnp.arange(2))

    def ours(table, rate):
        tx = js.sgd(rate, untouched="exact", **options)
        state = tx.init(table)
        for ids in batches:
            table, state, value = js.train_step(loss, tx)(table, state, ids)
        return value + js.eval_step(loss, tx)(table, state, jnp.arange(2))

    found, wanted = (fast_jit(jax.grad(f, (0, 1)))(table, 0.1) for f in (ours, dense))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
