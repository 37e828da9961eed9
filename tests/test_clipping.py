"""Clipping: TensorFlow's numbers, the dense result with duplicates, Optax's chains."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import examples
from helpers import all_at_once, assert_close, fast_jit, golden, numpy_dense
from hypothesis import given
from hypothesis import strategies as st

import jslices as js

CLIP = golden("clip")
CASES = [name for name in CLIP if name != "special"]

# Where we differ from TensorFlow on purpose. Its other numbers are met.
NAN2 = [np.nan, np.nan]
REFUSED = "refused"
SPECIAL = {  # key of the section: (ours, why)
    "clip_by_norm zero 0": ([0, 0], "nothing exceeds the limit"),
    "clip_by_global_norm zero 0": ([0, 0], "nothing exceeds the limit"),
    "clip_by_norm inf 0": (NAN2, "never silently zero"),
    "clip_by_norm inf 1": (NAN2, "never silently zero"),
    "clip_by_norm inf 10": (NAN2, "never silently zero"),
    "grad of sum clip_by_global_norm([x],1)*[1,2] at zero": (
        [1, 2],
        "clipping does nothing at zero",
    ),
    **{
        f"{name} {point} -1": (REFUSED, "no norm is negative")
        for name in ("clip_by_norm", "clip_by_global_norm")
        for point in ("zero", "nan", "inf", "v34")
    },
}
# Slices with duplicates are compared with the dense truth: there norms are of raw values.
DUPLICATES = {"dup", "noshape", "rank3"}
# These do not look at single values, or are made dense there first.
SAME_WITH_DUPLICATES = {"clip_by_norm_1000", "clip_by_average_norm_0.1"}


def slices_of(case):
    parts = case["in"]["is"]
    shape = parts["dense_shape"]
    return js.IndexedSlices(
        parts["values"], parts["indices"], None if shape is None else shape.tolist()
    )


def as_dense(x, num_rows=6):
    """Ours or TensorFlow's slices as an array, also without dense_shape."""
    if isinstance(x, dict):
        x = js.IndexedSlices(x["is"]["values"], x["is"]["indices"])
    if js.is_slices(x):
        rows = x.values.shape[1:]
        shape = x.dense_shape or (num_rows, *rows)
        return numpy_dense(x.values, x.indices, shape)
    return np.asarray(x)


# (key of the case, what we call, the same on a dense array in numpy's words)
def clipped_by(norm_of):
    return lambda x, limit: x * limit / np.maximum(norm_of(x), limit)


whole = clipped_by(lambda x: np.sqrt((x**2).sum()))
CALLS = {
    "clip_by_norm_0.5": (lambda s: js.clip_by_norm(s, 0.5), lambda x: whole(x, 0.5)),
    "clip_by_norm_2": (lambda s: js.clip_by_norm(s, 2.0), lambda x: whole(x, 2)),
    "clip_by_norm_1000": (lambda s: js.clip_by_norm(s, 1000), lambda x: x),
    "clip_by_norm_axes_last_1": (
        lambda s: js.clip_by_norm(s, 1.0, axes=[-1]),
        lambda x: clipped_by(lambda x: np.sqrt((x**2).sum(-1, keepdims=True)))(x, 1),
    ),
    "clip_by_norm_axes0_1": (
        lambda s: js.clip_by_norm(s, 1.0, axes=0),
        lambda x: clipped_by(lambda x: np.sqrt((x**2).sum(0, keepdims=True)))(x, 1),
    ),
    "clip_by_value_-1_1.5": (
        lambda s: js.clip_by_value(s, -1.0, 1.5),
        lambda x: x.clip(-1, 1.5),
    ),
    "clip_by_average_norm_0.1": (
        lambda s: js.clip_by_average_norm(s, 0.1),
        lambda x: whole(x, 0.1 * x.size),
    ),
    "global_norm": (lambda s: js.global_norm([s]), lambda x: np.sqrt((x**2).sum())),
}


LIMITS = [0.5, 2, 1000]


@functools.cache
def results(name):
    """All that is compared with TensorFlow for a case, compiled together."""

    @fast_jit
    def compute(slices, other):
        tree = [slices, other, None]
        calls = {k: f(slices) for k, (f, _) in CALLS.items() if "error" not in case[k]}
        for limit in LIMITS:
            calls[f"clip_by_global_norm_{limit}"] = js.clip_by_global_norm(tree, limit)
        known = js.clip_by_global_norm([slices, other], 2.0, use_norm=10.0)
        return {**calls, "clip_by_global_norm_use_norm_10": known}

    case = CLIP[name]
    return compute(slices_of(case), jnp.asarray(case["other"]))


