"""Scaling, reducing, indexing and adding slices; always against the dense array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from helpers import assert_close, fast_jit, golden, numpy_dense
from hypothesis import given
from hypothesis import strategies as st

import jslices as js

VALUES = np.arange(8, dtype=np.float32).reshape(4, 2) + 1
INDICES = np.array([3, 1, 3, -1])
SLICES = js.IndexedSlices(VALUES, INDICES, (5, 2))
DENSE = numpy_dense(VALUES, INDICES, (5, 2))
BATCH = jax.vmap(lambda k: SLICES * k)(jnp.array([1.0, 2.0, 3.0]))

#: Where TensorFlow's aggregation of gradients gives something else on purpose.
DIFFERENCES = {"first_dense_shape_wins": "a known dense_shape wins over None"}


# --- scaling ----------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
def test_one_factor_for_each_row_of_the_array(jit):
    factors = jnp.arange(5.0)[:, None] + 1
    both = lambda s, f: (s * f, f * s, s / f)  # noqa: E731
    for got, wanted in zip(
        (jax.jit(both) if jit else both)(SLICES, factors),
        (DENSE * factors, DENSE * factors, DENSE / factors),
        strict=True,
    ):
        assert js.is_slices(got)
        np.testing.assert_array_equal(got.indices, INDICES)
        assert_close(got, wanted)
    unknown = js.IndexedSlices(VALUES, INDICES) * np.asarray(factors)
    np.testing.assert_array_equal(unknown.values[:3], VALUES[:3] * [[4], [2], [4]])


def test_one_factor_for_each_row_held():
    factors = np.array([1, 10, 100, np.nan], np.float32)
    got = SLICES.scale_rows(factors)
    np.testing.assert_array_equal(got.values, VALUES * factors[:, None])
    assert got.dense_shape == (5, 2) and np.isfinite(got.to_dense()).all()
    np.testing.assert_array_equal((SLICES * factors).values, got.values)
    np.testing.assert_allclose((SLICES / factors).values, VALUES / factors[:, None])
    many = BATCH.scale_rows(jnp.ones((3, 4)))
    np.testing.assert_array_equal(many.values, BATCH.values)
    with pytest.raises(ValueError, match=r"each row held, \(4,\), got \(5,\); .*\[:, None"):
        SLICES.scale_rows(np.ones(5))


def test_other_products_are_dense_and_say_so():
    for factor in (np.ones((5, 2), np.float32), np.ones((1, 2), np.float32)):
        with pytest.warns(js.DensificationWarning, match=r"scale_rows\(factors\)"):
            assert_close(SLICES * factor, DENSE)
    with pytest.warns(js.DensificationWarning):
        np.testing.assert_array_equal(SLICES * SLICES, DENSE * DENSE)
    square = js.IndexedSlices(np.ones((2, 2)), np.array([0, 1]), (5, 2))
    with pytest.warns(js.DensificationWarning):  # [2] are the columns, as in numpy
        got = jax.jit(lambda s: s * jnp.array([[1.0, 2.0]]))(square)
    np.testing.assert_array_equal(got[0], [1, 2])


# --- reductions -------------------------------------------------------------------------


AXES = [None, 0, 1, 2, -1, (0, 1), (1, 2), (0, 2), (0, 1, 2)]


@fast_jit
def reduced(s):
    return [(s.sum(axis), s.mean(axis)) for axis in AXES], s.square_sum()


@examples(20)
@given(
    indices=st.lists(st.integers(-2, 6), min_size=4, max_size=4),
    dtype=st.sampled_from(["float32", "int32"]),
)
def test_sums_and_means_are_those_of_the_dense_array(indices, dtype):
    values = np.arange(1, 25).reshape(4, 2, 3).astype(dtype)
    dense = numpy_dense(values, indices, (5, 2, 3))
    found, square = reduced(js.IndexedSlices(values, np.array(indices), dense.shape))
    assert_close(square, (dense**2).sum(dtype=dtype))
    for axis, (total, mean) in zip(AXES, found, strict=True):
        axes = (axis,) if isinstance(axis, int) else axis
        assert js.is_slices(total) == (axes is not None and 0 not in axes)
        wanted = dense.sum(axis, dtype=dtype), dense.mean(axis, dtype=np.float32)
        assert_close((total, mean), wanted)


def test_reductions_of_batches_and_narrow_floats():
    half = js.IndexedSlices(jnp.ones((300, 1), jnp.bfloat16), jnp.zeros(300, int), (2, 1))
    large = js.IndexedSlices(np.full((4, 2), 60000, np.float16), np.arange(4), (4, 2))
    whole = js.IndexedSlices(np.ones(2, np.int32), np.array([0, 1]), (4,))
    waves = js.IndexedSlices(np.array([3 + 4j], np.complex64), np.array([0]), (4,))
    ours = lambda v: js.IndexedSlices(v, INDICES, (5, 2)).square_sum()  # noqa: E731
    plain = lambda v: (jnp.zeros((5, 2)).at[INDICES[:3]].add(v[:3]) ** 2).sum()  # noqa: E731

    @fast_jit
    def every(batch, half, large, whole, waves, values):
        return (
            (batch.sum(), batch.sum((1, 2)), batch.mean((0, 1)), batch.square_sum()),
            batch.sum(2).to_dense(),
            (half.sum(), half.square_sum()),
            (large.mean(), large.mean(1)),
            (whole.mean(), whole.sum(), waves.square_sum()),
            (jax.grad(ours)(values), jax.grad(plain)(values)),
        )

    results = every(BATCH, half, large, whole, waves, jnp.asarray(VALUES))
    of_batch, of_rows, of_half, of_large, (whole_mean, whole_sum, of_waves), grads = results
    dense = np.stack([DENSE, 2 * DENSE, 3 * DENSE])
    np.testing.assert_allclose(of_batch[0], dense.sum())
    np.testing.assert_allclose(of_batch[1], dense.sum((1, 2)))
    np.testing.assert_allclose(of_batch[2], dense.mean((0, 1)), rtol=1e-6)
    np.testing.assert_allclose(of_batch[3], (dense**2).sum((1, 2)))
    np.testing.assert_allclose(of_rows, dense.sum(2))
    assert of_half[0] == 300 and of_half[0].dtype == jnp.bfloat16
    assert of_half[1] == 90000 and of_half[1].dtype == jnp.float32
    # The sum overflows, the mean does not.
    assert of_large[0] == 60000 and of_large[0].dtype == jnp.float16
    np.testing.assert_array_equal(of_large[1].values, [60000] * 4)
    assert of_large[1].dtype == jnp.float16
    assert whole_mean == 0.5 and whole_sum.dtype == jnp.int32 and of_waves == 25
    np.testing.assert_allclose(*grads)


def test_numpy_calls_the_methods():
    assert np.sum(SLICES) == DENSE.sum() and np.mean(SLICES) == DENSE.mean()
    with pytest.raises(TypeError, match="out= is not supported"):
        SLICES.sum(out=np.zeros(()))


def test_axes_may_be_numpy_integers_and_lists():
    np.testing.assert_array_equal(SLICES.sum(np.int64(0)), DENSE.sum(0))
    np.testing.assert_array_equal(SLICES.mean(np.int8(-1)).to_dense(), DENSE.mean(1))
    np.testing.assert_array_equal(SLICES.sum([0, np.int32(1)]), DENSE.sum())


def test_the_sum_of_a_batch_has_the_rows_of_all():
    for total, factor in ((BATCH.sum(0), 6), (BATCH.mean(0), 2)):
        assert js.is_slices(total)
        np.testing.assert_allclose(total.to_dense(), DENSE * factor, rtol=1e-6)
    one = lambda v: js.IndexedSlices(v, jnp.array([0]), (4, 2))  # noqa: E731
    small = jax.vmap(one)(np.full((3, 1, 2), 100, "int8"))
    for dtype in (None, "int16"):
        wanted = small.to_dense().sum(0, dtype)
        assert_close(small.sum(0, dtype).to_dense(), wanted)


def test_errors_of_reductions():
    with pytest.raises(ValueError, match=r"dense_shape=None is not known.*table.shape"):
        js.IndexedSlices(VALUES, INDICES).mean()
    assert js.IndexedSlices(VALUES, INDICES).sum() == VALUES[:3].sum()
    for axis in (0, None, (0, 1)):
        with pytest.raises(ValueError, match="dense_shape=None is not known"):
            js.IndexedSlices(VALUES, INDICES).mean(axis)
    # Within the rows their number does not matter.
    within = js.IndexedSlices(VALUES, INDICES).mean(1)
    assert within.dense_shape is None and within.indices is not None
    np.testing.assert_array_equal(within.values, VALUES.mean(1))
    unknown = jax.vmap(lambda v: js.IndexedSlices(v, INDICES))(np.stack([VALUES] * 3))
    np.testing.assert_array_equal(unknown.mean(-1).values, [VALUES.mean(1)] * 3)
    with pytest.raises(ValueError, match="dense_shape=None is not known"):
        unknown.mean((0, 1))
    with pytest.raises(ValueError, match="axis 2 is out of range for 2 axes"):
        SLICES.sum(2)
    twice = jax.vmap(lambda k: BATCH * k)(jnp.ones(2))
    with pytest.raises(ValueError, match=r"over axis=0; sum all 2 axes of the batch"):
        twice.sum(0)


# --- indexing ---------------------------------------------------------------------------


def test_batch_axes_can_be_indexed():
    assert SLICES[...] is SLICES and BATCH[...] is BATCH  # as Flax reads a variable
    assert BATCH[1].dense_shape == (5, 2)
    np.testing.assert_array_equal(BATCH[1].to_dense(), 2 * DENSE)
    np.testing.assert_array_equal(BATCH[-1].to_dense(), 3 * DENSE)
    np.testing.assert_array_equal(BATCH[1:].to_dense(), [2 * DENSE, 3 * DENSE])
    np.testing.assert_array_equal(BATCH[jnp.array([2, 0])][0].to_dense(), 3 * DENSE)
    np.testing.assert_array_equal(jax.jit(lambda b, i: b[i])(BATCH, 1).values, 2 * VALUES)
    twice = jax.vmap(jax.vmap(lambda v: js.IndexedSlices(v, INDICES, (5, 2))))(
        np.stack([[VALUES, 2 * VALUES]] * 3)
    )
    np.testing.assert_array_equal(twice[2, 1].to_dense(), 2 * DENSE)
    assert twice[0].shape == (2, 5, 2) and len(list(twice)) == 3
    np.testing.assert_array_equal(sum(one.to_dense() for one in BATCH), 6 * DENSE)


def test_rows_cannot_be_indexed():
    for slices, key in [(SLICES, 0), (BATCH, (0, 1)), (BATCH, None), (SLICES, (..., 0))]:
        with pytest.raises(TypeError, match=r"batch axes from vmap.*to_dense\(\)\[...\]"):
            slices[key]
    for key in (3, np.int64(3), np.uint8(3), np.array([0, 3]), jnp.array(3)):
        with pytest.raises(IndexError, match="batch index 3 is out of range for 3"):
            BATCH[key]
    for key in (-4, np.int8(-4), jnp.array([-1, -4]), (np.int64(-4),)):
        with pytest.raises(IndexError, match="batch index -4 is out of range for 3"):
            BATCH[key]
    # JAX makes a new axis of True, and merges the batch with the rows for a matrix.
    for key in (True, np.True_, np.ones((3, 4), bool)):
        with pytest.raises(TypeError, match=r"a mask of a batch axis has one axis, got"):
            BATCH[key]
    chosen = BATCH[np.array([True, False, True])]
    np.testing.assert_array_equal(chosen.to_dense(), [DENSE, 3 * DENSE])
    with pytest.raises(TypeError, match="cannot iterate over IndexedSlices"):
        iter(SLICES)


# --- adding -----------------------------------------------------------------------------


def from_golden(case):
    if case is None or not isinstance(case, dict):
        return case
    case = case["is"]
    shape = case["dense_shape"]
    return js.IndexedSlices(case["values"], case["indices"], shape)


@pytest.mark.parametrize("name", golden("aggregate"))
def test_aggregation_equals_tensorflow(name):
    with jax.enable_x64(True):
        case = golden("aggregate")[name]
        inputs, wanted = map(from_golden, case["inputs"]), from_golden(case["out"])
        inputs = list(inputs)
        if name == "with_tensor":
            np.testing.assert_allclose(inputs[0] + inputs[1], wanted, rtol=1e-6)
            return
        got = js.concat_slices(inputs)
        np.testing.assert_array_equal(got.values, wanted.values)
        np.testing.assert_array_equal(got.indices, wanted.indices)
        assert got.indices.dtype == wanted.indices.dtype
        if name in DIFFERENCES:
            assert wanted.dense_shape is None and got.dense_shape == (6, 3)
        else:
            assert got.dense_shape == wanted.dense_shape


def test_index_types_mix():
    with jax.enable_x64(True):
        narrow = js.IndexedSlices(np.ones((2, 1)), np.array([-1, 2], np.int8))
        wide = js.IndexedSlices(np.ones((1, 1)), np.array([2**40], np.int64))
        middle = js.IndexedSlices(np.ones((1, 1)), np.array([7], np.int32))
        assert (middle + wide).indices.dtype == np.int64
        assert (middle + narrow).indices.dtype == np.int32
        both = js.concat_slices([narrow, None, wide, middle])
        assert both.indices.tolist() == [-1, 2, 2**40, 7]
        kept = both.coalesce().indices
        assert kept[:3].tolist() == [2, 7, 2**40] and kept.dtype == np.int64
    with pytest.raises(ValueError, match="at least one"):
        js.concat_slices([None])
    with pytest.raises(
        TypeError, match="wants IndexedSlices, got ndarray; to add an array"
    ):
        js.concat_slices([SLICES, DENSE])
    with pytest.raises(ValueError, match=r"different batches \[\(\), \(3,\)\]; make"):
        js.concat_slices([BATCH, SLICES])


# --- from_dense -------------------------------------------------------------------------


def test_from_dense_keeps_what_is_not_zero():
    for make in (js.from_dense, js.IndexedSlices.from_dense):
        slices = make(DENSE)
        assert slices.indices.tolist() == [1, 3] and slices.indices.dtype == jnp.int32
        np.testing.assert_array_equal(slices.to_dense(), DENSE)
        np.testing.assert_array_equal(make(DENSE, 3).indices, [1, 3, 5])
        np.testing.assert_array_equal(make(DENSE, 3).values[2], [0, 0])
        traced = jax.jit(make, static_argnums=1)(DENSE, 3)
        np.testing.assert_array_equal(traced.indices, [1, 3, 5])
        np.testing.assert_array_equal(traced.to_dense(), DENSE)
        assert jax.jit(make)(DENSE).indices.tolist() == [1, 3, 5, 5, 5]
    with pytest.raises(ValueError, match=r"from_dense\(size=1\): 2 rows do not fit; pass"):
        js.from_dense(DENSE, 1)
    assert np.isnan(jax.jit(lambda x: js.from_dense(x, 1))(DENSE).values).all()
    with pytest.raises(ValueError, match="must not be negative"):
        js.from_dense(DENSE, -1)
    with pytest.raises(ValueError, match="got a scalar"):
        js.from_dense(1.0)
    with pytest.raises(TypeError, match="wants an array, got IndexedSlices"):
        js.from_dense(SLICES)
    with pytest.raises(TypeError, match=r"from_dense wants size as an int .*, got 1.5"):
        js.from_dense(DENSE, 1.5)
    assert js.from_dense(DENSE, np.int64(3)).indices.tolist() == [1, 3, 5]
    assert js.from_dense(np.array([0, 2, 0])).values.tolist() == [2]
    assert js.from_dense(np.zeros((0, 2))).shape == (0, 2)
    gradient = jax.grad(lambda x: (js.from_dense(x, 2).values ** 2).sum())(DENSE)
    np.testing.assert_array_equal(gradient, 2 * DENSE)


# --- trees ------------------------------------------------------------------------------


def test_tree_helpers_treat_slices_as_leaves():
    tree = {"bias": jnp.ones(2), "table": SLICES}
    doubled = js.tree.map(lambda x: 2 * x, tree)
    assert js.is_slices(doubled["table"])
    np.testing.assert_array_equal(doubled["table"].to_dense(), 2 * DENSE)
    summed = js.tree.map(lambda a, b: a + b, tree, doubled)
    np.testing.assert_array_equal(summed["table"].to_dense(), 3 * DENSE)
    leaves, structure = js.tree.flatten(tree)
    assert leaves[1] is SLICES and js.tree.leaves(tree)[1] is SLICES
    assert structure.unflatten(leaves)["table"] is SLICES
    assert js.tree.structure(tree) == js.tree.structure(js.tree.to_dense(tree))
    assert js.tree.structure(tree) == structure
    paths = [jax.tree_util.keystr(p) for p, _ in js.tree.leaves_with_path(tree)]
    assert paths == ["['bias']", "['table']"]
    named = js.tree.map_with_path(lambda p, x: jax.tree_util.keystr(p), tree)
    assert named == {"bias": "['bias']", "table": "['table']"}
    assert js.tree.reduce(lambda n, x: n + x.sum(), tree, 0) == 2 + DENSE.sum()
    nothing = js.tree.leaves({"a": None, "b": SLICES}, is_leaf=lambda x: x is None)
    assert nothing == [None, SLICES]
    np.testing.assert_array_equal(js.tree.to_dense(tree)["table"], DENSE)
