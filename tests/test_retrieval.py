"""Search and the loss of two towers, against NumPy on the whole product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, fast_jit, numpy_tree, slow_but_first
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jslices as js
import jslices.testing
from jslices.retrieval import in_batch_softmax_loss, top_k
from jslices.testing import assert_no_dense_temporary, assert_no_table_on_wire, collectives

V, D, B = 40, 3, 4
RNG = np.random.default_rng(0)


def case(rows=V, batch=(B,), width=D, seen=5, seed=0):
    """Small whole numbers: products are exact in any order, and many are equal."""
    rng = np.random.default_rng(seed)
    table = rng.integers(-2, 3, (rows, width)).astype(np.float32)
    queries = rng.integers(-2, 3, (*batch, width)).astype(np.float32)
    exclude = rng.integers(-3, rows + 3, (*batch, seen)).astype(np.int32)
    return table, queries, exclude


def scores_of(table, queries, exclude):
    """The whole product, -inf for what is left out."""
    scores = (queries.astype("f8") @ table.astype("f8").T).astype("f")
    ids = np.arange(len(table))
    out = (exclude[..., None] == ids).any(-2)
    return np.where(out, -np.inf, scores).astype("f")


def best(scores, k):
    """What ``jax.lax.top_k`` finds in the whole product and k places that are left out."""
    padding = np.full((*scores.shape[:-1], k), -np.inf, np.float32)
    found, ids = jax.lax.top_k(jnp.concatenate([scores, padding], -1), k)
    return found, jnp.where(found == -jnp.inf, -1, ids)


def assert_same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.shape == b.shape


@given(
    rows=st.sampled_from([1, 7, 40]),
    batch=st.sampled_from([(), (3,), (2, 2)]),
    k=st.sampled_from([1, 4, 45]),
    seen=st.sampled_from([0, 6]),
    block=st.sampled_from([1, 3, 8, 100, None]),
    seed=st.integers(0, 99),
)
def test_the_best_rows_are_those_of_the_whole_product(rows, batch, k, seen, block, seed):
    table, queries, exclude = case(rows, batch, D, seen, seed)
    got = top_k(table, queries, k, exclude=exclude if seen else None, block=block)
    assert_same(got, best(scores_of(table, queries, exclude), k))
    assert got[0].dtype == np.float32 and got[1].dtype == np.int32


def test_equal_scores_have_the_lower_id_first():
    got = top_k(np.ones((V, D), "f"), np.ones((B, D), "f"), 9, block=4)
    np.testing.assert_array_equal(got[1], np.tile(np.arange(9), (B, 1)))
    got = top_k(np.ones((V, D), "f"), np.ones((1, D), "f"), 3, exclude=[[0, 2]], block=4)
    assert got[1].tolist() == [[1, 3, 4]]


ODD = [0.0, -0.0, 1.0, -2.0, np.inf, -np.inf, np.nan, -np.nan]


@settings(max_examples=20)
@given(
    table=st.lists(st.tuples(*[st.sampled_from(ODD)] * 2), min_size=6, max_size=6),
    query=st.tuples(*[st.sampled_from(ODD)] * 2),
    block=st.sampled_from([2, 4, 6]),
)
@example(
    table=[(1, 0), (3, 0), (np.inf, 1), (2, 0), (-1, 0), (1, 1)], query=(0, 1), block=4
)
@example(table=[(-1, 0), (1, 0), (-2, 0), (2, 0), (1, 0), (0, 0)], query=(0, 0), block=2)
def test_nan_of_either_sign_is_first_and_zeros_are_equal(table, query, block):
    """An x86 gives NaN that it computes, 0 * inf, a sign."""
    with np.errstate(invalid="ignore"):
        scores = np.array([a * query[0] + b * query[1] for a, b in table])
    order = np.lexsort((np.arange(6), np.where(scores == 0, 0, -scores), ~np.isnan(scores)))
    got = top_k(np.array(table, "f"), np.array(query, "f"), 6, block=block)
    wanted = scores[order], np.where(scores[order] == -np.inf, -1, order)
    assert_same(got, wanted)


@pytest.mark.parametrize("k", slow_but_first(17, 16, 33, 64, 65))
def test_rounds_of_a_gpu_find_the_same(k, monkeypatch):
    """Equal scores, zeros of both signs, NaN, and fewer than k that are left."""
    platforms = []

    def as_on_a_gpu(*args, default, cuda=None, **others):
        platforms.append(cuda is not None)
        return (cuda or default)(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", as_on_a_gpu)
    table, queries, _ = case(9_001, seed=k)
    table[7], table[4_099] = np.nan, -np.inf
    exclude = np.tile(np.r_[np.arange(9_001 - 20), 8_999], (B, 1))
    exclude[:2] = -1
    with np.errstate(invalid="ignore"):
        scores = scores_of(table, queries, exclude)
    scores = np.where(np.isnan(scores), np.nan, scores)
    got = top_k(table, queries, k, exclude=exclude, block=5_000)
    wanted = best(np.where(scores == 0, 0, scores), k)
    assert_same(got, wanted)
    assert any(platforms) == (16 < k <= 64)


@pytest.mark.parametrize(
    "precision, name",
    [(None, "DEFAULT"), ("highest", "HIGHEST"), (jax.lax.Precision.HIGH, "HIGH")],
)
def test_the_precision_is_that_of_the_products(precision, name):
    table, queries, _ = case()
    find = jax.jit(lambda table: top_k(table, queries, 2, precision=precision))
    program = find.lower(table).as_text()
    assert "dot_general" in program and f"precision = [{name}, {name}]" in program


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="most"):
        top_k(*case()[:2], 2, precision="most")


def test_more_than_there_are():
    table, query = np.array([[3.0], [5], [4]], "f"), np.ones(1, "f")
    scores, ids = top_k(table, query, 5, exclude=[1, 1, -1, 3, 2**40])
    assert scores.tolist() == [4, 3, -np.inf, -np.inf, -np.inf]
    assert ids.tolist() == [2, 0, -1, -1, -1]
    assert top_k(table, query, 2, exclude=[0, 1, 2])[1].tolist() == [-1, -1]


def test_scores_that_are_no_numbers():
    table = np.array([[1.0], [np.nan], [2], [-np.inf]], "f")
    scores, ids = top_k(table, np.ones(1, "f"), 4, block=2)
    assert np.isnan(scores[0]) and ids.tolist() == [1, 2, 0, -1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float32"])
def test_scores_of_narrow_floats_are_float32(dtype):
    table, queries, exclude = case()
    wanted = best(scores_of(table, queries, exclude), 6)
    got = top_k(table.astype(dtype), queries, 6, exclude=exclude, block=9)
    assert_same(got, wanted)
    assert got[0].dtype == np.float32


def test_scores_of_64_bits():
    with jax.enable_x64(True):
        scores, ids = top_k(np.eye(3), np.ones((2, 3), "f"), 2)
        assert scores.dtype == np.float64 and ids.dtype == np.int32


def test_ids_of_narrow_dtypes():
    table, queries, _ = case(300)
    exclude = np.array([[3, 250]] * B)
    wanted = top_k(table, queries, 9, exclude=exclude)
    assert_same(top_k(table, queries, 9, exclude=exclude.astype("uint8")), wanted)


def test_under_jit_vmap_and_an_empty_batch():
    table, queries, exclude = case(batch=(2, 3))
    wanted = best(scores_of(table, queries, exclude), 3)
    each = lambda q, e: top_k(table, q, 3, exclude=e, block=8)  # noqa: E731
    assert_same(fast_jit(jax.vmap(each))(queries, exclude), wanted)
    assert top_k(table, np.zeros((0, D), "f"), 3)[0].shape == (0, 3)


def test_no_score_of_all_rows_is_held():
    table = jax.ShapeDtypeStruct((400_000, 8), jnp.float32)
    queries, ids = jnp.ones((32, 8)), jnp.zeros(32, jnp.int32)
    step = lambda table, queries, ids: (  # noqa: E731
        js.embedding_lookup(table, ids),  # the table of the proof
        top_k(table, queries, 5, exclude=ids[:, None], block=4_000),
    )
    assert_no_dense_temporary(step, table, queries, ids)
    compiled = jax.jit(step).lower(table, queries, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 32 * 4_000 * 4


def test_hard_negatives_have_row_gradients():
    table, queries, exclude = case()

    def loss(table):
        _, ids = top_k(table, queries, 2, exclude=exclude, block=16)
        rows = js.embedding_lookup(table, ids)
        return jnp.sum(rows * queries[:, None])

    grads = fast_jit(js.grad(loss))(table)
    assert js.is_slices(grads) and grads.values.shape == (2 * B, D)


# --- on a mesh --------------------------------------------------------------------------


def mesh_of(shape, names, kind):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    return jax.make_mesh(shape, names, axis_types=(getattr(AxisType, kind),) * len(names))


@pytest.mark.parametrize("kind", slow_but_first("Explicit", "Auto"))
@pytest.mark.parametrize(
    "shape, names, rows, batch",
    [
        ((8,), ("x",), ("x",), ()),
        ((8,), ("x",), ("x",), ("x",)),
        ((2, 4), ("a", "x"), ("x",), ("a",)),
        ((2, 4), ("a", "x"), (("x", "a"),), ()),
        ((2, 4), ("a", "x"), (), ("a",)),
        ((2, 4), ("a", "x"), ("x",), (None, "a")),
    ],
    ids=str,
)
def test_each_device_searches_its_rows(shape, names, rows, batch, kind):
    mesh = mesh_of(shape, names, kind)
    table, queries, exclude = case(4_000, (8, 2))
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    args = [place(table, rows), *(place(x, batch) for x in (queries, exclude))]
    find = lambda t, q, e: top_k(t, q, 7, exclude=e, block=300)  # noqa: E731
    wanted = best(scores_of(table, queries, exclude), 7)
    with jax.set_mesh(mesh):
        assert_same(jax.jit(find)(*args), wanted)
        assert_same(find(*args), wanted)  # of arrays at hand the split is known
        if kind == "Explicit" or len(names) == 1:  # types, or the mesh, tell it as well
            if rows:
                assert_no_table_on_wire(find, *args, min_bytes=1)
            assert collectives(find, *args).most < 10_000
    if kind == "Explicit":
        for found in find(*args):
            spec = (*batch, *(None,) * found.ndim)[: found.ndim]
            assert jax.typeof(found).sharding.spec == P(*spec)


def test_a_table_of_the_program_and_a_mesh_of_the_context():
    mesh = mesh_of((8,), ("x",), "Auto")
    table, queries, exclude = case(4_000)
    wanted = best(scores_of(table, queries, exclude), 7)
    split = jax.device_put(table, NamedSharding(mesh, P("x")))
    find = lambda t, q, e: top_k(t, q, 7, exclude=e, block=300)  # noqa: E731
    assert_same(jax.jit(lambda q, e: find(split, q, e))(queries, exclude), wanted)
    where = NamedSharding(mesh, P("x")), *(NamedSharding(mesh, P()),) * 2
    with jax.set_mesh(mesh):
        placing = jax.jit(find, in_shardings=where)
        assert_same(placing(table, queries, exclude), wanted)
        sent = placing.lower(table, queries, exclude).compile().as_text()
    assert "f32[4000,3]" not in sent


def test_within_a_shard_map_rows_are_those_of_the_device():
    mesh = mesh_of((8,), ("x",), "Auto")
    table, queries, _ = case(80)
    own = jax.shard_map(
        lambda t, q: top_k(t, q, 2)[1][None],
        mesh=mesh,
        in_specs=(P("x"), P()),
        out_specs=P("x"),
        check_vma=False,
    )
    wanted = [top_k(part, queries, 2)[1] for part in np.split(table, 8)]
    np.testing.assert_array_equal(jax.jit(own)(table, queries), wanted)


# --- the loss ---------------------------------------------------------------------------


def plain_loss(queries, items, ids, log_q, temperature):
    losses = []
    for i in range(len(ids)):
        keep = (ids != ids[i]) | (np.arange(len(ids)) == i)
        logits = items @ queries[i] / temperature - log_q
        losses.append(np.log(np.exp(logits[keep]).sum()) - logits[i])
    return np.array(losses, np.float32)


@given(seed=st.integers(0, 99), batch=st.sampled_from([1, 6]))
def test_the_loss_is_that_of_the_formula(seed, batch):
    rng = np.random.default_rng(seed)
    queries, items = rng.normal(size=(2, batch, D)).astype("f")
    ids, log_q = rng.integers(-1, 3, batch), np.log(rng.random(batch)).astype("f")
    got = in_batch_softmax_loss(queries / 0.5, items, ids, log_q)
    assert_close(got, plain_loss(queries, items, ids, log_q, 0.5), rtol=1e-4, atol=1e-5)
    got = in_batch_softmax_loss(queries, items, ids)
    assert_close(got, plain_loss(queries, items, ids, 0 * log_q, 1), rtol=1e-4, atol=1e-5)


def test_the_loss_is_that_of_tensorflow_recommenders():
    """``tfrs.tasks.Retrieval`` 0.7.7, TensorFlow 2.21, its loss of each example."""
    rows = [[-0.73, -0.54, -0.32], [0.41, 1.04, -0.13], [0.9, 0.09, -0.74]]
    items = np.array(rows, "f")[np.array([0, 1, 0, 2, 1])]
    queries = [[0.13, -0.13, 0.64], [0.1, -0.54, 0.36], [1.3, 0.95, -0.7]]
    queries = np.array([*queries, [-1.27, -0.62, 0.04], [-2.33, -0.22, -1.25]], "f")
    ids, q = np.array([4, 9, 4, 1, 9]), np.array([0.3, 0.05, 0.3, 0.02, 0.05], "f")
    got = in_batch_softmax_loss(queries / 0.5, items, ids, np.log(q))
    assert_close(got, np.array([3.258618, 1.978722, 9.188058, 3.0357, 5.396659], "f"))
    got = in_batch_softmax_loss(queries, items, np.arange(5))
    assert_close(got, np.array([1.610126, 1.9906, 4.04118, 3.293675, 3.988565], "f"))


def test_gradients_of_the_loss_are_rows_and_finite():
    table, ids = RNG.normal(size=(V, D)).astype("f"), np.array([3, 7, 3, 1])

    def loss(table, log_q):
        rows = table[ids]
        return in_batch_softmax_loss(rows[::-1], rows, ids, log_q).sum()

    grads = fast_jit(js.grad(loss, (0, 1)))(table, np.zeros(B, "f"))
    wanted = fast_jit(jax.grad(loss, (0, 1)))(table, np.zeros(B, "f"))
    assert js.is_slices(grads[0]) and np.isfinite(grads[0].values).all()
    assert_close(numpy_tree(grads), numpy_tree(wanted), rtol=1e-4)


def test_the_loss_on_explicit_axes():
    mesh = mesh_of((8,), ("x",), "Explicit")
    queries, items = RNG.normal(size=(2, 16, D)).astype("f")
    ids = np.arange(16) % 9
    split = NamedSharding(mesh, P("x"))
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, split) for x in (queries, items, ids)]
        got = jax.jit(in_batch_softmax_loss)(*args)
        assert jax.typeof(got).sharding.spec == P("x")
    assert_close(np.asarray(got), plain_loss(queries, items, ids, 0, 1), rtol=1e-4)


def test_the_loss_of_narrow_floats_is_float32():
    rows = jnp.eye(3, dtype=jnp.bfloat16)
    assert in_batch_softmax_loss(rows, rows, [1, 2, 3]).dtype == np.float32


# --- errors -----------------------------------------------------------------------------

T, Q = np.zeros((V, D), "f"), np.zeros((B, D), "f")


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: top_k(T, Q, 0), ValueError, r"top_k\(k=0\): wanted an int of at least 1"),
        (lambda: top_k(T, Q, 2.0), TypeError, r"top_k\(k=2.0\): wanted an int"),
        (lambda: top_k(T, Q, 1, block=0), ValueError, r"top_k\(block=0\)"),
        (lambda: top_k(T[:, :2], Q, 1), ValueError, r"queries \[\*B, D\] .*\[40, 2\], \["),
        (lambda: top_k(T[0], Q, 1), ValueError, r"wants a table \[V, D\], .* got \[\[3\]"),
        (lambda: top_k(T[:0], Q, 1), ValueError, r"got \[\[0, 3\], \[4, 3\]"),
        (lambda: top_k(T.astype(int), Q, 1), TypeError, "wants table of floats, got int"),
        (lambda: top_k(T, Q, 1, exclude=[1, 2]), ValueError, r"E\], short .*, \[2\]\]"),
        (lambda: top_k(T, Q, 1, exclude=Q), TypeError, "top_k wants integer exclude"),
        (
            lambda: in_batch_softmax_loss(Q, T, [1] * 4),
            ValueError,
            r"log_q \[B\], got \[\[4, 3\], \[40, 3\], \[4\], \[4\]\]",
        ),
        (lambda: in_batch_softmax_loss(Q, Q, Q[0]), TypeError, "integer item_ids"),
    ],
)
def test_errors_say_what_came(call, error, text):
    with pytest.raises(error, match=text):
        call()