@pytest.mark.parametrize("key", CALLS)
@pytest.mark.parametrize("name", CASES)
def test_equals_tensorflow(name, key):
    case, (call, dense_truth) = CLIP[name], CALLS[key]
    slices, wanted = slices_of(case), CLIP[name][key]
    if "error" in wanted:
        with pytest.raises(ValueError, match="dense_shape=None; give it"):
            call(slices)
        return
    got = results(name)[key]
    assert js.is_slices(got) == (key != "global_norm")
    if js.is_slices(got):
        assert got.dense_shape == slices.dense_shape
    truth = dense_truth(as_dense(slices, 2 if name == "noshape" else 6))
    np.testing.assert_allclose(
        as_dense(got, len(truth)) if truth.ndim else got, truth, 2e-6
    )
    wanted = as_dense(wanted, len(truth) if truth.ndim else 0)
    same = name not in DUPLICATES or key in SAME_WITH_DUPLICATES
    assert np.allclose(truth, wanted, 2e-6, 1e-7) == same


@pytest.mark.parametrize("name", ["nodup", "noshape", "empty"])
def test_values_between_bounds_that_exclude_zero_are_refused(name):
    with pytest.raises(ValueError, match=r"would move the untouched rows.*to_dense\(\)"):
        js.clip_by_value(slices_of(CLIP[name]), 1.0, 2.0)


@pytest.mark.parametrize("limit", [*LIMITS, "use_norm_10"])
@pytest.mark.parametrize("name", CASES)
def test_global_norm_equals_tensorflow(name, limit):
    case = CLIP[name]
    slices, other = slices_of(case), jnp.asarray(case["other"])
    wanted = case[f"clip_by_global_norm_{limit}"]
    got, norm = results(name)[f"clip_by_global_norm_{limit}"]
    if limit == "use_norm_10":
        wanted = [*wanted[:2], None, wanted[2]]
        got.append(None)
        assert norm == 10
    assert isinstance(got, list) and got[2] is None
    # With duplicates: as TensorFlow's, had the sum been given.
    num_rows = 5 if name == "rank3" else 6
    x = as_dense(slices, num_rows)
    true_norm = np.sqrt((x**2).sum() + (other**2).sum())
    if limit != "use_norm_10":
        np.testing.assert_allclose(norm, true_norm, 1e-6)
    if name not in DUPLICATES or norm == 10:
        np.testing.assert_allclose(norm, wanted[3], 1e-6)
        np.testing.assert_allclose(
            as_dense(got[0], num_rows), as_dense(wanted[0], num_rows), 2e-6, 1e-7
        )
        np.testing.assert_allclose(got[1], wanted[1], 2e-6)
    else:
        scale = min(limit / true_norm, 1)
        np.testing.assert_allclose(as_dense(got[0], num_rows), x * scale, 2e-6, 1e-7)
        np.testing.assert_allclose(got[1], other * scale, 2e-6)
        assert not np.isclose(norm, wanted[3], 1e-3)


@pytest.mark.parametrize("name", ["nodup", "dup"])
def test_dense_arrays_equal_tensorflow(name):
    case = CLIP[name]
    x = jnp.asarray(case["dense"])
    norm, clipped = fast_jit(lambda x: (js.global_norm(x), js.clip_by_norm(x, 2.0)))(x)
    np.testing.assert_allclose(norm, case["dense_global_norm"], 1e-6)
    for got in (clipped, as_dense(results(name)["clip_by_norm_2"])):
        np.testing.assert_allclose(got, case["dense_clip_by_norm_2"], 2e-6, 1e-7)


POINTS = {"zero": [0, 0], "nan": [np.nan, 1], "inf": [np.inf, 1], "v34": [3, 4]}


def clipped(kind, x, limit):
    """By each function: what becomes of ``x``, and the norm if it returns that."""
    rows = js.IndexedSlices(x[None], jnp.array([1]), (3, 2))
    t = rows if kind == "slices" else x
    (by_global_norm,), norm = js.clip_by_global_norm([t], limit)
    out = {
        "clip_by_norm": (js.clip_by_norm(t, limit), None),
        "clip_by_global_norm": (by_global_norm, norm),
    }
    if kind == "slices":
        out = {name: (rows.values[0], norm) for name, (rows, norm) in out.items()}
    return out


