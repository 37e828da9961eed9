"""Bags of ids: TensorFlow's numbers, every form, gradients against dense formulations."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from helpers import assert_close, fast_jit, golden, numpy_array
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import checkify

import jslices as js

COMBINERS = ("mean", "sum", "sqrtn", "max")
ONES = np.ones((5, 2), np.float32)
LOOKUPS = {
    "plain": js.embedding_lookup_sparse,
    "safe": js.safe_embedding_lookup_sparse,
}

#: What differs from TensorFlow on purpose, by the start of the case (see docs).
DIFFERENCES = {
    "trailing_empty_rows": "all rows are there",
    "zero_weight_sum": "all rows are there",
    "empty": "all rows are there",
}


def bcoo(data, indices, shape):
    from jax.experimental.sparse import BCOO

    traced = isinstance(data, jax.Array)
    parts = (
        (data, indices) if traced else map(jax.device_put, map(np.asarray, (data, indices)))
    )
    return BCOO(tuple(parts), shape=tuple(shape))


def names(section):
    return [name for name in golden(section) if not name.startswith("_")]


def arguments(case, rows=5, entries=8):
    """A case as a BCOO of one shape for all cases, so that compilation is shared.

    BCOO pads with indices that are out of range; rows beyond those of the case are empty.
    """
    count = entries - len(case["ids"])
    shape = (rows, 3) if len(case["shape"]) == 2 else tuple(case["shape"])
    indices = np.pad(case["indices"], ((0, count), (0, 0)), constant_values=99)
    ids = bcoo(np.pad(case["ids"].astype(np.int32), (0, count)), indices, shape)
    weights = case["weights"]
    if weights is not None:
        weights = jnp.asarray(np.pad(weights, (0, count), constant_values=7))
    return ids, weights


def padded(x, rows=5):
    return np.pad(x, ((0, rows - len(x)), (0, 0))) if x.ndim == 2 else x


@functools.cache
def compiled(lookup, shape):
    """The lookup with its gradients, one program for all cases of a shape.

    By combiner and default id: they share what is done with the ids.
    """

    def run(combiner, default, table, ids, weights, cotangent):
        keywords = {"default_id": default} if lookup == "safe" else {}
        look = functools.partial(LOOKUPS[lookup], combiner=combiner, **keywords)

        def loss(table, weights):
            out = look(table, ids, weights)
            return (out * cotangent).sum(), out

        grads, out = js.grad(loss, (0, 1), has_aux=True)(table, weights)
        clipped = look(table, ids, weights, max_norm=0.8) if lookup == "plain" else None
        return grads, out, clipped

    def every(table, data, indices, weights, cotangent):
        args = table, bcoo(data, indices, shape), weights, cotangent
        settings = itertools.product(
            COMBINERS[:3], [None] if lookup == "plain" else [None, 3]
        )
        return {str(setting): run(*setting, *args) for setting in settings}

    return fast_jit(every)


@pytest.mark.parametrize("name", names("embedding_lookup_sparse"))
def test_equals_tensorflow(name):
    case = golden("embedding_lookup_sparse")[name]
    table = jnp.asarray(golden("embedding_lookup_sparse")["_params"])
    kind, combiner, _ = name.split()
    ids, weights = arguments(case)
    # A difference: rows at the end that are empty are there as well.
    assert (len(case["out"]) < case["shape"][0]) <= (kind in DIFFERENCES)
    every = compiled("plain", ids.shape)(
        table, ids.data, ids.indices, weights, padded(case["cotangent"])
    )
    (of_table, of_weights), out, clipped = every[str((combiner, None))]
    assert_close(out, padded(case["out"]))
    assert js.is_slices(of_table) and of_table.indices.shape == (8,)
    assert_close(of_table, case["grad_params_dense"])
    if weights is not None:
        of_weights = np.asarray(of_weights)[: len(case["ids"])]
        assert_close(of_weights, case["grad_weights"])
    assert_close(clipped, padded(case["max_norm_0.8"]))


@pytest.mark.parametrize("name", names("safe_embedding_lookup_sparse"))
def test_safe_equals_tensorflow(name):
    case = golden("safe_embedding_lookup_sparse")[name]
    table = jnp.asarray(golden("safe_embedding_lookup_sparse")["_params"])
    ids, weights = arguments(case)
    combiner, default = name.split()[1], case["default_id"]
    every = compiled("safe", ids.shape)(
        table, ids.data, ids.indices, weights, padded(case["cotangent"])
    )
    (of_table, _), out, _ = every[str((combiner, default))]
    assert_close(np.asarray(out)[: len(case["out"])], case["out"])
    assert js.is_slices(of_table)
    assert_close(of_table, case["grad_params_dense"])


@pytest.mark.parametrize("lookup", LOOKUPS.values())
def test_no_ids_at_all(lookup):
    nothing = np.zeros((0, 2), np.int32)
    inputs = [(bcoo(np.zeros(0, np.int32), nothing, (3, 2)), 3), (nothing, 0)]

    @fast_jit
    def every(table):
        def grad(ids, combiner):
            def loss(table):
                out = lookup(table, ids, None, combiner)
                return out.sum(), out

            return js.grad(loss, has_aux=True)(table)

        return [[grad(ids, c) for c in COMBINERS] for ids, _ in inputs]

    for results, (_, rows) in zip(every(ONES), inputs, strict=True):
        for slices, out in results:
            assert out.shape == (rows, 2) and not np.asarray(out).any()
            assert js.is_slices(slices) and not slices.values.size


# --- forms ------------------------------------------------------------------------------

PADDED = np.array([[3, 1, 0], [4, 4, 0], [0, 0, 0], [2, 0, 0]])
MASK = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 0]], bool)
WEIGHTS = np.array([[1, 0.5, 2], [-1, 3, 9], [9, 9, 9], [2, 9, 9]], np.float32)
VALUES, VALUE_WEIGHTS = PADDED[MASK], WEIGHTS[MASK]
SEGMENTS = np.nonzero(MASK)[0]
ORDER = np.array([4, 0, 5, 2, 1, 3])
FORMS = {
    "mask": ((PADDED, MASK), WEIGHTS),
    "mask=": (PADDED, WEIGHTS),
    "segments": ((VALUES, SEGMENTS, 4), VALUE_WEIGHTS),
    "shuffled": ((VALUES[ORDER], SEGMENTS[ORDER], 4), VALUE_WEIGHTS[ORDER]),
    "splits": ((np.append(VALUES, [7, 7]), np.array([0, 3, 5, 5, 6])), None),
    "bcoo": (None, None),
}


def form(name, weighted):
    ids, weights = FORMS[name]
    keywords = {"mask": MASK} if name == "mask=" else {}
    if name == "splits":
        weights = np.append(VALUE_WEIGHTS, [9, 9]).astype(np.float32)
    if name == "bcoo":
        indices = np.stack(np.nonzero(MASK), 1)
        indices = np.concatenate([indices, [[4, 3]]])  # BCOO's own padding
        ids = bcoo(np.append(VALUES, 7), indices, (4, 3))
        weights = bcoo(np.append(VALUE_WEIGHTS, np.float32(9)), indices, (4, 3))
    return ids, (weights if weighted else None), keywords


def dense_bags(table, weights, combiner):
    """The same by masks on the padded array."""
    keep = jnp.asarray(MASK)[..., None]
    w = jnp.where(MASK, weights, 0)[..., None]
    rows = table[PADDED]
    if combiner == "max":
        top = jnp.where(keep, rows * w, -jnp.inf).max(1)
        return jnp.where(MASK.any(1)[:, None], top, 0)
    divisor = {
        "sum": jnp.ones((4, 1)),
        "mean": w.sum(1),
        "sqrtn": jnp.sqrt(jnp.where(MASK.any(1)[:, None], (w**2).sum(1), 1)),
    }[combiner]
    usable = divisor != 0
    return jnp.where(usable, (rows * w).sum(1) / jnp.where(usable, divisor, 1), 0)


RNG = np.random.default_rng(0)
TABLE, COTANGENT = (RNG.normal(size=(n, 2)).astype(np.float32) for n in (6, 4))


def run_all(form, combiners, table, data):
    """``((of_table, of_weights), out)`` of one form for each combiner."""
    ids, _, keywords = form

    def run(combiner):
        def loss(table, data):
            out = js.embedding_lookup_sparse(table, ids, data, combiner, **keywords)
            return (out * COTANGENT).sum(), out

        return js.grad(loss, (0, 1), has_aux=True)(table, data)

    return [run(combiner) for combiner in combiners]


@functools.cache
def wanted(weighted):
    """The same by the dense formulation."""

    def run(combiner, table, weights):
        def loss(table, weights):
            out = dense_bags(table, weights, combiner)
            return (out * COTANGENT).sum(), out

        return jax.grad(loss, (0, 1), has_aux=True)(table, weights)

    weights = WEIGHTS if weighted else np.ones_like(WEIGHTS)
    every = fast_jit(lambda *args: {c: run(c, *args) for c in COMBINERS})
    return every(TABLE, weights)


def check_form(results, combiners, weighted, pick_weights):
    for ((of_table, of_weights), out), combiner in zip(results, combiners, strict=True):
        (table_wanted, weights_wanted), out_wanted = wanted(weighted)[combiner]
        assert_close(out, out_wanted)
        assert js.is_slices(of_table) and not np.isnan(of_table.values).any()
        assert_close(of_table, table_wanted, atol=1e-5)
        if weighted:
            assert_close(*pick_weights(of_weights, weights_wanted), atol=1e-5)


@pytest.mark.parametrize("weighted", [True, False])
def test_every_combiner_and_its_gradients(weighted):
    bags = form("mask", weighted)
    data = jnp.asarray(bags[1]) if weighted else None
    run = functools.partial(run_all, bags, COMBINERS)
    check_form(fast_jit(run)(TABLE, data), COMBINERS, weighted, lambda *both: both)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "mask"])
def test_every_form_and_its_gradients(name):
    # A form says which bag an id and its weight are in; combiners do not see it.
    bags = form(name, True)
    data = jnp.asarray(bags[1].data if name == "bcoo" else bags[1])
    results = fast_jit(functools.partial(run_all, bags, ["mean"]))(TABLE, data)

    def pick(ours, theirs):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        if name == "mask=":
            return ours, theirs
        assert not ours[6:].any()
        return ours[:6], theirs[MASK][ORDER if name == "shuffled" else slice(None)]

    check_form(results, ["mean"], True, pick)
    if name == "bcoo":  # whose weights may be a BCOO, too
        out = fast_jit(js.embedding_lookup_sparse)(TABLE, *bags[:2])
        assert_close(out, results[0][1])


def test_padding_is_ignored_and_bad_ids_are_seen():
    table = ONES
    ids = np.array([[1, 99], [2, 3], [-7, 0]])
    mask = np.array([[True, False], [True, True], [False, False]])

    @fast_jit
    def every(table, ids, mask):
        look = lambda c: lambda t: js.embedding_lookup_sparse(t, (ids, mask), None, c)  # noqa: E731
        grad = lambda f: js.grad(lambda t: f(t).sum())(table)  # noqa: E731
        return {c: (look(c)(table), grad(look(c))) for c in COMBINERS}

    bad = every(table, ids, np.ones((3, 2), bool))
    for combiner, (out, gradient) in every(table, ids, mask).items():
        assert np.isfinite(out).all() and (out[2] == 0).all()
        np.testing.assert_array_equal(gradient.indices, [1, 5, 2, 3, 5, 5])
        assert np.isfinite(gradient.values).all()
        np.testing.assert_array_equal(
            np.isnan(bad[combiner][0]).all(1), [True, False, True]
        )


def test_errors_name_the_place_in_mode_check():
    table, mask = jnp.ones((5, 2)), jnp.array([[True, False], [True, True]])
    ids = np.array([[1, 99], [2, 5]])
    for lookup in LOOKUPS.values():
        with pytest.raises(IndexError, match=r"ids\[1, 1\] = 5 is not in \[0, 5\)"):
            lookup(table, (ids, mask), mode="check")
    run = lambda i: js.embedding_lookup_sparse(table, (i, mask), mode="check")  # noqa: E731
    error, _ = checkify.checkify(jax.jit(run))(jnp.asarray(ids))
    assert "ids[1, 1] = 5 is not in [0, 5)" in error.get()
    error, out = checkify.checkify(jax.jit(run))(jnp.array([[1, 99], [2, 4]]))
    assert error.get() is None and (np.asarray(out) == 1).all()


def test_bags_of_any_rank():
    table = np.arange(12, dtype=np.float32).reshape(6, 2)
    ids = np.arange(12).reshape(2, 3, 2) % 6
    look = js.embedding_lookup_sparse

    @fast_jit
    def every(table):
        return (
            look(table, ids, None, "sum"),
            look(table, [1, 2], None, "sum"),
            look(table[:, 0], ids),
            look(table.reshape(3, 2, 2), [[0, 1]], None, "max"),
            look(table, np.zeros((3, 0), int)),
            look(jnp.ones((1, 1), jnp.bfloat16), np.zeros((1, 300), int), None, "sum"),
        )

    out, one, scalars, wide, empty, half = every(table)
    np.testing.assert_array_equal(out, table[ids].sum(2))
    np.testing.assert_array_equal(one, table[1] + table[2])
    np.testing.assert_array_equal(scalars, table[ids, 0].mean(2))
    np.testing.assert_array_equal(wide, [[[4, 5], [6, 7]]])
    assert empty.shape == (3, 2)
    # 16-bit floats are combined in float32.
    assert half.dtype == jnp.bfloat16 and half[0, 0] == 300


def test_integer_weights_and_vmap():
    table = TABLE
    ids, weights = np.array([[1, 2], [3, 3]]), np.array([[1, 2], [3, 1]])
    look = lambda i, w: js.embedding_lookup_sparse(table, i, w)  # noqa: E731
    both = fast_jit(lambda i, w: (look(i, w), jax.vmap(look)(i, w)))
    wanted = (table[ids] * weights[..., None]).sum(1) / weights.sum(1)[:, None]
    for out in both(ids, weights):
        assert_close(out, wanted.astype(np.float32))


@functools.cache
def safe_lookup(combiner, default):
    look = js.safe_embedding_lookup_sparse
    return fast_jit(lambda t, i, s, w: look(t, (i, s, 4), w, combiner, default))


@examples(25)
@given(st.data())
@pytest.mark.parametrize("combiner", COMBINERS)
def test_safe_against_a_loop(combiner, data):
    ids = data.draw(st.lists(st.integers(-2, 4), min_size=6, max_size=6))
    weights = data.draw(st.lists(st.integers(-1, 2), min_size=6, max_size=6))
    segments = data.draw(st.lists(st.integers(-1, 4), min_size=6, max_size=6))
    default = data.draw(st.sampled_from([None, 3]))
    table = np.arange(1, 11, dtype=np.float32).reshape(5, 2)
    args = table, np.array(ids), np.array(segments), np.array(weights, np.float32)
    got = np.asarray(safe_lookup(combiner, default)(*args))
    for bag in range(4):
        entries = [
            (table[i], w)
            for i, w, s in zip(ids, weights, segments, strict=True)
            if s == bag and i >= 0 and (w > 0 or combiner == "sum")
        ]
        wanted = np.zeros(2) if default is None else table[default]
        if entries:
            rows = np.stack([row * w for row, w in entries])
            w = np.array([w for _, w in entries], float)
            wanted = {
                "sum": rows.sum(0),
                "mean": rows.sum(0) / (w.sum() or 1),
                "sqrtn": rows.sum(0) / (np.sqrt((w**2).sum()) or 1),
                "max": rows.max(0),
            }[combiner]
        np.testing.assert_allclose(got[bag], wanted, rtol=1e-5)


def test_default_id_is_one_entry():
    table = np.arange(10, dtype=np.float32).reshape(5, 2)
    lookup = lambda t, i: js.safe_embedding_lookup_sparse(t, i, default_id=3)  # noqa: E731
    grad = fast_jit(lambda i: js.grad(lambda t: lookup(t, i).sum())(table))
    slices = grad(np.array([[1, -1], [-1, -1], [-1, -1]]))
    assert slices.indices.tolist() == [1, 5, 5, 5, 5, 5, 3]
    np.testing.assert_array_equal(np.asarray(slices.values)[-1], [2, 2])
    slices = grad(np.array([[1], [2]]))
    assert slices.indices.tolist() == [1, 2, 5]  # not needed, hence empty


@pytest.mark.parametrize("strategy", ["mod", "div"])
def test_shards_give_what_the_table_gives(strategy):
    def split(table):
        if strategy == "mod":
            return [table[i::3] for i in range(3)]
        return [table[:3], table[3:5], table[5:]]

    table = np.random.default_rng(0).normal(size=(7, 2)).astype(np.float32)
    ids = np.array([[0, 6, 2], [-1, -1, 4], [-1, -1, -1]])

    @fast_jit
    def both(params):
        def loss(params):
            out = js.safe_embedding_lookup_sparse(
                params, ids, default_id=5, partition_strategy=strategy, max_norm=0.9
            )
            return (out**2).sum(), out

        return js.grad(loss, has_aux=True)(params)

    grads, out = both(split(table))
    whole, wanted = both(table)
    assert_close(out, wanted)
    assert all(js.is_slices(g) for g in grads)
    assert_close(grads, split(numpy_array(whole)))
    assert not any(np.isnan(g.values).any() for g in grads)


def test_explain_sees_a_sparse_table():
    table = jnp.ones((5, 2))
    loss = lambda t: js.embedding_lookup_sparse(t, [[1, 2]]).sum()  # noqa: E731
    report = str(js.explain(loss)(table))
    assert "test_bags.py" in report and "sparse" in report


@pytest.mark.parametrize(
    "args, keywords, error, text",
    [
        ((ONES, [[1]], None, "median"), {}, ValueError, r"combiner='median'\): wanted"),
        ((ONES, [[1]]), {"mode": "wrap"}, ValueError, r"mode='wrap'\): wanted"),
        ((ONES, 3), {}, TypeError, r"wants ids as an array \[\*B, L\].*; got a scalar"),
        ((ONES, (1, 2, 3, 4)), {}, TypeError, r"or a BCOO matrix .*; got a tuple of 4"),
        ((ONES, [[1.5]]), {}, TypeError, r"integer ids, got float32\[1, 1\]"),
        ((ONES, ([[1]], [True])), {}, ValueError, r"a mask bool\[1, 1\], .*got bool\[1\]"),
        ((ONES, [[1]]), {"mask": [[1]]}, ValueError, r"mask bool\[1, 1\].*got int32"),
        (
            (ONES, ([1], [0, 1])),
            {"mask": [[True]]},
            ValueError,
            r"mask= goes with an array \[\*B, L\] of ids, not a tuple",
        ),
        ((ONES, ([1], [0, 1], 2)), {}, ValueError, r"values \[K\] and segment_ids \[K\]"),
        ((ONES, ([1], [0], 2.5)), {}, TypeError, r"num_segments is .*, got 2.5"),
        ((ONES, ([[1]], [0, 1])), {}, ValueError, r"row_splits \[B \+ 1\], got \[1, 1\]"),
        ((ONES, [[1]], "sum"), {}, TypeError, r"'sum'\): .* type combiner='sum'"),
        ((ONES, [[1]], [1.0]), {}, ValueError, r"one weight for each id, \[1, 1\], got"),
        ((ONES, [[1]], [[True]]), {}, TypeError, "wants numbers as weights, got bool"),
        (
            (ONES.astype(np.int32), [[1]]),
            {},
            TypeError,
            "wants a floating table, got int32",
        ),
        (([], [[1]]), {}, ValueError, r"a table or a list of shards, got \[\]"),
        ((None, [[1]]), {}, ValueError, "a table or a list of shards, got None"),
    ],
)
def test_errors(args, keywords, error, text):
    for lookup in LOOKUPS.values():
        with pytest.raises(error, match=text) as info:
            lookup(*args, **keywords)
        assert str(info.value).startswith(lookup.__name__)


def test_more_errors():
    with pytest.raises(ValueError, match=r"default_id = 5 is not in \[0, 5\)"):
        js.safe_embedding_lookup_sparse(ONES, [[1]], default_id=5)
    for number in (1.0, "1"):
        with pytest.raises(TypeError, match="default_id must be an int known before"):
            js.safe_embedding_lookup_sparse(ONES, [[1]], default_id=number)
    with pytest.raises(TypeError, match="default_id must be an int known before tracing"):
        jax.jit(lambda d: js.safe_embedding_lookup_sparse(ONES, [[1]], default_id=d))(1)
    with pytest.raises(ValueError, match="num_segments must not be negative, got -1"):
        js.embedding_lookup_sparse(ONES, ([1], [0], -1))
    with pytest.raises(ValueError, match=r"without batch or dense axes, got data \[1, 1\]"):
        js.embedding_lookup_sparse(ONES, bcoo([[1]], [[[0]]], (1, 1)))
    with pytest.raises(TypeError, match="known before tracing"):
        jax.jit(lambda n: js.embedding_lookup_sparse(ONES, ([1], [0], n)))(2)


def test_weights_that_are_not_used_get_no_gradient():
    table, ids = jnp.ones((4, 2)), (np.array([[1, 2]]), np.array([[True, False]]))
    look = js.embedding_lookup_sparse
    grad = lambda c: js.grad(lambda w: look(table, ids, w, c).sum())  # noqa: E731
    every = fast_jit(lambda w: [grad(c)(w) for c in COMBINERS])
    for of_weights in every(jnp.array([[2.0, jnp.nan]])):
        assert np.isfinite(np.asarray(of_weights)).all() and of_weights[0, 1] == 0


def test_row_splits_are_checked():
    for splits in ([-1, 2], [0, 2, 1, 3], [0, 9], np.array([2, 1, 0])):
        with pytest.raises(ValueError, match=r"row_splits .* lie within the values and n"):
            js.embedding_lookup_sparse(jnp.ones((4, 2)), ([1, 2, 3], splits))


def test_values_before_the_first_split_are_not_used():
    table, bags = np.float32([[0, 1], [2, 3], [4, 5], [6, 7]]), np.array([3, 1, 2, 0])
    splits, look = np.array([1, 2, 3]), js.embedding_lookup_sparse
    both = fast_jit(lambda t, s: [look(t, (bags, splits)), look(t, (bags, s))])
    for known_or_traced in both(table, splits):
        np.testing.assert_array_equal(known_or_traced, table[1:3])


class Foreign:
    """A tensor of PyTorch, as far as NumPy and JAX see it."""

    def __init__(self, array):
        self.data, self.shape, self.dtype = memoryview(array), array.shape, "torch.int64"

    def indices(self):
        raise RuntimeError("indices expected sparse coordinate tensor layout")

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.data, dtype)


def test_tensors_of_others():
    ids, ones = np.array([[1, 3], [2, 2**32 + 1]]), Foreign(np.ones((2, 2)))
    ragged = Foreign(ids[0]), Foreign(np.array([0, 2, 2]))
    look = js.embedding_lookup_sparse

    @fast_jit
    def every(table):
        sums = [look(table, Foreign(ids), w, "sum") for w in (None, ones)]
        return *sums, look(table, ragged)

    plain, weighed, means = every(np.arange(8, dtype=np.float32).reshape(4, 2))
    for out in (plain, weighed):
        np.testing.assert_array_equal(out, [[8, 10], [np.nan, np.nan]])
    np.testing.assert_array_equal(means, [[4, 5], [0, 0]])


CSR = types.SimpleNamespace(data=1, indices=1, indptr=1, shape=(2, 2))
FEATURES = bcoo([0.5, 2.0], [[0, 3], [1, 1]], (2, 5))
AS_WEIGHTS = r"pass it as the weights, without ids: \(table, None, m\)"
FORMS_REFUSED = {
    "features": (FEATURES, r"BCOO matrix of float32, .*if its columns are, " + AS_WEIGHTS),
    "csr": (CSR, AS_WEIGHTS),
    "slices": (js.IndexedSlices(ONES, jnp.arange(5), (9, 2)), r"x.indices\[:, 0\]"),
    "objects": (np.array([[1, 2], [3]], object), r"np.concatenate\(lists\)"),
    "bools": (np.ones((2, 5), bool), r"np.nonzero\(m\), pass \(ids, bags, len\(m\)\)"),
    "ones": (
        bcoo([1, 1], [[0, 3], [1, 1]], (2, 5)),
        r"BCOO matrix \[..., 5\] whose data are ones, .*" + AS_WEIGHTS,
    ),
    "dict": ({"a": [1]}, r"wants ids as an array .*; got dict"),
    "ragged": ([[1, 2], []], r"np.concatenate\(lists\).astype\(int\), np.cumsum\(\[0,"),
    "integer mask": (([[1, 2]], [[1, 0]]), r"mask int32\[1, 2\]: a mask is bool, type"),
    "flat mask": (([3, 2], np.array([0, 1])), r"type \(ids, mask != 0\); weights are"),
    "float mask": (([3, 2], [1.0, 0.5]), r"float32\[2\]: a mask is bool"),
}


@pytest.mark.parametrize("name", FORMS_REFUSED)
def test_other_forms_are_refused(name):
    sp_ids, text = FORMS_REFUSED[name]
    with pytest.raises(
        TypeError, match=f"^embedding_lookup_sparse {text}".replace(" ", " .*", 1)
    ):
        js.embedding_lookup_sparse(ONES, sp_ids)


def test_what_is_told_of_refused_forms_works():
    look, lists = js.embedding_lookup_sparse, [[1, 2], []]
    bags = np.concatenate(lists).astype(int), np.cumsum([0, *map(len, lists)])
    by_features, by_lists = fast_jit(
        lambda table: (look(table, None, FEATURES, "sum"), look(table, bags, None, "sum"))
    )(ONES)
    np.testing.assert_array_equal(by_features, [[0.5, 0.5], [2, 2]])
    np.testing.assert_array_equal(by_lists, [[2, 2], [0, 0]])
    ids, weights = (
        bcoo(data, at, (2, 2))
        for data, at in (([1, 2], [[0, 0], [1, 0]]), ([1.0, 5.0], [[1, 0], [0, 0]]))
    )
    with pytest.raises(ValueError, match="BCOO matrices of different indices"):
        js.embedding_lookup_sparse(ONES, ids, weights)


def test_a_default_id_beyond_the_dtype_of_the_ids():
    table = np.arange(1000, dtype=np.float32)[:, None]
    ids = np.array([[1, -1], [-1, -1]], np.int8)
    look = lambda t: js.safe_embedding_lookup_sparse(t, ids, default_id=999)  # noqa: E731
    np.testing.assert_array_equal(fast_jit(look)(table), [[1], [999]])


@pytest.fixture(scope="module")
def matrices():
    """Weights by column number in every form, and as NumPy's arrays."""
    scipy = pytest.importorskip("scipy.sparse")
    from jax.experimental import sparse

    rng, nse = np.random.default_rng(4), 13
    m = np.where(rng.random((3, 5)) < 0.5, rng.normal(size=(3, 5)), 0).astype(np.float32)
    stack, at = np.stack([m, 2 * m[::-1]]), np.argwhere
    by_example = np.stack([np.arange(15) // 5, np.arange(15) % 5], 1)[None]
    padded = [[2, 1], [0, 4], [2, 1], [1, 5], [3, 2], [0, 0]]
    csr = scipy.csr_matrix(m)
    empty = (0, nse - csr.nnz)
    bcsr = (
        np.pad(csr.data, empty),
        np.pad(csr.indices, empty, constant_values=5),
        csr.indptr,
    )
    of_padded = np.array([[6, 0, 0, 0, 2], [0] * 5, [0, 4, 0, 0, 0]], np.float32)
    return {
        "bcoo": (bcoo(m[m != 0], at(m), (3, 5)), m),
        "padded": (bcoo(np.arange(1.0, 7.0), padded, (3, 5)), of_padded),
        "three_axes": (bcoo(stack[stack != 0], at(stack), (2, 3, 5)), stack),
        "batched": (bcoo(stack.reshape(2, 15), by_example, (2, 3, 5)), stack),
        "vector": (bcoo(m[0], np.arange(5)[:, None], (5,)), m[0]),
        "bcsr": (sparse.BCSR(tuple(map(jnp.asarray, bcsr)), shape=(3, 5)), m),
        "scipy": (csr, m),
        "counts": (scipy.csc_array((m > 0) * 3), (m > 0) * 3),
        "bools": (scipy.coo_array(m > 0), (m > 0) * 1),
    }


def test_weights_by_column_number(matrices):
    table = np.arange(12, dtype=np.float32).reshape(6, 2) / 7  # which may have more rows
    look = js.embedding_lookup_sparse

    @fast_jit
    def ours(table):
        def loss(table):
            rows = {n: look(table, None, m, "sum") for n, (m, _) in matrices.items()}
            return sum((x**3).sum() for x in rows.values()), rows

        return js.grad(loss, has_aux=True)(table)

    grad, rows = ours(table)
    wanted = np.zeros_like(table)
    for name, (_, m) in matrices.items():
        assert_close(rows[name], np.float32(m @ table[:5]), rtol=1e-4)
        m = m.reshape(-1, 5)
        wanted[:5] += m.T @ (3 * (m @ table[:5]) ** 2)
    assert js.is_slices(grad)
    assert_close(grad, wanted, rtol=1e-4)


def test_means_by_column_number(matrices):
    matrix, whole = matrices["padded"]
    table = np.arange(10, dtype=np.float32).reshape(5, 2) / 7
    means = whole @ table / np.maximum(whole.sum(1, keepdims=True), 1)
    plain, safe = LOOKUPS.values()
    both = fast_jit(lambda t: (plain(t, None, matrix), safe(t, None, matrix, default_id=3)))
    for found, empty in zip(both(table), (np.zeros(2, np.float32), table[3]), strict=True):
        assert_close(found, np.where(whole.any(1)[:, None], means, empty))


def test_matrices_of_weights_are_checked(matrices):
    matrix = matrices["bcoo"][0]
    refused = [
        (None, TypeError, r"without ids wants as weights a BCOO .*; got NoneType"),
        (np.eye(5), TypeError, r"whose column numbers are the ids; got ndarray"),
        (
            bcoo([[1.0]], [[0]], (3, 1)),
            ValueError,
            r"last axis is sparse, got data \[1, 1\]",
        ),
        (
            bcoo([1.0], [[0, 0]], (3, 9)),
            ValueError,
            r"weights \[3, 9\], .* table of 5 rows",
        ),
    ]
    for weights, error, text in refused:
        for lookup in LOOKUPS.values():
            with pytest.raises(error, match=text):
                lookup(ONES, None, weights)
    with pytest.raises(ValueError, match="not a tuple"):
        js.embedding_lookup_sparse(ONES, None, matrix, mask=jnp.ones((3, 5), bool))
