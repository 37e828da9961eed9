"""``js.optim.scale``: rates of groups, of arrays and of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, dense

import jslices as js

PARAMS = {"table": jnp.ones((6, 2)), "w": jnp.ones(3)}
ROWS = js.IndexedSlices(jnp.arange(8.0).reshape(4, 2), jnp.array([1, 4, 1, 6]), (6, 2))
GRADS = {"table": ROWS, "w": jnp.arange(3.0)}
BY_ROW = np.linspace(0.1, 1, 6, dtype=np.float32)


def by_row(rows):
    return jnp.asarray(BY_ROW)[rows]


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("optimizer", [js.adagrad, js.adamw])
def test_a_factor_of_the_update_is_one_of_the_rate(optimizer, is_dense):
    grads = dense(GRADS) if is_dense else GRADS
    tx = js.optim.chain(optimizer(0.1), js.optim.scale({"table": by_row, "w": 0.5}))
    whole = optimizer(0.1)
    params, _ = tx.apply(grads, tx.init(PARAMS), PARAMS)
    moved, _ = whole.update(grads, whole.init(PARAMS), PARAMS)
    factors = {"table": BY_ROW[:, None], "w": 0.5}
    expected = jax.tree.map(lambda p, u, f: p + u * f, PARAMS, dense(moved), factors)
    assert_close(params, expected, rtol=1e-6)


def test_numbers_as_optax():
    updates, _ = js.optim.scale(0.5).update(GRADS, ())
    expected, _ = optax.scale(0.5).update(dense(GRADS), optax.EmptyState())
    assert_close(dense(updates), expected, rtol=0)
    same, _ = js.optim.scale({"table": None, "w": 2.0}).update(GRADS, ())
    assert same["table"] is GRADS["table"]
    none, _ = js.optim.scale(2.0).update({"table": None, "w": jnp.ones(3)}, ())
    assert none["table"] is None


def test_dtypes_stay_and_empty_entries_too():
    grads = {"table": ROWS.astype(jnp.bfloat16), "w": jnp.ones(3, jnp.bfloat16)}
    updates, _ = js.optim.scale({"table": by_row, "w": 0.1}).update(grads, ())
    assert {x.dtype for x in (updates["table"], updates["w"])} == {jnp.dtype("bfloat16")}
    assert updates["table"].indices.tolist() == ROWS.indices.tolist()


def test_inside_of_a_partition():
    scaled = js.optim.chain(js.sgd(1.0), js.optim.scale({"table": by_row, "w": None}))
    tx = js.optim.partition({"a": scaled, "b": js.sgd(2.0)}, {"table": "a", "w": "b"})
    params, _ = tx.apply(GRADS, tx.init(PARAMS), PARAMS)
    expected = 1 - BY_ROW[:, None] * dense(GRADS)["table"]
    assert_close(params, {"table": expected, "w": 1 - 2 * GRADS["w"]}, rtol=1e-6)


def test_where_all_rows_are_stepped():
    """A batch that names most rows: one pass over the table, no row scattered."""
    table = jnp.ones((64, 2))
    grads = js.IndexedSlices(jnp.ones((256, 2)), jnp.arange(256) % 63, (64, 2))
    tx = js.optim.chain(js.adagrad(0.1), js.optim.scale(lambda rows: rows.astype(float)))
    params, _ = jax.jit(tx.apply)(grads, tx.init(table), table)
    plain, _ = js.adagrad(0.1).apply(grads, js.adagrad(0.1).init(table), table)
    assert_close(params, 1 + (plain - 1) * jnp.arange(64.0)[:, None], rtol=1e-5)


@pytest.mark.parametrize(
    "factors, error, text",
    [
        (jnp.ones(6), ValueError, r"one number for an array, got \(6,\).*factors\[rows\]"),
        ({"table": 1.0}, ValueError, r"scale\(factors=...\) must have the structure"),
        (lambda rows: 1.0, ValueError, r"a number for each of \[4\] rows, got float32\[\]"),
        ("0.5", TypeError, "a number, a function of rows or None.*got '0.5'"),
        (1j, TypeError, "a number, a function of rows or None"),
    ],
)
def test_misuse_is_refused(factors, error, text):
    with pytest.raises(error, match=text):
        js.optim.scale(factors).update(GRADS, ())


@pytest.mark.as_users
def test_products_are_rounded_once():
    half = jnp.array([2.0**15], jnp.float16)
    tiny, _ = js.optim.scale(2.0**-25).update(half, ())
    assert tiny.dtype == jnp.float16 and tiny[0] == 2.0**-10
    some = jnp.arange(1, 200).astype(jnp.bfloat16)
    third, _ = js.optim.scale(0.3).update(some, ())
    expected = (some.astype(jnp.float32) * 0.3).astype(jnp.bfloat16)
    np.testing.assert_array_equal(third, expected)


def test_updates_of_integers_are_refused():
    with pytest.raises(TypeError, match="updates of a floating dtype, got int32"):
        js.optim.scale(0.5).update(jnp.array([4, 6]), ())


def test_exact_optimizers_are_refused():
    """What comes after them would not apply to missed steps."""
    with pytest.raises(ValueError, match=r"must be the last of a chain.*partition"):
        js.optim.chain(js.adam(0.1, untouched="exact"), js.optim.scale(0.5))