@functools.cache
def special(kind):
    """``clipped``, and for each function the gradient of a weighted sum of its result."""

    def weighted(x, limit, name):
        return (clipped(kind, x, limit)[name][0] * jnp.array([1.0, 2.0])).sum()

    return fast_jit(
        lambda x, limit: (
            clipped(kind, x, limit),
            {name: jax.grad(weighted)(x, limit, name) for name in CLIPPERS},
        )
    )


CLIPPERS = ("clip_by_norm", "clip_by_global_norm")


@pytest.mark.parametrize("kind", ["array", "slices"])
@pytest.mark.parametrize("key", CLIP["special"])
def test_special_numbers_as_tensorflow(key, kind):
    wanted = CLIP["special"][key]
    if "clip_by_value" in key:
        x = jnp.array([-1.0, 0, 0.5, 1, 2])
        got = jax.grad(lambda x: js.clip_by_value(x, 0.0, 1.0).sum())(x)
        np.testing.assert_array_equal(got, wanted)
        return
    words = key.replace("grad of sum ", "").replace("(x,1)*[1,2] at", "")
    name, point, *limit = words.replace("([x],1)*[1,2] at", "").split()
    x, limit = jnp.array(POINTS[point], jnp.float32), float(*limit) if limit else 1.0
    ours, _ = SPECIAL.get(key, (None, None))
    if ours == REFUSED:
        with pytest.raises(ValueError, match=r"clip_norm=-1.0\): wanted a number of at"):
            clipped(kind, x, limit)
        return
    values, gradients = special(kind)(x, limit)
    if key.startswith("grad of"):
        got = gradients[name]
    else:
        got, norm = values[name]
        if norm is not None:
            wanted, wanted_norm = wanted
            np.testing.assert_array_equal(norm, wanted_norm)
    if ours is not None:
        assert not np.allclose(ours, wanted, equal_nan=True)  # the difference is real
        wanted = ours
    np.testing.assert_allclose(got, wanted, 1e-6)


def test_duplicates_are_summed_first():
    rows = js.IndexedSlices(jnp.array([[3.0, 4], [6, 8]]), jnp.array([1, 1]), (9, 2))
    assert js.global_norm(rows) == 15  # TensorFlow: 11.18
    (clipped,), norm = js.clip_by_global_norm((rows,), 5.0)
    assert norm == 15
    np.testing.assert_allclose(clipped.to_dense()[1], [3, 4], 1e-6)
    np.testing.assert_array_equal(clipped.indices, [1, 9])


# One shape, so that everything is compiled once.
V, D, K = 5, 2, 6


CALLED = {
    "global": lambda t: js.clip_by_global_norm(t, 1.5),
    "norm": lambda t: js.clip_by_norm(t["a"], 1.5),
    "columns": lambda t: js.clip_by_norm(t["a"], 1.5, axes=0),
    "rows": lambda t: js.clip_rows_by_norm(t["a"], 1.5),
    "average": lambda t: js.clip_by_average_norm(t["a"], 0.1),
    "value": lambda t: js.clip_by_value(t["a"], -1.0, 0.5),
    "tx_global": lambda t: js.optim.clip_by_global_norm(1.5).update(t, ())[0],
    "tx_value": lambda t: js.optim.clip(0.5).update(t, ())[0],
    "tx_rows": lambda t: js.optim.clip_rows_by_norm(0.5).update(t["a"], ())[0],
    "tx_rms": lambda t: js.optim.clip_by_block_rms(0.1).update(t, ())[0],
}
call_all = fast_jit(lambda tree: {name: call(tree) for name, call in CALLED.items()})


@examples(40)
@given(
    ids=st.lists(st.integers(-2, V + 2), min_size=K, max_size=K),
    seed=st.integers(0, 99),
    poison=st.booleans(),
)
def test_slices_equal_dense(ids, seed, poison):
    values = np.random.default_rng(seed).normal(size=(K, D)).astype(np.float32)
    if poison:  # what empty entries hold does not count
        outside = (np.array(ids) < 0) | (np.array(ids) >= V)
        values[outside] = np.nan
    slices = js.IndexedSlices(values, np.array(ids, np.int32), (V, D))
    b = jnp.full(3, seed, jnp.float32)
    dense = jnp.asarray(numpy_dense(values, ids, (V, D)))
    got = call_all({"a": slices, "b": b, "c": None})
    wanted = call_all({"a": dense, "b": b, "c": None})
    for name in CALLED:
        assert_close(got[name], wanted[name])


