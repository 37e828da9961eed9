"""Frozen rows do not move; touched rows keep their norm; both in place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import examples
from helpers import as_users, fast_jit, numpy_dense, numpy_tree
from hypothesis import given
from hypothesis import strategies as st

import jslices as js

V, D, K = 6, 2, 8
some_ids = st.lists(st.integers(-2, V + 2), min_size=K, max_size=K)
KEEP = np.array([True, False, True, True, False, False])


def slices_of(ids, seed=0):
    values = np.random.default_rng(seed).normal(size=(len(ids), D)).astype(np.float32)
    return js.IndexedSlices(values, np.array(ids, np.int32), (V, D))


FORMS = {
    "by_row": lambda ids: KEEP,
    "function": lambda ids: lambda indices: (indices == 0) | (indices // 2 == 1),
    "by_entry": lambda ids: np.isin(ids, np.flatnonzero(KEEP)),
}
mask = fast_jit(js.mask_rows)
mask_by_function = fast_jit(lambda s: js.mask_rows(s, FORMS["function"](None)))


@pytest.mark.parametrize("form", FORMS)
@examples(15)
@given(ids=some_ids)
def test_masked_rows_are_empty_entries(form, ids):
    slices = slices_of(ids)
    keep = FORMS[form](ids)
    out = mask_by_function(slices) if callable(keep) else mask(slices, keep)
    kept = np.isin(ids, np.flatnonzero(KEEP))
    np.testing.assert_array_equal(out.indices, np.where(kept, ids, V))
    np.testing.assert_array_equal(out.values, np.where(kept[:, None], slices.values, 0))
    assert out.dense_shape == (V, D)


@pytest.mark.parametrize(
    "tx",
    [
        js.sgd(0.1, momentum=0.9),
        js.adamw(0.1, weight_decay=0.5),
        js.adamw(0.1, weight_decay=0.5, weight_decay_mode="touched"),
        js.from_optax(optax.adamw(0.1, weight_decay=0.5)),
    ],
)
def test_frozen_rows_cannot_move(tx):
    table = jnp.asarray(np.random.default_rng(1).normal(size=(V, D)), jnp.float32)

    @fast_jit
    def step(table, state, ids, keep):
        grads = js.mask_rows(js.grad(lambda t: (t[ids] ** 3).sum())(table), keep)
        updates, state = tx.update(grads, state, table)
        return js.apply_updates(table, updates), state

    ids = jnp.array([0, 1, 2, 3, 4, 5, 1, 0])
    # All rows move at first, so that they have momentum.
    start, state = step(table, tx.init(table), ids, jnp.ones(V, bool))
    new, after = start, state
    for _ in range(3):
        new, after = step(new, after, ids, KEEP)
    assert np.array_equal((new == start).all(1), ~KEEP)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        if x.shape == (V, D):
            np.testing.assert_array_equal(x[~KEEP], y[~KEEP])


def test_mask_of_other_things():
    dense = js.mask_rows(jnp.ones((V, D)), KEEP)
    np.testing.assert_array_equal(dense, np.repeat(KEEP[:, None], D, 1))
    np.testing.assert_array_equal(js.mask_rows(jnp.ones(V), lambda i: i < 2).sum(), 2)
    # A batch, inside and outside of vmap.
    batch = jax.tree.map(lambda *x: jnp.stack(x), slices_of([1, 2]), slices_of([9, 0], 1))
    out = js.mask_rows(batch, KEEP)
    np.testing.assert_array_equal(out.indices, [[V, 2], [V, 0]])
    mapped = fast_jit(jax.vmap(lambda s: js.mask_rows(s, KEEP)))(batch)
    np.testing.assert_array_equal(mapped.indices, out.indices)
    np.testing.assert_array_equal(mapped.values, out.values)
    # With an unknown number of rows an array goes by row number.
    unknown = js.IndexedSlices(jnp.ones(3), jnp.array([1, 2, 7]))
    largest = np.iinfo(np.int32).max
    np.testing.assert_array_equal(
        js.mask_rows(unknown, KEEP).indices, [largest, 2, largest]
    )
    # K = V: an array is by row number.
    same = slices_of([5, 4, 3, 2, 1, 0])
    np.testing.assert_array_equal(js.mask_rows(same, KEEP).indices, [V, V, 3, 2, V, 0])
    # Frozen rows that hold NaN are gone.
    nan = js.IndexedSlices(jnp.array([np.nan, 1]), jnp.array([1, 2]), (V,))
    assert js.all_finite(js.mask_rows(nan, KEEP))


@pytest.mark.parametrize("keep", [True, np.False_])
def test_one_bool_for_all(keep):
    rows = js.IndexedSlices(jnp.ones((3, 2)), jnp.array([0, 4, 4]), (5, 2))
    for x in (rows, jnp.ones((3, 2, 2)), jnp.ones(())):
        masked = js.mask_rows(x, keep)
        wanted, found = numpy_tree((x, masked))
        np.testing.assert_array_equal(found, wanted * keep)
    assert js.mask_rows(rows, keep).indices.tolist() == ([0, 4, 4] if keep else [5] * 3)


def test_a_table_without_rows():
    slices = js.IndexedSlices(jnp.ones((1, D)), jnp.zeros(1, int), (0, D))
    out = js.mask_rows(slices, np.ones(0, bool))
    np.testing.assert_array_equal(out.indices, [0])  # 0 = V: an empty entry
    assert js.project_rows(jnp.ones((0, D)), slices, 1.0).shape == (0, D)
    assert js.global_norm(slices) == 0 and js.all_finite(slices)


def test_errors_of_mask():
    slices = slices_of([1, 2, 3])
    for tree in ({"table": slices, "w": jnp.ones(3)}, [slices], None):
        with pytest.raises(TypeError, match=r"wants one gradient, .* got a .*the leaf of"):
            js.mask_rows(tree, KEEP)
    with pytest.raises(TypeError, match=r"bool, got int32\[2\]; to keep rows by .*isin"):
        js.mask_rows(slices, jnp.array([1, 2]))
    wanted = r"shape \[6\] \(one for each row of the table\) or \[3\].* got \[5\]"
    with pytest.raises(ValueError, match=wanted):
        js.mask_rows(slices, np.ones(5, bool))
    with pytest.raises(ValueError, match=r"shape \[3\] \(one for each entry\), got \[6\]"):
        js.mask_rows(slices, lambda i: KEEP)
    with pytest.raises(ValueError, match="got a scalar"):
        js.mask_rows(jnp.float32(1), KEEP)


@pytest.mark.parametrize("touched", [np.array([1]), {"t": jnp.array([1])}, True])
def test_projection_refuses_row_numbers(touched):
    params = {"t": jnp.ones((5, D))} if isinstance(touched, dict) else jnp.ones((5, D))
    with pytest.raises(TypeError, match=r"updates or gradients.*type jslices.IndexedSl"):
        js.project_rows(params, touched, 1.0)


project = fast_jit(js.project_rows)


@examples(30)
@given(ids=some_ids, limit=st.sampled_from([0.0, 0.5, 1.0, 10.0]))
def test_projection_touches_the_touched_rows_only(ids, limit):
    table = np.random.default_rng(2).normal(size=(V, D)).astype(np.float32)
    touched = slices_of(ids)
    new = np.asarray(project(table, touched, limit))
    mine = np.isin(np.arange(V), ids)
    np.testing.assert_array_equal(new[~mine], table[~mine])
    norms = np.linalg.norm(table, axis=1, keepdims=True)
    wanted = np.where(norms > limit, table / norms * limit, table)
    np.testing.assert_allclose(new[mine], wanted[mine], 1e-5)
    # Whatever it does not exceed stays to the bit.
    below = mine & (norms.ravel() < limit)
    np.testing.assert_array_equal(new[below], table[below])


def test_projection_of_trees_batches_and_dtypes():
    table = jnp.full((V, D), 3.0, jnp.bfloat16)
    params = {"a": table, "w": jnp.full(3, 9.0), "c": None, "bias": jnp.full(V, -5.0)}
    touched = {
        "a": js.IndexedSlices(jnp.zeros((2, D)), jnp.array([1, 1]), (V, D)),
        "w": jnp.ones(3),
        "c": None,
        "bias": js.IndexedSlices(jnp.full(2, np.nan), jnp.array([0, -1])),
    }
    new = project(params, touched, 2.0)
    assert new["a"].dtype == jnp.bfloat16 and new["c"] is None
    assert float(jnp.linalg.norm(new["a"][1].astype(float))) == pytest.approx(2, rel=1e-2)
    np.testing.assert_array_equal(new["a"][2:], table[2:])
    np.testing.assert_array_equal(new["w"], params["w"])
    np.testing.assert_array_equal(new["bias"], [-2] + [-5] * (V - 1))
    many = jax.tree.map(lambda x: jnp.stack([x, x]), touched["a"])
    np.testing.assert_array_equal(project(table, many, 2.0), new["a"])
    # None in place of a gradient, and no rows at all.
    np.testing.assert_array_equal(js.project_rows(table, None, 2.0), table)
    none = js.IndexedSlices(jnp.ones((0, D)), jnp.zeros(0, int), (V, D))
    np.testing.assert_array_equal(js.project_rows(table, none, 2.0), table)


def test_projection_in_vmap_scan_and_bad_rows():
    tables = jnp.stack([jnp.full((V, D), 3.0), jnp.full((V, D), 0.1)])
    touched = slices_of([1, 1, 2])
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), touched)

    @fast_jit
    def in_each_way(tables, touched, stacked):
        once = lambda table: js.project_rows(table, touched, 1.0)  # noqa: E731
        again = lambda table, s: (js.project_rows(table, s, 1.0), None)  # noqa: E731
        scanned, _ = jax.lax.scan(again, tables[0], stacked)
        return jax.vmap(once)(tables), scanned

    mapped, scanned = in_each_way(tables, touched, stacked)
    for table, got in zip(tables, mapped, strict=True):
        np.testing.assert_allclose(got, project(table, touched, 1.0), 1e-6)
    np.testing.assert_allclose(scanned, mapped[0], 1e-6)
    bad = jnp.ones((V, D)).at[1, 0].set(jnp.inf)
    new = project(bad, touched, 1.0)
    assert np.isnan(new[1]).all() and np.isfinite(np.delete(new, 1, 0)).all()


def test_errors_of_projection():
    with pytest.raises(ValueError, match=r"for a parameter of shape \(6, 3\)"):
        js.project_rows(jnp.ones((V, 3)), slices_of([1]), 1.0)
    with pytest.raises(ValueError, match=r"project_rows\(max_norm=-1\): .* at least 0"):
        js.project_rows(jnp.ones((V, D)), slices_of([1]), -1)


def test_a_step_with_mask_and_projection_is_in_place():
    rows, tx = 77_777, js.adagrad(0.1)

    def step(table, state, ids):
        grads = js.grad(lambda t: (t[ids] ** 2).sum())(table)
        grads = js.mask_rows(grads, lambda indices: indices > 5)
        updates, state = tx.update(grads, state, table)
        return js.project_rows(js.apply_updates(table, updates), updates, 1.0), state

    table = jax.ShapeDtypeStruct((rows, D), jnp.float32)
    ids = jax.ShapeDtypeStruct((K,), jnp.int32)
    step = as_users(step, donate_argnums=(0, 1))
    compiled = step.lower(table, jax.eval_shape(tx.init, table), ids).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 10_000
    assert memory.alias_size_in_bytes >= 2 * rows * D * 4
    made = set(re.findall(rf"= f32\[{rows},{D}\]\S* (\w[\w-]*)\(", compiled.as_text()))
    assert made <= {"parameter", "scatter", "fusion", "get-tuple-element", "bitcast"}


def test_projection_keeps_the_limit_over_training():
    table = jnp.zeros((V, D))
    tx = js.sgd(1.0)

    @fast_jit
    def step(table, ids):
        grads = js.grad(lambda t: -(t[ids] + 0.3 * t[ids] ** 2).sum())(table)
        updates, _ = tx.update(grads, tx.init(table), table)
        return js.project_rows(js.apply_updates(table, updates), updates, 1.5)

    for k in range(6):
        table = step(table, jnp.array([k % 3, 0, 4]))
        assert np.linalg.norm(table, axis=1).max() <= 1.5 * (1 + 1e-6)
    assert np.isclose(np.linalg.norm(table[0]), 1.5)
    np.testing.assert_array_equal(table[5], [0, 0])


def test_numpy_dense_agrees_that_a_mask_commutes_with_the_sum():
    ids = [1, 2, 2, 0, 9, -1]
    slices = slices_of(ids)
    dense = numpy_dense(slices.values, ids, (V, D))
    np.testing.assert_allclose(
        js.mask_rows(slices, KEEP).to_dense(), js.mask_rows(jnp.asarray(dense), KEEP)
    )
