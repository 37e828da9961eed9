"""embedding_lookup of shards, with max_norm and padding: values, gradients, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from helpers import all_at_once, assert_close, fast_jit, golden, numpy_dense
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import checkify

import jslices as js

TABLE = np.arange(14, dtype=np.float32).reshape(7, 2) + 1
TABLE = jax.device_put(TABLE)


def split(table, count, strategy):
    table = np.asarray(table)
    if strategy == "mod":
        return [table[i::count] for i in range(count)]
    return np.array_split(table, count)


@pytest.mark.parametrize("name", [n for n in golden("embedding") if n != "_params"])
def test_equals_tensorflow(name):
    case = golden("embedding")[name]
    strategy = name.split()[-1]
    shards, ids = case["shards"], case["ids"]
    for key, max_norm in [("", None), ("max_norm_0.8", 0.8)]:
        lookup = lambda shards, m=max_norm: js.embedding_lookup(  # noqa: E731
            shards, ids, partition_strategy=strategy, max_norm=m
        )
        loss = lambda shards, f=lookup: (f(shards) * case["w"]).sum()  # noqa: E731
        both = fast_jit(lambda s, f=lookup, g=loss: (f(s), js.grad(g)(s)))
        out, grads = both(shards)
        assert_close(out, case[key or "out"])
        for grad, wanted in zip(
            grads, case[f"{key}_grads" if key else "grads"], strict=True
        ):
            # A difference: an entry for every id, empty where the id lives elsewhere.
            assert grad.indices.shape == (ids.size,) and np.isfinite(grad.values).all()
            own = np.asarray(grad.indices) < grad.shape[0]
            values, indices = np.asarray(grad.values), np.asarray(grad.indices)
            np.testing.assert_array_equal(indices[own], wanted["is"]["indices"])
            np.testing.assert_allclose(
                values[own], wanted["is"]["values"], rtol=1e-5, atol=1e-6
            )
            assert not np.asarray(grad.values)[~own].any()


@functools.cache
def read_and_differentiate(strategy, mode, padding):
    def look(shards, ids):
        keywords = {"partition_strategy": strategy, "mode": mode, "padding_id": padding}
        return js.embedding_lookup(shards, ids, **keywords)

    def both(shards, ids):
        loss = lambda shards: jnp.nansum(look(shards, ids) ** 2)  # noqa: E731
        whole = js.embedding_lookup(TABLE, ids, mode=mode)
        return look(shards, ids), whole, js.grad(loss)(shards)

    return fast_jit(both)


#: Number of shards, strategy, mode and padding: every two of these together.
READS = [
    (1, "mod", "fill", 3),
    (1, "div", "clip", -1),
    (3, "mod", "clip", None),
    (3, "div", "fill", None),
    (3, "mod", "fill", -1),
    (3, "div", "clip", 3),
]


@examples(30)
@given(
    read=st.sampled_from(READS),
    ids=st.lists(st.integers(-3, 9), min_size=4, max_size=4),
)
def test_shards_read_what_the_table_reads(read, ids):
    count, strategy, mode, padding = read
    shards, ids = split(TABLE, count, strategy), np.array(ids, np.int32).reshape(2, 2)
    got, wanted, grads = read_and_differentiate(strategy, mode, padding)(shards, ids)
    wanted = np.array(wanted)
    if padding is not None:
        wanted[ids == padding] = 0
    np.testing.assert_array_equal(got, wanted)
    clipped = np.clip(ids, 0, 6) if mode == "clip" else np.asarray(ids)
    dense = np.zeros((7, 2))
    for i, row in zip(clipped.ravel(), wanted.reshape(-1, 2), strict=True):
        if 0 <= i < 7:
            dense[i] += 2 * row
    for grad in grads:
        indices = np.asarray(grad.indices)
        own = (indices >= 0) & (indices < grad.shape[0])
        assert js.is_slices(grad) and not np.isnan(np.asarray(grad.values)[own]).any()
    for grad, part in zip(grads, split(dense, count, strategy), strict=True):
        same = numpy_dense(grad.values, grad.indices, grad.shape)
        np.testing.assert_array_equal(same, np.asarray(part))


@pytest.mark.parametrize("strategy", ["mod", "div"])
def test_an_unused_shard_gets_an_empty_gradient(strategy):
    shards = split(TABLE, 3, strategy)
    loss = lambda p: js.embedding_lookup(p, [0, 0], partition_strategy=strategy).sum()  # noqa: E731
    grads = fast_jit(js.grad(loss))(shards)
    assert grads[0].indices.tolist() == [0, 0]
    for grad, shard in zip(grads[1:], shards[1:], strict=True):
        assert grad.indices.tolist() == [len(shard)] * 2
        assert not np.asarray(grad.values).any()


@pytest.mark.parametrize("strategy", ["mod", "div"])
def test_a_shard_without_rows_gets_an_empty_gradient(strategy):
    shards = split(TABLE, 9, strategy)
    assert not len(shards[-1])
    keywords = {"partition_strategy": strategy, "max_norm": 3.0}
    loss = lambda p: (js.embedding_lookup(p, [6, 0, 6], **keywords) ** 2).sum()  # noqa: E731
    grads = fast_jit(js.grad(loss))(shards)
    assert all(js.is_slices(grad) for grad in grads)
    whole = fast_jit(lambda t: js.grad(loss)(t).to_dense())(TABLE)
    for grad, part in zip(grads, split(np.asarray(whole), 9, strategy), strict=True):
        dense = numpy_dense(np.asarray(grad.values), np.asarray(grad.indices), grad.shape)
        assert_close(dense, np.asarray(part))


def test_a_table_without_rows():
    table = np.zeros((0, 2), np.float32)
    grad = js.grad(lambda t: js.embedding_lookup(t, [0, 1]).sum())
    nothing = fast_jit(grad)(table)
    assert js.is_slices(nothing) and nothing.shape == (0, 2)
    assert np.isnan(js.embedding_lookup(table, [0])).all()


@pytest.mark.parametrize("nan", [np.nan, np.inf])
def test_nothing_leaks_from_foreign_shards(nan):
    shards = [np.full((2, 2), nan, np.float32), np.ones((2, 2), np.float32)]
    ids = np.array([1, 3])  # both of the second shard
    loss = lambda p: (js.embedding_lookup(p, ids, max_norm=1.0) ** 2).sum()  # noqa: E731
    value, grads = fast_jit(js.value_and_grad(loss))(shards)
    assert value == 2 or abs(value - 2) < 1e-6
    assert np.isfinite(grads[0].values).all() and np.isfinite(grads[1].values).all()
    with pytest.warns(js.DensificationWarning):
        dense = fast_jit(jax.grad(loss))(shards)
    assert np.isfinite(dense[0]).all()


def test_uneven_shards_of_any_height():
    heights = [1, 4, 0, 2]
    shards = np.split(np.asarray(TABLE), np.cumsum(heights)[:-1])
    ids = np.arange(9)
    # Under "mod" id i is row i // n of shard i % n, whatever the heights are.
    irregular = [np.asarray(TABLE)[:1], np.asarray(TABLE)[1:5]]

    @fast_jit
    def read(shards, table, irregular):
        div = js.embedding_lookup(shards, ids, partition_strategy="div")
        return div, js.embedding_lookup(table, ids), js.embedding_lookup(irregular, ids)

    div, whole, got = read(shards, TABLE, irregular)
    np.testing.assert_array_equal(div, whole)
    for i, row in enumerate(np.asarray(got)):
        shard, at = irregular[i % 2], i // 2
        wanted = shard[at] if at < len(shard) else [np.nan, np.nan]
        np.testing.assert_array_equal(row, wanted)
    with pytest.raises(ValueError, match=r"\[1, 4\] rows: .*make them \[3, 2\]"):
        js.embedding_lookup(irregular, 0, mode="check")


def test_scalar_and_empty_ids_and_tables_of_numbers():
    shards, column = split(TABLE, 2, "mod"), np.asarray(TABLE)[:, 0]
    look = js.embedding_lookup
    found = all_at_once(
        {
            "scalar": lambda: look(shards, 3),
            "empty": lambda: look(shards, []),
            "numbers": lambda: look([column[::2], column[1::2]], [[1, 2]]),
            "integers": lambda: look([np.arange(4), np.arange(4) + 4], [1, 9]),
        }
    )
    np.testing.assert_array_equal(found["scalar"], np.asarray(TABLE)[3])
    assert found["empty"].shape == (0, 2)
    np.testing.assert_array_equal(found["numbers"], [column[1:3]])
    assert found["integers"].tolist() == [4, np.iinfo(np.int32).min]


# --- max_norm ---------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.0, 2.0, 100.0])
def test_max_norm_scales_the_rows_read(max_norm):
    ids = np.array([[0, 3], [3, 6]])
    got = js.embedding_lookup(TABLE, ids, max_norm=max_norm)
    rows = np.asarray(TABLE)[ids]
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    np.testing.assert_allclose(got, rows * np.minimum(1, max_norm / norms), rtol=1e-6)
    traced = jax.jit(lambda m: js.embedding_lookup(TABLE, ids, max_norm=m))(max_norm)
    np.testing.assert_allclose(traced, got, rtol=1e-6)


def test_max_norm_of_numbers_zeros_and_bad_ids():
    look = functools.partial(js.embedding_lookup, max_norm=1.0)
    loss = lambda t: look(t, [0, 9, 1])[::2].sum()  # noqa: E731
    zeros, cube = jnp.zeros((3, 2)), jnp.ones((2, 2, 2))
    found = all_at_once(
        {
            "numbers": lambda: look(jnp.array([0.5, -2, 3]), [0, 1, 2]),
            "gradient": lambda: js.grad(loss)(zeros).to_dense(),
            "bad": lambda: look(zeros, [9]),
            "cube": lambda: look(cube, [0]),
            "half": lambda: look(jnp.full((1, 2), 300, jnp.float16), [0]),
        }
    )
    np.testing.assert_array_equal(found["numbers"], [0.5, -1, 1])
    np.testing.assert_array_equal(found["gradient"], [[1, 1], [1, 1], [0, 0]])
    assert np.isnan(found["bad"]).all()
    np.testing.assert_allclose(found["cube"], np.ones((1, 2, 2)) / 2, rtol=1e-6)
    assert found["half"].dtype == jnp.float16 and np.isfinite(found["half"]).all()


# --- padding ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds", "check"])
@pytest.mark.parametrize("padding", [0, -1, 99])
def test_padding_reads_zeros_and_has_no_gradient(mode, padding):
    ids = np.array([2, padding, 5, padding])
    look = lambda t: js.embedding_lookup(t, ids, mode=mode, padding_id=padding)  # noqa: E731
    both = lambda t: (look(t), js.grad(lambda t: (look(t) ** 2).sum())(t))  # noqa: E731
    rows, slices = (both if mode == "check" else fast_jit(both))(TABLE)
    rows = np.asarray(rows)
    np.testing.assert_array_equal(rows[1::2], np.zeros((2, 2)))
    np.testing.assert_array_equal(rows[::2], np.asarray(TABLE)[[2, 5]])
    assert slices.indices.tolist() == [2, 7, 5, 7]
    assert not np.asarray(slices.values)[1::2].any()


def test_padding_is_compared_with_the_ids_as_given():
    ids, wide = np.array([0, 2**40, -(2**40)]), 2**31 - 1
    for kind in (ids, ids.tolist()):
        got = js.embedding_lookup(TABLE, kind, padding_id=2**40)
        np.testing.assert_array_equal(got, [TABLE[0], [0, 0], [np.nan, np.nan]])
        for other in (wide, -wide):  # what 32 bits hold of the ids
            got = js.embedding_lookup(TABLE, kind, padding_id=other)
            assert np.isnan(got[1:]).all()
    with pytest.raises(IndexError, match=r"ids\[2\] = -1099511627776 is not in"):
        js.embedding_lookup(TABLE, ids, padding_id=2**40, mode="check")


def test_padding_of_narrow_ids():
    ids = jnp.array([0, 3], jnp.uint8)
    for padding in (-1, 1000):
        got = js.embedding_lookup(TABLE, ids, padding_id=padding)
        np.testing.assert_array_equal(got, TABLE[ids])
    whole = js.embedding_lookup(TABLE.astype(int), [0, 3], padding_id=3)
    assert whole.tolist() == [[1, 2], [0, 0]]


# --- check ------------------------------------------------------------------------------


def test_mode_check():
    look = functools.partial(js.embedding_lookup, mode="check")
    np.testing.assert_array_equal(look(TABLE, [[1, 6]]), TABLE[jnp.array([[1, 6]])])
    with pytest.raises(IndexError, match=r"lookup: ids\[0, 1\] = -1 is not in \[0, 7\)"):
        look(TABLE, [[1, -1], [9, 0]])
    with pytest.raises(ValueError, match=r"ids = 7 is not in \[0, 7\)"):
        look(split(TABLE, 3, "mod"), 7)
    error, _ = checkify.checkify(jax.jit(look))(TABLE, jnp.array([0, 7]))
    assert "embedding_lookup: ids[1] = 7 is not in [0, 7)" in error.get()
    step = lambda t, i: js.value_and_grad(lambda t: look(t, i).sum())(t)  # noqa: E731
    error, (_, slices) = checkify.checkify(jax.jit(step))(TABLE, jnp.array([0, 7]))
    assert "ids[1] = 7 is not in [0, 7)" in error.get() and js.is_slices(slices)
    error, (value, slices) = checkify.checkify(jax.jit(step))(TABLE, jnp.array([0, 6]))
    assert error.get() is None and value == 30 and slices.indices.tolist() == [0, 6]


@pytest.mark.parametrize(
    "args, keywords, error, text",
    [
        (([], 0), {}, ValueError, r"wants a table or a list of shards, got \[\]"),
        ((None, 0), {}, ValueError, "wants a table or a list of shards, got None"),
        ((TABLE, 0), {"partition_strategy": "hash"}, ValueError, r"'hash'\): wanted"),
        (
            ([TABLE, TABLE[:, :1]], 0),
            {},
            ValueError,
            r"one row shape and dtype, got float32\[7, 2\], float32\[7, 1\]",
        ),
        (([TABLE, TABLE.astype(int)], 0), {}, ValueError, r"int32\[7, 2\]"),
        (({"t": TABLE}, 0), {}, TypeError, "wants a table or a list of shards, got a dict"),
        (
            (TABLE, 0),
            {"max_norm": np.nan},
            ValueError,
            r"=nan\): wanted a number",
        ),
        (
            (TABLE, 0),
            {"max_norm": jnp.ones(2)},
            TypeError,
            r"32\[2\]\): wanted a number",
        ),
        ((TABLE, 0), {"max_norm": "1"}, TypeError, r"\(max_norm='1'\): wanted a number"),
        (([jnp.ones(())], 0), {}, ValueError, r"wants a table \[V, \*D\], got a scalar"),
        ((TABLE, 0), {"max_norm": -1.0}, ValueError, r"max_norm=-1.0\): wanted a number"),
        ((TABLE.astype(int), 0), {"max_norm": 1.0}, TypeError, "wants a floating table"),
        ((TABLE, 0), {"padding_id": 1.5}, TypeError, "padding_id must be an int, got 1.5"),
    ],
)
def test_errors(args, keywords, error, text):
    with pytest.raises(error, match=text):
        js.embedding_lookup(*args, **keywords)