RNG = np.random.default_rng(0)
GRADS = {
    "table": js.IndexedSlices(
        RNG.normal(size=(K, D)).astype(np.float32), [1, 1, 3, 1, -1, V], (V, D)
    ),
    "w": RNG.normal(size=3).astype(np.float32),
}
LIKE_OPTAX = [
    ("clip_by_global_norm", "clip_by_global_norm", 1.5),
    ("clip_by_global_norm", "clip_by_global_norm", 100.0),
    ("clip", "clip", 0.5),
    ("clip_by_block_rms", "clip_by_block_rms", 0.1),
]


@pytest.mark.parametrize("ours, theirs, limit", LIKE_OPTAX)
def test_transformations_equal_optax_on_dense_gradients(ours, theirs, limit):
    dense = {**GRADS, "table": numpy_dense(*tree_parts(GRADS["table"]))}
    one, other = getattr(js.optim, ours)(limit), getattr(optax, theirs)(limit)
    clip = lambda tx: fast_jit(lambda grads: tx.update(grads, tx.init(grads))[0])  # noqa: E731
    assert_close(clip(one)(dense), clip(other)(dense), rtol=3e-7)


def tree_parts(slices):
    return slices.values, slices.indices, slices.dense_shape


def test_in_a_chain_of_optax():
    params = {"table": np.zeros((V, D), np.float32), "w": np.zeros(3, np.float32)}
    dense = {**GRADS, "table": numpy_dense(*tree_parts(GRADS["table"]))}
    ours = optax.chain(js.optim.clip_by_global_norm(1.5), js.adagrad(0.1))
    theirs = optax.chain(optax.clip_by_global_norm(1.5), optax.adagrad(0.1))
    state, wanted_state = ours.init(params), theirs.init(params)
    update, reference = fast_jit(ours.update), fast_jit(theirs.update)
    for _ in range(2):
        updates, state = update(GRADS, state, params)
        wanted, wanted_state = reference(dense, wanted_state, params)
        assert_close(updates, wanted)


def test_rows_are_clipped_in_tables_only():
    link = js.optim.clip_rows_by_norm(1.0)
    tx = optax.chain(optax.masked(link, {"table": True, "w": False}), js.sgd(1.0))
    params = {"table": jnp.zeros((V, D)), "w": jnp.zeros(2)}
    rows = js.IndexedSlices(jnp.array([[3.0, 4], [0.3, 0.4]]), jnp.array([2, 4]), (V, D))
    grads = {"table": rows, "w": jnp.array([5.0, 5])}
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["table"].values, [[-0.6, -0.8], [-0.3, -0.4]], 1e-6)
    np.testing.assert_array_equal(updates["w"], [-5, -5])


LINKS = ["clip", "clip_by_global_norm", "clip_by_block_rms", "clip_rows_by_norm"]


@pytest.mark.parametrize("name", [*LINKS, "combine_duplicates"])
def test_links_are_documented_and_stateless(name):
    link = getattr(js.optim, name)
    assert "Example:" in link.__doc__ and "Source:" in link.__doc__
    tx = link("mean" if name == "combine_duplicates" else 1.0)
    assert isinstance(tx, js.GradientTransformation)
    assert tx.init(jnp.ones(3)) == () and tx.update(None, ()) == (None, ())


def test_none_passes_and_an_empty_tree_has_no_norm():
    assert js.global_norm([]) == 0 and js.global_norm({"a": None}) == 0
    tree, norm = js.clip_by_global_norm({"a": None, "b": (None, jnp.ones(4))}, 1.0)
    assert norm == 2 and tree["a"] is None and tree["b"][0] is None
    np.testing.assert_array_equal(tree["b"][1], [0.5] * 4)
    for tx in (js.optim.clip(1.0), js.optim.clip_rows_by_norm(1.0)):
        assert tx.update([None], tx.init([None]))[0] == [None]


