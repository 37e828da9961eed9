"""The container: what it is, and its arithmetic."""

import importlib
import operator
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit, golden, lists, numpy_dense
from hypothesis import given
from hypothesis import strategies as st

import jslices as js

VALUES = jnp.asarray(np.arange(1, 9, dtype=np.float32).reshape(4, 2))
INDICES = jnp.asarray(np.array([3, 1, 3, -1], np.int32))
DENSE = np.array([[0, 0], [3, 4], [0, 0], [6, 8], [0, 0]], np.float32)


@pytest.fixture
def slices():
    return js.IndexedSlices(VALUES, INDICES, (5, 2))


def test_is_a_pytree_with_static_shape(slices):
    leaves, tree = jax.tree.flatten(slices)
    assert len(leaves) == 2
    again = tree.unflatten(leaves)
    assert again.dense_shape == (5, 2)
    chex.assert_trees_all_equal(again, slices)
    paths = [
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(slices)
    ]
    assert paths == [".values", ".indices"]
    assert tree.unflatten([object(), None]).values is not None  # placeholders pass
    assert jax.tree.structure(slices) != jax.tree.structure(
        js.IndexedSlices(VALUES, INDICES, (6, 2))
    )


def test_attributes(slices):
    assert slices.shape == (5, 2) and slices.ndim == 2
    assert slices.dtype == jnp.float32
    assert slices.device == VALUES.device and slices.sharding == VALUES.sharding
    unknown = js.IndexedSlices(VALUES, INDICES)
    assert unknown.dense_shape is None and unknown.shape == (None, 2)
    with pytest.raises(TypeError):
        len(slices)
    with pytest.raises(AttributeError):
        slices.values = VALUES
    assert hash(slices) == hash(slices) and slices in [slices] and slices != None  # noqa: E711


@pytest.mark.parametrize("kind", ["lists", "numpy", "jax"])
def test_takes_what_arrays_are_made_of(kind):
    values, indices = [[1.0, 2.0]], [3]
    if kind != "lists":
        module = np if kind == "numpy" else jnp
        values, indices = module.asarray(values), module.asarray(indices)
    slices = js.IndexedSlices(values, indices, np.array([5, 2]))
    assert isinstance(slices.values, jax.Array) and slices.dense_shape == (5, 2)


@pytest.mark.parametrize(
    "args, error, text",
    [
        ((VALUES, jnp.ones(4), (5, 2)), TypeError, "wants integer indices, got values"),
        (
            (INDICES, jnp.ones(4), (5,)),
            TypeError,
            r"order is IndexedSlices\(values, ind",
        ),
        ((VALUES, INDICES[:3], (5, 2)), ValueError, "equally many rows"),
        (
            (VALUES, INDICES[:, None], (5, 2)),
            ValueError,
            "one axis, not 2: flatten both",
        ),
        ((VALUES, jnp.int32(1), (5, 2)), ValueError, "one axis, not 0"),
        ((jnp.float32(1), INDICES, (5,)), ValueError, "equally many rows"),
        ((VALUES, INDICES, (5, 3)), ValueError, r"did you mean dense_shape=\(5, 2\)\?"),
        ((VALUES, INDICES, ()), ValueError, r"must be \(V, \*row_shape\)"),
        ((VALUES, INDICES, (-1, 2)), ValueError, "none negative"),
        ((VALUES, INDICES, 5), TypeError, "dense_shape must be a tuple of ints"),
        ((VALUES, INDICES, (5.5, 2)), TypeError, r"tuple of ints .*, got \(5.5, 2\)"),
        ((VALUES, INDICES, np.ones(2)), TypeError, r"tuple of ints .*, got array"),
    ],
)
def test_construction_checks(args, error, text):
    with pytest.raises(error, match=text):
        js.IndexedSlices(*args)


def test_dense_shape_must_be_static():
    with pytest.raises(TypeError, match="known before tracing"):
        jax.jit(lambda n: js.IndexedSlices(VALUES, INDICES, (n, 2)))(5)


def test_repr_tells_rows_shape_and_bytes(slices):
    assert repr(slices) == (
        "IndexedSlices(4 rows of float32[5, 2], indices int32[4] (3, 1, 3, -1): 48 B, "
        "dense 40 B)"
    )
    big = js.IndexedSlices(VALUES, INDICES, (1_000_000, 2))
    assert "rows of float32[1000000, 2]" in repr(big) and "saves 8.0 MB" in repr(big)
    assert "float32[?, 2]" in repr(js.IndexedSlices(VALUES, INDICES))
    seen = []
    jax.jit(lambda s: seen.append(repr(s)))(slices)
    assert seen == [repr(slices).replace(" (3, 1, 3, -1)", "")]
    assert "object" in repr(jax.tree.map(lambda x: object(), slices))


def test_to_dense(slices):
    np.testing.assert_array_equal(slices.to_dense(), DENSE)
    np.testing.assert_array_equal(jax.jit(js.IndexedSlices.to_dense)(slices), DENSE)
    with pytest.raises(ValueError, match=r"dense_shape=None.*num_rows, 2"):
        js.IndexedSlices(VALUES, INDICES).to_dense()


