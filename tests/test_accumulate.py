"""Gradient accumulation: the dense mean gradient, without a dense buffer."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from helpers import assert_close, fast_jit, numpy_dense
from hypothesis import given
from hypothesis import strategies as st

import jslices as js

V, D, T, B = 7, 3, 3, 4


def loss(params, ids):
    rows = params["table"][ids]
    return ((rows @ params["w"] - 1) ** 2).mean() + (rows**2).mean()


def make_params():
    rng = np.random.default_rng(0)
    shapes = {"table": (V, D), "w": (D,)}
    return {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}


def by_helper(params, batches):
    return js.accumulate_gradients(
        lambda ids: js.value_and_grad(loss)(params, ids), batches
    )


def by_own_scan(params, batches):
    step = lambda carry, ids: (carry, js.value_and_grad(loss)(params, ids))  # noqa: E731
    return js.sum_stacked(jax.lax.scan(step, None, batches)[1])


def by_vmap(params, batches):
    return js.sum_stacked(
        jax.vmap(lambda ids: js.value_and_grad(loss)(params, ids))(batches)
    )


WAYS = {f.__name__: fast_jit(f) for f in (by_helper, by_own_scan, by_vmap)}
dense_mean = fast_jit(jax.value_and_grad(lambda p, batches: loss(p, batches.reshape(-1))))


@pytest.mark.parametrize("way", WAYS)
@examples(10)
@given(st.lists(st.integers(0, V - 1), min_size=T * B, max_size=T * B))
def test_equals_the_dense_mean_gradient(way, ids):
    params, batches = make_params(), np.array(ids).reshape(T, B)
    value, grads = WAYS[way](params, batches)
    assert_close((value, grads), dense_mean(params, batches))
    rows = grads["table"]
    assert rows.values.shape == (min(T * B, V), D)
    present = np.unique(ids)
    np.testing.assert_array_equal(np.asarray(rows.indices)[: len(present)], present)


def test_sum_eager_and_one_step_after_it():
    params, batches = make_params(), np.array([[0, 3, 3, 1], [3, 5, 6, 6], [1, 1, 1, 1]])
    value, grads = js.accumulate_gradients(
        lambda ids: js.value_and_grad(loss)(params, ids), batches, "sum"
    )
    mean = jax.device_get(dense_mean(params, batches))
    wanted = jax.tree.map(lambda x: np.float32(T) * x, mean)
    assert_close((value, grads), wanted)
    tx = js.adagrad(0.1)
    step = fast_jit(lambda grads: tx.apply(grads, tx.init(params), params)[0])
    assert_close(step(grads), step(wanted[1]))


def test_dtypes_none_and_tuples():
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    batches = {"x": x, "i": np.array([[1, 1], [1, 2], [9, -1]])}

    def f(batch):
        rows = js.IndexedSlices(
            batch["x"].astype(jnp.bfloat16), batch["i"], (4,)
        )  # out-of-range indices are dropped
        hits = (batch["x"] > 2).sum()
        return (rows, None), hits, batch["x"].astype(jnp.float16), batch["x"][0] > 1

    by_helper = lambda b, r: js.accumulate_gradients(f, b, r)  # noqa: E731
    by_vmap = lambda b, r: js.sum_stacked(jax.vmap(f)(b), r)  # noqa: E731
    for way in (by_helper, by_vmap):
        both = fast_jit(lambda b, way=way: {r: way(b, r) for r in ("mean", "sum")})(batches)
        (rows, nothing), hits, halves, yes = both["mean"]
        assert nothing is None and rows.dtype == jnp.bfloat16
        np.testing.assert_array_equal(rows.indices, [1, 2, 4, 4])
        np.testing.assert_allclose(np.float32(rows.values), [1, 1, 0, 0])
        assert hits.dtype == jnp.float32 and hits == 1
        assert halves.dtype == jnp.float16 and yes.dtype == jnp.float32
        np.testing.assert_array_equal(halves, [2, 3])
        np.testing.assert_allclose(yes, 2 / 3)
        (rows, _), hits, halves, yes = both["sum"]
        np.testing.assert_array_equal(np.float32(rows.values), [3, 3, 0, 0])
        assert (hits.dtype, hits) == (jnp.int32, 3) and (yes.dtype, yes) == (jnp.int32, 2)
        np.testing.assert_array_equal(halves, [6, 9])


@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 3, 0)])
def test_no_rows_and_empty_rows(shape):
    empty = js.IndexedSlices.tree_unflatten(
        (5, shape[2]), (np.ones(shape, np.float32), np.zeros(shape[:2], np.int32))
    )

    @fast_jit
    def measure(g):
        total, count = js.per_example_global_norm_clip(g, 1.0)
        sums = js.sum_stacked(g).to_dense(), total.to_dense()
        return sums, count, js.per_example_norms(g), js.global_norm(g), js.all_finite(g)

    sums, count, norms, norm, finite = measure(empty)
    assert [x.shape for x in sums] == [(5, shape[2])] * 2
    np.testing.assert_array_equal(norms, [0, 0])
    assert norm == count == 0 and finite


def test_numbers_of_python_and_numpy():
    f = lambda x: {"one": 1.5, "n": 2, "x": x, "np": np.float32(3)}  # noqa: E731
    out = js.accumulate_gradients(f, np.array([1.0, 2.0]))
    assert out["one"] == 1.5 and out["n"] == 2 and out["np"] == 3
    nested = jax.jit(lambda b: js.accumulate_gradients(f, b, "sum"))(
        np.arange(3, dtype=np.float32)
    )
    assert nested["one"] == 4.5 and nested["n"] == 6 and nested["x"] == 3


def test_16_bit_rows_are_added_in_float32():
    def stacked(values):
        ids = np.ones(values.shape[:2], np.int32)
        return js.IndexedSlices.tree_unflatten((3, 1), (values, ids))

    f = lambda x: (js.IndexedSlices(x, jnp.array([1]), (3, 1)), x)  # noqa: E731
    ones = np.ones((4096, 1, 1), jnp.bfloat16)

    @fast_jit
    def sums(ones):
        tree = {"rows": stacked(ones), "dense": ones[:, 0]}
        found = js.sum_stacked(tree, "sum"), js.accumulate_gradients(f, ones, "sum")
        return [x.values if js.is_slices(x) else x for x in js.tree.leaves(found)]

    for found in sums(ones):
        assert np.asarray(found).ravel()[0] == 4096
    # A mean of float16 whose sum overflows is finite.
    big = np.full((8, 1, 1), 60_000, np.float16)
    assert np.asarray(fast_jit(js.sum_stacked)(stacked(big)).values)[0] == 60_000


def test_several_leading_axes_lose_the_first():
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4, 1)
    indices = np.arange(24).reshape(2, 3, 4) % 5
    stacked = js.IndexedSlices.tree_unflatten((5, 1), (values, indices))
    out = fast_jit(lambda tree: js.sum_stacked(tree, "sum"))(stacked)
    assert out.indices.shape == (3, 5)
    wanted = np.zeros((3, 5, 1))
    np.add.at(wanted, (np.arange(3)[:, None], indices), values)
    got = [
        numpy_dense(*parts, (5, 1)) for parts in zip(out.values, out.indices, strict=True)
    ]
    np.testing.assert_allclose(got, wanted)


ROWS = 77_777


def big_arrays(f, *args):
    """What has as many rows as the table in f's program, its inputs apart."""
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars]
            found.extend(s for s in shapes if ROWS in s)
            for sub in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                if hasattr(sub, "eqns") or hasattr(sub, "jaxpr"):
                    visit(getattr(sub, "jaxpr", sub))

    visit(jax.make_jaxpr(f)(*args).jaxpr)
    compiled = fast_jit(f).lower(*args).compile()
    made = re.findall(rf"= f32\[{ROWS},{D}\]\S* (\w[\w-]*)\(", compiled.as_text())
    # A loop names the table it only reads.
    handed_on = {"parameter", "get-tuple-element"}
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return found, set(made) - handed_on, temporary