@fast_jit
def clipped_tree(tree):
    link = js.optim.clip_by_global_norm(1.0)
    rows = tree["rows"]
    return {
        "global": js.clip_by_global_norm(tree, 1.0)[0],
        "link": link.update(tree, link.init(tree))[0],
        "norm": js.clip_by_norm(rows, 1.0),
        "average": js.clip_by_average_norm(rows, 1.0),
        "rows": js.clip_rows_by_norm(rows, 1.0),
        "use_norm": js.clip_by_global_norm([tree["w"]], 1.0, use_norm=rows.values.sum()),
        "global_norm": js.global_norm(rows),
    }


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_norm_that_is_not_finite_makes_everything_nan(bad):
    values = jnp.array([[1.0], [bad], [2.0]])
    rows = js.IndexedSlices(values, jnp.array([4, 1, 2]), (6, 1))
    out = clipped_tree({"rows": rows, "w": jnp.ones(2)})
    for name in ("global", "link"):
        assert set(out[name]["rows"].indices.tolist()) == {1, 2, 4}
        assert np.isnan(out[name]["rows"].values).all() and np.isnan(out[name]["w"]).all()
    assert np.isnan(out["norm"].values).all() and np.isnan(out["average"].values).all()
    # A norm for each row spoils that row only.
    by_row = out["rows"].values.ravel()[np.argsort(out["rows"].indices)]
    np.testing.assert_array_equal(by_row, [np.nan, 1, 1])
    if bad != -np.inf:  # whose sum is a negative use_norm
        assert np.isnan(out["use_norm"][0][0]).all()
    # What an empty entry holds does not count.
    empty = js.IndexedSlices(values, jnp.array([4, 6, 2]), (6, 1))
    out = clipped_tree({"rows": empty, "w": jnp.ones(2)})
    np.testing.assert_allclose(out["global_norm"], 5**0.5, 1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_are_squared_in_float32(dtype):
    rows = js.IndexedSlices(
        jnp.array([[150, 200], [150, 200]], dtype), jnp.array([3, 3]), (9, 2)
    )
    many = jnp.full((4096,), 0.25, dtype)

    @fast_jit
    def compute(rows, many):
        by_global_norm, norm = js.clip_by_global_norm(rows, 5.0)
        clipped = (
            by_global_norm,
            js.clip_by_norm(rows, 5.0),
            js.clip_rows_by_norm(rows, 5.0),
        )
        return norm, clipped, js.global_norm(many)

    norm, clipped, norm_of_many = compute(rows, many)
    assert norm == 500 and norm.dtype == jnp.float32  # TensorFlow: inf
    for out in clipped:
        assert out.dtype == dtype
        np.testing.assert_allclose(np.asarray(out.values[0], np.float32), [3, 4])
    assert norm_of_many == 16


def test_limits_that_broadcast():
    x = jnp.array([[3.0, 1], [4, 1]])
    rows = js.IndexedSlices(x, jnp.array([2, 0]), (3, 2))
    limit = jnp.array([1.0, 9.0])
    wanted = [[0.6, 1], [0.8, 1]]
    np.testing.assert_allclose(js.clip_by_norm(x, limit, axes=0), wanted, 1e-6)
    got = js.clip_by_norm(rows, limit, axes=0).to_dense()
    np.testing.assert_allclose(got, [wanted[1], [0, 0], wanted[0]], 1e-6)
    got = js.clip_by_value(rows, -limit, limit).to_dense()
    np.testing.assert_array_equal(got, [[1, 1], [0, 0], [1, 1]])
    with pytest.raises(ValueError, match="cannot have limits of their own"):
        js.clip_by_norm(rows, jnp.ones((3, 1)), axes=1)
    for call in (
        lambda: js.clip_by_norm(jnp.ones(2), jnp.ones((3, 2))),
        lambda: js.clip_by_value(x, jnp.zeros(3), 1.0),
    ):
        with pytest.raises(ValueError, match="does not broadcast to the shape"):
            call()


def test_clip_by_value_of_numpy_kinds():
    special = np.array([np.nan, np.inf, -np.inf], np.float32)
    cases = [
        (np.array([1, 5, 9]), 2, 6, [2, 5, 6]),
        (np.array([100, -100], np.int8), -300, 50, [50, -100]),
        # Crossed bounds and NaN as TensorFlow.
        (np.array([0, 9], np.float32), 3.0, 1.0, [3, 3]),
        (special, -1.0, 1.0, [np.nan, 1, -1]),
        (special[1:], -jnp.inf, jnp.inf, special[1:]),
        (np.ones(1, np.float32), -1.0, jnp.nan, [np.nan]),
        (js.IndexedSlices([3, 4], [1, 1], (3,)), 0, 5, [5, 0]),
    ]
    calls = {n: lambda c=c: js.clip_by_value(*c[:3]) for n, c in enumerate(cases)}
    for n, got in all_at_once(calls).items():
        got = got.values if js.is_slices(got) else got
        np.testing.assert_array_equal(got, cases[n][-1])
    # Traced bounds that exclude 0 cannot be refused, but are seen.
    rows = js.IndexedSlices([1.0], [1], (3,))
    clip = jax.jit(lambda low: js.clip_by_value(rows, low, 2.0).values)
    assert clip(0.0) == 1 and np.isnan(clip(0.5))


def test_in_scan_and_vmap():
    values = jnp.arange(12.0).reshape(2, 3, 2)
    indices = jnp.array([[1, 1, 4], [0, 9, 0]])
    stacked = js.IndexedSlices.tree_unflatten((5, 2), (values, indices))
    one = lambda s: js.clip_by_global_norm({"s": s, "n": None}, 2.0)  # noqa: E731

    @fast_jit
    def in_each_way(stacked):
        dense = stacked.to_dense()
        return (
            jax.vmap(one)(stacked),
            jax.lax.scan(lambda c, s: (c, one(s)), None, stacked)[1],
            jnp.sqrt((dense**2).sum((1, 2))),
            js.clip_rows_by_norm(stacked, 2.0).to_dense(),
            jax.vmap(lambda x: js.clip_rows_by_norm(x, 2.0))(dense),
        )

    mapped, scanned, norms, rows, dense_rows = in_each_way(stacked)
    chex.assert_trees_all_close(mapped, scanned, rtol=1e-6)
    np.testing.assert_allclose(mapped[1], norms, 1e-6)
    np.testing.assert_allclose(rows, dense_rows)
    with pytest.raises(ValueError, match="batch axis from vmap; clip inside the vmap"):
        js.clip_by_norm(stacked, 1.0, axes=-1)


def test_no_array_of_the_table_s_size():
    rows = js.IndexedSlices(jnp.ones((4, 2)), jnp.array([1, 1, 7, 3]), (77_777, 2))
    tx = js.optim.clip_by_block_rms(1.0)
    for call in (
        lambda s: js.clip_by_global_norm(s, 1.0),
        lambda s: js.clip_by_average_norm(s, 1.0),
        lambda s: js.clip_by_value(s, -1.0, 1.0),
        lambda s: js.clip_rows_by_norm(s, 1.0),
        lambda s: tx.update(s, ())[0],
    ):
        assert "77777,2]" not in jax.jit(call).lower(rows).as_text()
        assert "[77777" not in str(jax.make_jaxpr(call)(rows))


FUNCTIONS = [
    js.global_norm,
    js.all_finite,
    lambda s: js.clip_by_global_norm(s, 1.0),
    lambda s: js.clip_by_norm(s, 1.0),
    lambda s: js.clip_by_average_norm(s, 1.0),
    lambda s: js.clip_by_value(s, -1.0, 1.0),
    lambda s: js.clip_rows_by_norm(s, 1.0),
    lambda s: js.mask_rows(s, jnp.ones(9, bool)),
    lambda s: js.project_rows(jnp.ones((9, 2)), s, 1.0),
    lambda s: js.per_example_norms(s),
    lambda s: js.sum_stacked(s),
    lambda s: js.optim.clip(1.0).update(s, ()),
    lambda s: js.optim.combine_duplicates("mean").update(s, ()),
]


@pytest.mark.parametrize("call", FUNCTIONS)
def test_indices_changed_by_a_foreign_map_are_refused(call):
    rows = js.IndexedSlices(jnp.ones((1, 2)), jnp.array([3]), (9, 2))
    mapped = jax.tree.map(lambda x: jnp.zeros(x.shape), rows)
    with pytest.raises(TypeError, match=r"dtype float32.*jslices.from_optax"):
        call(mapped)


@pytest.mark.parametrize("order", ["as it is", "unique", "with an empty entry"])
def test_a_limit_for_each_row(order):
    """Those of entries of one row add up: CowClip's, by counts, without counting."""
    values, indices = np.array([[3, 4], [0.3, 0.4], [6, 8]], "f"), np.array([5, 2, 5])
    each = np.array([1, 0.25, 1], "f")
    limits = np.zeros(9, "f")
    np.add.at(limits, indices, each)
    if order == "with an empty entry":
        values, each = np.pad(values, ((0, 1), (0, 0))), np.append(each, np.nan)
        indices = np.append(indices, 9)
    rows = js.IndexedSlices(jnp.array(values), jnp.array(indices), (9, 2))
    dense = rows.to_dense()
    if order == "unique":
        rows, each = rows.coalesce(), np.array([0.25, 2, 0], "f")
    traced = fast_jit(lambda *args: js.clip_rows_by_norm(*args).to_dense())
    wanted = np.asarray(dense) * np.minimum(
        1, limits / np.maximum(np.linalg.norm(dense, axis=1), 1e-9)
    ).reshape(9, 1)
    assert_close(traced(rows, each), wanted)
    assert_close(js.clip_rows_by_norm(dense, limits), wanted)
    # Several axes may number the rows.
    packed = js.IndexedSlices(rows.values, rows.indices, (3, 3, 2), row_axes=2)
    assert_close(traced(packed, each).reshape(9, 2), wanted)
    if order == "as it is":
        assert_close(js.clip_rows_by_norm(rows, each).to_dense(), wanted)
        with pytest.raises(ValueError, match=r"max_norm \[\], or \[3\] for each .* \(9,\)"):
            js.clip_rows_by_norm(rows, limits)


def test_errors():
    rows = js.IndexedSlices(jnp.ones((1, 2)), jnp.array([3]), (9, 2))
    ints = js.IndexedSlices(jnp.ones((1, 2), int), jnp.array([3]), (9, 2))
    with pytest.raises(TypeError, match=r"got int32\[9, 2\] at \['a'\], int32\[3\] at"):
        js.global_norm({"a": ints, "b": jnp.arange(3), "c": jnp.ones(3)})
    with pytest.raises(TypeError, match=r"clip_by_norm wants floating arrays, got int32"):
        js.clip_by_norm(jnp.arange(3), 1.0)
    with pytest.raises(ValueError, match=r"axes=\[2\]\): an array of shape \(9, 2\)"):
        js.clip_by_norm(rows, 1.0, axes=[2])
    with pytest.raises(TypeError, match=r"clip_norm='1'\): wanted a number"):
        js.clip_by_norm(rows, "1")
    with pytest.raises(TypeError, match=r"clip_norm=float32\[2\]\): wanted a number"):
        js.clip_by_global_norm(rows, jnp.ones(2))
    with pytest.raises(ValueError, match="got a scalar"):
        js.clip_rows_by_norm(jnp.float32(1), 1.0)
    with pytest.raises(TypeError, match="clip_value_max of dtype float32 for int32"):
        js.clip_by_value(jnp.arange(3), 0, 1.5)
    with pytest.raises(TypeError, match="cannot order complex numbers"):
        js.clip_by_value(jnp.ones(3, complex), -1, 1)
    for name in LINKS:
        with pytest.raises(ValueError, match=rf"{name}\(.*wanted a number of at"):
            getattr(js.optim, name)(-1.0)
    unknown = js.IndexedSlices(jnp.ones((1, 2)), jnp.array([3]))
    with pytest.raises(ValueError, match="mean over the dense array"):
        js.optim.clip_by_block_rms(1.0).update(unknown, ())


def test_complex_numbers_and_double_precision():
    z = jnp.array([3 + 4j, 0])
    norm, clipped = fast_jit(lambda z: (js.global_norm(z), js.clip_by_norm(z, 1.0)))(z)
    assert norm == 5
    np.testing.assert_allclose(clipped, [0.6 + 0.8j, 0], 1e-6)
    with jax.enable_x64(True):
        single, double = np.ones(3, np.float32), np.ones(1)
        norms = fast_jit(lambda a, b: (js.global_norm([a, b]), js.clip_by_norm(b, 1.0)))
        assert [x.dtype for x in norms(single, double)] == [jnp.float64, jnp.float64]
        assert norms(single, double * 1e100)[0] == 1e100  # float32 would give infinity
