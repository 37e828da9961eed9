"""sparse_mask: TensorFlow's example, not its prose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from helpers import fast_jit, golden, numpy_array
from hypothesis import given
from hypothesis import strategies as st

import jslices as js


@pytest.mark.parametrize("name", golden("sparse_mask"))
def test_equals_tensorflow(name):
    case = golden("sparse_mask")[name]
    a, wanted = case["a"]["is"], case["out"]["is"]
    slices = js.IndexedSlices(a["values"], a["indices"], a["dense_shape"])
    got = js.sparse_mask(slices, case["mask"])
    np.testing.assert_array_equal(got.values, wanted["values"])
    np.testing.assert_array_equal(got.indices, wanted["indices"])
    assert got.indices.dtype == wanted["indices"].dtype
    assert got.dense_shape == slices.dense_shape
    # Under jit: the same rows, then empty entries; those of `a` make room.
    good = wanted["indices"]
    good = slice(None) if slices.dense_shape is None else good < slices.shape[0]
    wanted = {key: wanted[key][good] for key in ("values", "indices")}
    count = len(wanted["indices"])
    traced = jax.jit(lambda s, m: js.sparse_mask(s, m, size=count + 1))(
        slices, np.array(case["mask"], np.int32)
    )
    np.testing.assert_array_equal(traced.values[:count], wanted["values"])
    np.testing.assert_array_equal(traced.indices[:count], wanted["indices"])
    empty = np.iinfo(np.int32).max if slices.dense_shape is None else slices.shape[0]
    assert traced.indices[count:].tolist() == [empty] and not traced.values[count:].any()


@examples(60)
@given(
    indices=st.lists(st.integers(-2, 7), min_size=5, max_size=5),
    mask=st.lists(st.integers(-3, 8), min_size=3, max_size=3),
)
def test_means_what_a_loop_means(indices, mask):
    values = np.arange(10, dtype=np.float32).reshape(5, 2)
    slices = js.IndexedSlices(values, np.array(indices), (6, 2))
    kept = [k for k, i in enumerate(indices) if i not in mask]
    got = js.sparse_mask(slices, mask)
    assert got.indices.tolist() == [indices[k] for k in kept]
    np.testing.assert_array_equal(got.values, values[kept])
    kept = [k for k in kept if 0 <= indices[k] < 6]
    traced = MASK(slices, np.array(mask))
    np.testing.assert_array_equal(numpy_array(traced), numpy_array(got))
    assert traced.indices.tolist() == [indices[k] for k in kept] + [6] * (5 - len(kept))


MASK = fast_jit(js.sparse_mask)
SLICES = js.IndexedSlices(np.ones((3, 2), np.float32), np.array([4, 1, 4]), (5, 2))


def test_overflow_is_never_silent():
    with pytest.raises(ValueError, match=r"sparse_mask\(size=1\): 2 rows do not fit"):
        js.sparse_mask(SLICES, [1], size=1)
    assert np.isnan(jax.jit(lambda s: js.sparse_mask(s, [1], 1))(SLICES).values).all()
    exact = js.sparse_mask(SLICES, [1], size=3)
    assert exact.indices.tolist() == [4, 4, 5]


def test_gradients_and_batches():
    def loss(values):
        slices = js.IndexedSlices(values, SLICES.indices, (5, 2))
        return (js.sparse_mask(slices, [1]).values ** 2).sum()

    wanted = [[2, 2], [0, 0], [2, 2]]
    np.testing.assert_array_equal(jax.grad(loss)(SLICES.values), wanted)
    np.testing.assert_array_equal(fast_jit(jax.grad(loss))(SLICES.values), wanted)
    batch = fast_jit(jax.vmap(lambda k: SLICES * k))(np.float32([1, 2]))
    masked = js.sparse_mask(batch, [4])
    assert masked.indices.tolist() == [[1, 5, 5]] * 2
    np.testing.assert_array_equal(numpy_array(masked)[1, 1], [2, 2])


@pytest.mark.parametrize(
    "args, error, text",
    [
        ((jnp.ones((2, 2)), [0]), TypeError, r"wants IndexedSlices, got .*from_dense"),
        ((SLICES, 1), ValueError, r"with one axis, got \[\]; flatten them"),
        ((SLICES, [[1]]), ValueError, r"with one axis, got \[1, 1\]"),
        ((SLICES, [0.5]), TypeError, r"integer mask_indices, got float32\[1\]"),
        ((SLICES, [1], -1), ValueError, "size must not be negative"),
    ],
)
def test_errors(args, error, text):
    with pytest.raises(error, match=text):
        js.sparse_mask(*args)