@pytest.mark.parametrize("way", [by_helper, by_own_scan, by_vmap])
def test_nothing_of_the_table_s_size_is_made(way):
    params = {**make_params(), "table": jax.ShapeDtypeStruct((ROWS, D), jnp.float32)}
    batches = np.zeros((T, B), int)
    in_jaxpr, in_hlo, temporary = big_arrays(way, params, batches)
    assert in_jaxpr == [] and in_hlo == set() and temporary < 20_000


def test_the_proof_can_fail():
    def dense(params, batches):
        body = lambda total, ids: (  # noqa: E731
            jax.tree.map(jnp.add, total, jax.grad(loss)(params, ids)),
            None,
        )
        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), batches)[0]

    params = {**make_params(), "table": jax.ShapeDtypeStruct((ROWS, D), jnp.float32)}
    in_jaxpr, in_hlo, _ = big_arrays(dense, params, jnp.zeros((T, B), int))
    assert in_jaxpr and in_hlo


def test_errors():
    f = lambda x: x  # noqa: E731
    rows = js.IndexedSlices(jnp.ones((1, 2)), jnp.array([3]), (9, 2))
    for call in (
        lambda: js.accumulate_gradients(f, jnp.ones(3), "max"),
        lambda: js.sum_stacked(jnp.ones(3), "max"),
    ):
        with pytest.raises(ValueError, match=r"reduction='max'\): wanted .mean. or"):
            call()
    for bad in ({}, jnp.float32(1), (jnp.ones(3), jnp.ones(2)), jnp.ones((0, 2))):
        with pytest.raises(ValueError, match=r"one leading axis .*reshape"):
            js.accumulate_gradients(f, bad)
    for bad in (rows, [], (jnp.ones(3), jnp.ones(2)), jnp.float32(1)):
        with pytest.raises(ValueError, match=r"sum_stacked wants .* one leading axis"):
            js.sum_stacked(bad)
    chex.assert_trees_all_equal(js.sum_stacked([None, jnp.ones((2, 1))])[1], jnp.ones(1))