# Differences: indices have one axis, and dense_shape must be right.
REFUSED = ("indices_rank2", "index_scalar", "dense_shape_tail_ignored")


@pytest.fixture(scope="module")
def dense_arrays():
    """Those of all cases that have one."""
    cases = golden("to_dense")
    with jax.enable_x64(True):
        slices = {
            name: js.IndexedSlices(case["values"], case["indices"], case["dense_shape"])
            for name, case in cases.items()
            if name not in (*REFUSED, "no_dense_shape")
        }
        return fast_jit(js.tree.to_dense)(slices)


@pytest.mark.parametrize("name", golden("to_dense"))
def test_to_dense_equals_tensorflow(name, dense_arrays):
    case = golden("to_dense")[name]
    args = case["values"], case["indices"], case["dense_shape"]
    if name == "no_dense_shape":
        with pytest.raises(ValueError, match="dense_shape=None"):
            js.IndexedSlices(*args).to_dense()
    elif name in REFUSED:
        with pytest.raises(ValueError):
            js.IndexedSlices(*args)
    elif name == "out_of_range":
        # A difference: any out-of-range index is an empty slot, not only a negative one.
        np.testing.assert_array_equal(dense_arrays[name], numpy_dense(*args))
    else:
        got, wanted = dense_arrays[name], case["dense"]
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_sixteen_bits_are_summed_in_thirty_two():
    ones = jnp.ones((1000, 1), jnp.bfloat16)
    slices = js.IndexedSlices(ones, jnp.zeros(1000, int), (1, 1))
    # Adding one at a time in bfloat16 stops at 256.
    dense, rows = fast_jit(lambda s: (s.to_dense(), s.coalesce().values))(slices)
    assert dense[0, 0] == 1000 and rows[0, 0] == 1000
    assert dense.dtype == jnp.bfloat16


def test_linear_arithmetic(slices):
    np.testing.assert_array_equal((-slices).to_dense(), -DENSE)
    for scaled in (
        3 * slices,
        slices * 3,
        jnp.float32(3) * slices,
        np.float32(3) * slices,
    ):
        assert js.is_slices(scaled) and scaled.dtype == jnp.float32
        np.testing.assert_array_equal(scaled.to_dense(), 3 * DENSE)
    np.testing.assert_array_equal((slices / 2).to_dense(), DENSE / 2)
    total = slices + slices - 3 * slices
    assert js.is_slices(total) and total.values.shape == (12, 2)
    np.testing.assert_array_equal(total.to_dense(), -DENSE)
    np.testing.assert_array_equal(sum([slices, slices]).to_dense(), 2 * DENSE)
    assert slices.astype(jnp.float16).dtype == jnp.float16


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray])
def test_array_plus_slices_adds_the_rows(slices, jit, kind):
    array = kind(np.ones((5, 2), np.float32))
    add = lambda a, s: (a + s, a - s)  # noqa: E731
    plus, minus = (jax.jit(add) if jit else add)(array, slices)
    np.testing.assert_array_equal(plus, 1 + DENSE)
    np.testing.assert_array_equal(minus, 1 - DENSE)
    without_shape = js.IndexedSlices(VALUES, INDICES)
    np.testing.assert_array_equal(array + without_shape, 1 + DENSE)


