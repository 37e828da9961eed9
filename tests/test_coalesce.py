"""Summing duplicates: against numpy, on every kind of index, in every transformation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fast_jit, golden, lists, numpy_dense
from hypothesis import given
from hypothesis import strategies as st

import jslices as js
from jslices._rows.sums import sort_ids


@st.composite
def cases(draw):
    num_rows = draw(st.sampled_from([1, 8]))
    indices = draw(lists(st.integers(-2, num_rows + 2), (0, 1, 12)))
    # Small integers add exactly in any order.
    values = np.arange(4 * len(indices), dtype=np.float32).reshape(-1, 2, 2)
    return values, np.array(indices, np.int32), num_rows


COALESCE = fast_jit(lambda s: (s.coalesce(), s.coalesce().to_dense()))


@fast_jit
def of_rows_and_numbers(values, indices, zeros):
    """Slices of rows ``[2, 2]``, and of single numbers."""
    rows = (values, zeros.shape), (values[:, 0, 0], zeros.shape[:1])
    slices = [js.IndexedSlices(x, indices, shape) for x, shape in rows]
    return [(s.coalesce(), s.coalesce().to_dense()) for s in slices]


@given(cases())
def test_sorted_unique_then_empty(case):
    values, indices, num_rows = case
    present = np.unique(indices[(indices >= 0) & (indices < num_rows)])
    capacity = min(len(indices), num_rows)
    wanted = np.full(capacity, num_rows)
    wanted[: len(present)] = present
    found = of_rows_and_numbers(values, indices, np.zeros((num_rows, 2, 2)))
    for (out, dense), given_values in zip(found, (values, values[:, 0, 0]), strict=True):
        shape = num_rows, *given_values.shape[1:]
        np.testing.assert_array_equal(out.indices, wanted)
        assert out.dense_shape == shape and out.values.shape == (capacity, *shape[1:])
        assert not np.asarray(out.values)[len(present) :].any()
        np.testing.assert_array_equal(dense, numpy_dense(given_values, indices, shape))


@pytest.mark.parametrize("name", golden("deduplicate"))
def test_equals_tensorflow(name):
    case = golden("deduplicate")[name]
    out = js.IndexedSlices(case["values"], case["indices"], (10, case["values"].shape[1]))
    out, _ = COALESCE(out)
    # TensorFlow keeps the order of first appearance, coalesce sorts.
    order = np.argsort(case["unique_indices"])
    count = len(order)
    np.testing.assert_array_equal(out.indices[:count], case["unique_indices"][order])
    np.testing.assert_allclose(out.values[:count], case["summed"][order], rtol=1e-6)


def test_a_known_size():
    slices = js.IndexedSlices(jnp.ones((4, 1)), jnp.array([5, 2, 5, 9]), (9, 1))
    for out in (slices.coalesce(2), jax.jit(lambda s: s.coalesce(2))(slices)):
        np.testing.assert_array_equal(out.indices, [2, 5])
        np.testing.assert_array_equal(out.values.ravel(), [1, 2])
    wide = slices.coalesce(6)
    np.testing.assert_array_equal(wide.indices, [2, 5, 9, 9, 9, 9])


def test_overflow_is_never_silent():
    slices = js.IndexedSlices(jnp.ones((3, 1)), jnp.array([5, 2, 7]), (9, 1))
    with pytest.raises(ValueError, match=r"3 distinct rows do not fit; pass size=3"):
        slices.coalesce(2)
    with pytest.raises(ValueError, match="1 distinct rows"):
        slices.coalesce(0)
    assert np.isnan(jax.jit(lambda s: s.coalesce(2))(slices).values).all()
    with pytest.raises(ValueError, match="must not be negative"):
        slices.coalesce(-1)


def test_unknown_number_of_rows():
    out = js.IndexedSlices(jnp.ones((3, 1)), jnp.array([5, -1, 5])).coalesce()
    largest = np.iinfo(np.int32).max
    np.testing.assert_array_equal(out.indices, [5, largest, largest])


def test_wide_integers():
    with jax.enable_x64(True):
        # Two of them differ in their high halves only.
        indices = jnp.array([2**40, 3, 2**40, -1, 2**32 + 3], jnp.int64)
        out = js.IndexedSlices(jnp.ones((5, 1)), indices, (2**41, 1)).coalesce()
        assert out.indices.dtype == jnp.int64
        wanted = [3, 2**32 + 3, 2**40, 2**41, 2**41]
        np.testing.assert_array_equal(out.indices, wanted)
        np.testing.assert_array_equal(out.values.ravel(), [1, 1, 2, 0, 0])
    with pytest.raises(ValueError, match=r"needs 64-bit indices.*jax_enable_x64"):
        js.IndexedSlices(jnp.ones((1, 1)), jnp.array([0]), (2**31, 1)).coalesce()


def test_integers_and_narrow_index_types():
    slices = js.IndexedSlices(
        jnp.ones((3,), int), jnp.array([255, 0, 255], jnp.uint8), (256,)
    )
    out = slices.coalesce()
    np.testing.assert_array_equal(out.indices, [0, 255, 256])
    np.testing.assert_array_equal(out.values, [1, 2, 0])


def test_differentiable_and_mappable():
    indices = jnp.array([[1, 1, 2], [0, 3, 0]])
    values = jnp.arange(6.0).reshape(2, 3)

    def total(v, i):
        return (js.IndexedSlices(v, i, (4,)).coalesce().values ** 2).sum()

    def plain(v, i):
        return (jnp.zeros(4).at[i].add(v) ** 2).sum()

    coalesce = lambda v, i: js.IndexedSlices(v, i, (4,)).coalesce()  # noqa: E731

    @fast_jit
    def every(*args):
        grads = [jax.vmap(jax.grad(f))(*args) for f in (total, plain)]
        many = [
            jax.vmap(coalesce)(*args),
            jax.lax.map(lambda vi: coalesce(*vi), args),
        ]
        return grads, many

    grads, many = every(values, indices)
    chex.assert_trees_all_close(*grads)
    np.testing.assert_array_equal(many[0].indices, [[1, 2, 4], [0, 3, 4]])
    chex.assert_trees_all_equal(*many)


@given(lists(st.integers(0, 5), (0, 1, 20)), st.sampled_from(["int32", "int64"]))
def test_sort_is_stable_and_remembers_positions(ids, dtype):
    with jax.enable_x64(dtype == "int64"):
        ids = np.array(ids, dtype)
        ordered, positions = sort_ids(ids)
        np.testing.assert_array_equal(ordered, np.sort(ids))
        np.testing.assert_array_equal(positions, np.argsort(ids, kind="stable"))
        assert ordered.dtype == dtype and positions.dtype == jnp.int32


def test_no_64_bit_value_outside_the_sort():
    text = str(
        jax.make_jaxpr(lambda s: s.coalesce())(
            js.IndexedSlices(jnp.ones((3, 1)), jnp.array([1, 2, 1]), (4, 1))
        )
    )
    assert "i64" not in text and "sort_ids" in text
