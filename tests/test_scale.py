"""``js.optim.scale``: rates of groups, of arrays and of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit, numpy_array, numpy_tree

import jslices as js

F32 = np.float32
PARAMS = {"table": np.ones((6, 2), F32), "w": np.ones(3, F32)}
ROWS = js.IndexedSlices(
    np.arange(8, dtype=F32).reshape(4, 2), np.array([1, 4, 1, 6], np.int32), (6, 2)
)
GRADS = {"table": ROWS, "w": np.arange(3, dtype=F32)}
BY_ROW = np.linspace(0.1, 1, 6, dtype=np.float32)


def by_row(rows):
    return jnp.asarray(BY_ROW)[rows]


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("optimizer", [js.adagrad, js.adamw])
def test_a_factor_of_the_update_is_one_of_the_rate(optimizer, is_dense):
    grads = numpy_tree(GRADS) if is_dense else GRADS
    tx = js.optim.chain(optimizer(0.1), js.optim.scale({"table": by_row, "w": 0.5}))
    whole = optimizer(0.1)

    @fast_jit
    def both(grads, params):
        moved, _ = whole.update(grads, whole.init(params), params)
        return tx.apply(grads, tx.init(params), params)[0], moved

    params, moved = both(grads, PARAMS)
    factors = {"table": BY_ROW[:, None], "w": F32(0.5)}
    expected = jax.tree.map(lambda p, u, f: p + u * f, PARAMS, numpy_tree(moved), factors)
    assert_close(params, expected, rtol=1e-6)


def test_numbers_as_optax():
    updates, _ = fast_jit(lambda grads: js.optim.scale(0.5).update(grads, ()))(GRADS)
    expected, _ = optax.scale(0.5).update(numpy_tree(GRADS), optax.EmptyState())
    assert_close(updates, expected, rtol=0)
    same, _ = js.optim.scale({"table": None, "w": 2.0}).update(GRADS, ())
    assert same["table"] is GRADS["table"]
    none, _ = js.optim.scale(2.0).update({"table": None, "w": jnp.ones(3)}, ())
    assert none["table"] is None


def test_dtypes_stay_and_empty_entries_too():
    grads = {"table": ROWS.astype(jnp.bfloat16), "w": jnp.ones(3, jnp.bfloat16)}
    scale = js.optim.scale({"table": by_row, "w": 0.1})
    updates, _ = fast_jit(lambda grads: scale.update(grads, ()))(grads)
    assert {x.dtype for x in (updates["table"], updates["w"])} == {jnp.dtype("bfloat16")}
    assert updates["table"].indices.tolist() == ROWS.indices.tolist()


def test_inside_of_a_partition():
    scaled = js.optim.chain(js.sgd(1.0), js.optim.scale({"table": by_row, "w": None}))
    tx = js.optim.partition({"a": scaled, "b": js.sgd(2.0)}, {"table": "a", "w": "b"})
    params, _ = fast_jit(lambda g, p: tx.apply(g, tx.init(p), p))(GRADS, PARAMS)
    expected = 1 - BY_ROW[:, None] * numpy_array(ROWS)
    assert_close(params, {"table": expected, "w": 1 - 2 * GRADS["w"]}, rtol=1e-6)


def test_where_all_rows_are_stepped():
    """A batch that names most rows: one pass over the table, no row scattered."""
    grads = js.IndexedSlices(np.ones((256, 2), F32), np.arange(256) % 63, (64, 2))
    adagrad = js.adagrad(0.1)
    tx = js.optim.chain(adagrad, js.optim.scale(lambda rows: rows.astype(float)))

    @fast_jit
    def both(grads, table):
        return [by.apply(grads, by.init(table), table)[0] for by in (tx, adagrad)]

    params, plain = map(np.asarray, both(grads, np.ones((64, 2), F32)))
    assert_close(params, 1 + (plain - 1) * np.arange(64, dtype=F32)[:, None], rtol=1e-5)


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