def test_optax_apply_updates_is_right_unchanged(slices):
    params = {"t": jnp.ones((5, 2), jnp.bfloat16)}
    new = optax.apply_updates(params, {"t": slices})
    assert new["t"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(new["t"].astype(jnp.float32), 1 + DENSE)


def test_concat_slices(slices):
    both = js.concat_slices([slices, js.IndexedSlices(VALUES, INDICES)])
    assert both.dense_shape == (5, 2) and both.indices.shape == (8,)
    narrow = js.IndexedSlices(jnp.ones((1, 2)), jnp.array([-1], jnp.int8), (5, 2))
    mixed = js.concat_slices([slices, narrow])
    assert mixed.indices.dtype == jnp.int32
    np.testing.assert_array_equal(mixed.to_dense(), DENSE)
    with pytest.raises(ValueError, match="at least one"):
        js.concat_slices([])
    with pytest.raises(ValueError, match=r"different shapes: \(5, 2\), \(6, 2\)"):
        js.concat_slices([slices, js.IndexedSlices(VALUES, INDICES, (6, 2))])


def test_vmapped_slices_keep_the_shape_of_one_example(slices):
    batch = jax.vmap(lambda v: js.IndexedSlices(v, INDICES, (5, 2)))(
        jnp.stack([VALUES, 2 * VALUES, 0 * VALUES])
    )
    assert batch.dense_shape == (5, 2) and batch.shape == (3, 5, 2)
    wanted = np.stack([DENSE, 2 * DENSE, 0 * DENSE])
    several = fast_jit(
        lambda s: (s.to_dense(), s.coalesce().to_dense(), (s + s).to_dense() / 2)
    )
    for dense in several(batch):
        np.testing.assert_array_equal(dense, wanted)
    assert "3x4 rows" in repr(batch)


def test_indices_changed_by_a_foreign_tree_map_are_refused(slices):
    scaled = jax.tree.map(lambda x: jnp.zeros(x.shape), slices)
    for use in (
        lambda: scaled.to_dense(),
        lambda: scaled.coalesce(),
        lambda: jnp.zeros((5, 2)) + scaled,
        lambda: js.apply_updates(jnp.zeros((5, 2)), scaled),
        lambda: js.adam(0.1).update(scaled, js.adam(0.1).init(jnp.zeros((5, 2)))),
    ):
        with pytest.raises(TypeError, match=r"not row numbers any more.*from_optax"):
            use()


@fast_jit
def several_ways(slices):
    zeros = jnp.zeros(slices.shape)
    return (
        slices.to_dense(),
        zeros + slices,
        js.apply_updates(zeros, slices),
        (slices + slices).coalesce().to_dense() / 2,
    )


@given(
    kind=st.sampled_from([(1, "int8"), (9, "int32"), (9, "uint8"), (1, "uint32")]),
    indices=lists(st.integers(-3, 12), (0, 12)),
)
def test_means_what_a_loop_means(kind, indices):
    num_rows, dtype = kind
    indices = np.array(indices, int).astype(dtype)
    values = np.arange(2.0 * len(indices), dtype=np.float32).reshape(-1, 2) + 1
    slices = js.IndexedSlices(values, indices, (num_rows, 2))
    wanted = numpy_dense(values, indices.astype(int), (num_rows, 2))
    for got in several_ways(slices):
        np.testing.assert_array_equal(got, wanted)


def test_a_scan_can_carry_slices(slices):
    def body(carry, _):
        return (carry + slices).coalesce(4), carry.indices

    final, _ = jax.lax.scan(body, slices.coalesce(4), None, length=3)
    assert_close(final.to_dense(), jnp.asarray(4 * DENSE))


def test_indices_of_64_bits_stay_out_of_range():
    """JAX would cut them to 32 bits, and 2**32 + 3 would become row 3."""
    for indices in (np.array([2**32 + 3, 1]), [2**32 + 3, 1], np.array([-(2**40), 1])):
        s = js.IndexedSlices(jnp.ones((2, 1)), indices, (9, 1))
        np.testing.assert_array_equal(np.flatnonzero(s.to_dense()), [1])


def test_zeros_like_slices_have_no_rows():
    """Row 0 is not meant, which momentum would move."""
    slices = js.IndexedSlices(jnp.ones((3, 2)), jnp.array([0, 5, 3]), (20, 2))
    shapes = jax.eval_shape(lambda: slices)
    for zeros in (
        jax.tree.map(jnp.zeros_like, slices),
        jax.tree.map(np.zeros_like, jax.tree.map(np.asarray, slices)),
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
    ):
        assert (np.asarray(zeros.indices) < 0).all()
        assert (zeros + slices).coalesce().indices.tolist() == [0, 3, 5, 20, 20, 20]


@pytest.mark.parametrize("compare", [operator.eq, operator.ne, operator.lt])
@pytest.mark.parametrize("other", [0, np.zeros((5, 2)), np.float32(0), "slices"])
def test_comparisons_are_refused(slices, compare, other):
    other = js.IndexedSlices(VALUES, INDICES, (5, 2)) if isinstance(other, str) else other
    for pair in ((slices, other), (other, slices)):
        with pytest.raises(TypeError, match=r"no slices [<=>!]+ x.*type slices.to_dense"):
            compare(*pair)


MAPPED = [
    (jnp.ones_like, "jslices.tree.map"),
    (lambda x: jnp.full_like(x, 2), "jslices.tree.map"),
    (np.ones_like, "jslices.tree.map"),
    (lambda x: x.reshape(-1), "do not belong together"),
    (lambda x: jnp.tile(x, 2), "do not belong together"),
    (lambda x: x.T, "jslices.tree.map"),
]


@pytest.mark.parametrize("fun, text", MAPPED)
@pytest.mark.parametrize("jit", [False, True])
def test_functions_of_arrays_are_not_mapped_over_the_parts(slices, fun, text, jit):
    if jit and fun is np.ones_like:
        return
    run = lambda tree: jax.tree.map(fun, tree)  # noqa: E731
    with pytest.raises(TypeError, match=text):
        (jax.jit(run) if jit else run)([slices])
    zeros = jax.tree.map(jnp.zeros_like, slices)
    assert zeros.shape == slices.shape and not zeros.to_dense().any()


def test_the_package_can_be_imported_again(monkeypatch):
    for name in [x for x in sys.modules if x.split(".")[0] == "jslices"]:
        monkeypatch.delitem(sys.modules, name)
    again = importlib.import_module("jslices")
    assert again is not js
    assert again.IndexedSlices(VALUES, INDICES, (5, 2)).shape == (5, 2)
