"""What is done where the platform is no CPU, compiled here."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_unless
from jax import export, lax

import jslices as js
from jslices._rows.sums import BLOCK, ONE_BLOCK, add_rows, starts_of_runs, sums_of_runs

# Programs for a TPU are traced here for the platform at hand.
pytestmark = pytest.mark.filterwarnings("ignore:this program is compiled for a TPU")


def elsewhere(*args, cpu, default):
    return default(*args)


def test_writes_are_told_that_indices_are_unique_and_copy_nothing():
    tx = js.adam(0.1)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(table, state, ids):
        grads = js.grad(lambda t: (t[ids] ** 2).sum())(table)
        updates, state = tx.update(grads, state, table)
        return js.apply_updates(table, updates), state

    table = jax.ShapeDtypeStruct((100_000, 32), jnp.float32)
    ids = jax.ShapeDtypeStruct((5000,), jnp.int32)
    with mock.patch.object(lax, "platform_dependent", elsewhere):
        lowered = step.lower(table, jax.eval_shape(tx.init, table), ids)
    scatters = lowered.as_text().split('"stablehlo.scatter"(')[1:]
    into_table = [
        re.search(r"unique_indices = (\w+)", scatter)[1]
        for scatter in scatters
        if re.search(r"\}\) : \((tensor<\S+>)", scatter)[1] == "tensor<100000x32xf32>"
    ]
    assert into_table == ["true"] * 3  # both moments and the table
    compiled = lowered.compile()
    assert not re.search(r"f32\[100000,32\]\S* copy\(", compiled.as_text())


def as_on_a_tpu(function, *args):
    """What the program for a TPU computes, run on the platform at hand."""
    any_platform = export.DisabledSafetyCheck.platform()
    program = export.export(
        jax.jit(function), platforms=["tpu"], disabled_checks=[any_platform]
    )
    return program(*args).call(*args)


OPTIMIZERS = {
    "sgd": js.sgd(0.1),
    "adagrad": js.adagrad(0.1),
    "adam": js.adam(0.1),
    "rowwise_adagrad": js.rowwise_adagrad(0.1),
    "adafactor": js.adafactor(0.1, min_dim_size_to_factor=1),
    "exact": js.adam(0.1, untouched="exact"),
    "clipped": js.optim.chain(js.optim.clip_by_global_norm(0.1), js.adam(0.1)),
}


@pytest.mark.parametrize(
    "name, num_ids",
    slow_unless(
        [
            *((name, 1500) for name in OPTIMIZERS),
            *((name, 300) for name in ("rowwise_adagrad", "exact", "clipped")),
            *((name, 4000) for name in ("sgd", "adam", "adafactor")),
        ],
        lambda case: case in (("adam", 1500), ("sgd", 1500), ("clipped", 300)),
    ),
)
def test_a_step_is_the_same_elsewhere(name, num_ids):
    """Duplicates by the hundred, ids out of range, and a table stepped as a whole."""
    tx, num_rows = OPTIMIZERS[name], 5_000
    rng = np.random.default_rng(num_ids)
    ids = jnp.asarray(rng.zipf(1.3, num_ids) % (num_rows + 9), jnp.int32)
    params = {"table": jnp.asarray(rng.normal(size=(num_rows, 24)), jnp.float32)}

    def step(params, state, ids):
        if tx.catches_up:
            params, state = tx.catch_up(params, state, {"table": ids})
        loss = lambda params: jnp.tanh(  # noqa: E731
            js.embedding_lookup(params["table"], ids, mode="fill")
        )
        grads = js.grad(lambda params: jnp.nansum(loss(params) ** 2))(params)
        return tx.apply(grads, state, params)

    args = params, tx.init(params), ids
    here, there = jax.jit(step)(*args), as_on_a_tpu(step, *args)
    close = functools.partial(np.testing.assert_allclose, rtol=3e-4, atol=3e-5)
    jax.tree.map(close, here, there)


SIZES = [1, ONE_BLOCK, ONE_BLOCK + 1, ONE_BLOCK * BLOCK + 5]


@pytest.mark.parametrize(
    "count", slow_unless([(n,) for n in SIZES], lambda case: case[0] > ONE_BLOCK)
)
def test_sums_of_runs(count):
    rng = np.random.default_rng(count)
    sums = jax.jit(sums_of_runs)
    for longest in (1, 3, 40, 10**6):
        starts = np.concatenate([[True], rng.random(count - 1) < 1 / longest])
        ids = np.cumsum(starts) - 1
        rows = rng.integers(-9, 9, (count, 2)).astype(np.float32)
        wanted = np.zeros((ids[-1] + 1, 2), np.float32)
        np.add.at(wanted, ids, rows)
        found = np.asarray(sums(jnp.asarray(ids), jnp.asarray(rows)))
        np.testing.assert_array_equal(starts_of_runs(jnp.asarray(ids)), starts)
        np.testing.assert_array_equal(found[starts], wanted)


def test_what_is_not_finite_stays_in_its_run():
    ids = jnp.repeat(jnp.arange(300), 3)
    rows = jnp.ones((900, 2)).at[450, 0].set(jnp.nan).at[30, 1].set(jnp.inf)
    sums = np.array(jax.jit(sums_of_runs)(ids, rows))[::3]
    assert np.isnan(sums[150, 0]) and np.isposinf(sums[10, 1])
    sums[150, 0] = sums[10, 1] = 3
    np.testing.assert_array_equal(sums, 3)


@pytest.mark.parametrize(
    "dtype",
    slow_unless(
        [(x,) for x in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.complex64)],
        lambda case: case == (jnp.float32,),
    ),
)
def test_adding_rows(dtype):
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.integers(-9, 9, (50, 3)), dtype)
    ids = rng.integers(0, 51, 700)
    rows = jnp.asarray(rng.integers(-1, 2, (700, 3)), dtype)
    wanted = np.array(table, np.complex64)
    np.add.at(wanted, ids[ids < 50], np.asarray(rows, np.complex64)[ids < 50])
    found = as_on_a_tpu(add_rows, table, jnp.asarray(ids), rows)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found, np.complex64), wanted)


def test_derivatives_of_added_rows():
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 9, 40))
    rows = jnp.linspace(-1.0, 1.0, 80).reshape(40, 2)
    weights = jnp.arange(16.0).reshape(8, 2)

    def loss(table, rows):
        return (add_rows(table, ids, rows) ** 2 * weights).sum()

    slopes = jax.grad(loss, (0, 1))
    args = jnp.ones((8, 2)), rows
    here, there = slopes(*args), as_on_a_tpu(slopes, *args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), here, there)
