"""What people do with gradients by habit: right, or an error that says what to type."""

import copy
import functools
import operator
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.flatten_util import ravel_pytree

import jslices as js

V, D = 20, 3
TABLE = jnp.linspace(-1, 1, V * D).reshape(V, D)
PARAMS = {"table": TABLE, "w": jnp.ones(D)}


def loss(params, ids):
    return ((params["table"][ids] @ params["w"]) ** 2).sum()


grad = jax.jit(js.grad(loss))
IDS = jnp.array([3, 5])
G1, G2 = (grad(PARAMS, jnp.array(ids)) for ids in ([3, 5], [4, 7]))
ROWS, EAGER = G1["table"], js.IndexedSlices(jnp.ones((2, D)), jnp.array([3, 5]), (V, D))
STACKED = jax.tree.map(lambda *x: jnp.stack(x), G1, G2)


def batch(f):
    return jax.vmap(f, axis_name="b")(STACKED)


def scanned():
    zeros = jax.tree.map(jnp.zeros_like, G1)
    return jax.lax.scan(lambda s, g: (jax.tree.map(jnp.add, s, g), None), zeros, STACKED)


REFUSED = {
    "add": lambda: jax.tree.map(jnp.add, G1, G2),
    "operator": lambda: jax.tree.map(operator.add, G1, G2),
    "numpy": lambda: jax.tree.map(np.add, G1, G2),
    "of eager slices": lambda: jax.tree.map(jnp.add, EAGER, ROWS),
    "sum of a list": lambda: jax.tree.map(lambda *x: sum(x), G1, G2),
    "optax.tree.add": lambda: optax.tree.add(G1, G2),
    "negative": lambda: jax.tree.map(jnp.negative, G1),
    "-x": lambda: jax.tree.map(operator.neg, G1),
    "subtract": lambda: jax.tree.map(jnp.subtract, G1, G2),
    "2 * x": lambda: jax.tree.map(lambda x: 2 * x, G1),
    "x / 2": lambda: jax.tree.map(lambda x: x / 2, G1),
    "sign": lambda: jax.tree.map(jnp.sign, G1),
    "clip": lambda: jax.tree.map(lambda x: jnp.clip(x, -1, 1), G1),
    "astype": lambda: jax.tree.map(lambda x: x.astype("bfloat16"), G1),
    "square": lambda: jax.tree.map(jnp.square, G1),
    "x.sum()": lambda: jax.tree.map(lambda x: x.sum(), G1),
    "x.max()": lambda: jax.tree.map(lambda x: x.max(), G1),
    "norm": lambda: jax.tree.map(jnp.linalg.norm, G1),
    "norm of leaves": lambda: sum(jnp.sum(x**2) for x in jax.tree.leaves(G1)),
    "ravel_pytree": lambda: ravel_pytree(G1),
    "optax.tree.norm": lambda: optax.tree.norm(G1),
    "optax.tree.scale": lambda: optax.tree.scale(-1, G1),
    "optax.sgd": lambda: optax.sgd(0.1).update(G1, optax.sgd(0.1).init(PARAMS)),
    "scale of ours": lambda: step(optax.chain(js.sgd(0.1), optax.scale(-1.0))),
    "psum": lambda: batch(lambda g: jax.lax.psum(g, "b")),
    "pmean": lambda: batch(lambda g: jax.lax.pmean(g, "b")),
    "scan": scanned,
    "sum of vmap": lambda: jax.tree.map(lambda x: x.sum(0), STACKED),
    "mean of vmap": lambda: jax.tree.map(lambda x: x.mean(0), STACKED),
}


def step(tx):
    updates, _ = tx.update(G1, tx.init(PARAMS), PARAMS)
    return js.apply_updates(PARAMS, updates)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_row_numbers_are_not_added(name, jit):
    """As they were: other rows moved, or none, without a word."""
    if jit and name == "numpy":
        return
    call = jax.jit(REFUSED[name]) if jit else REFUSED[name]
    with pytest.raises(
        (TypeError, ValueError),
        match="row numbers of IndexedSlices, which have no arithmetic: type",
    ):
        call()


@pytest.mark.parametrize("name", ["adam", "momentum"])
def test_an_optimizer_of_optax_names_ours_first(name):
    tx = optax.adam(0.1) if name == "adam" else optax.sgd(0.1, momentum=0.9)
    ours = "jslices.adam for optax.adam" if name == "adam" else "jslices.sgd for optax.tr"
    with pytest.raises(ValueError, match=f"has an array; type {ours}"):
        step(tx)


DENSE_SUM = js.tree.to_dense(js.tree.map(operator.add, G1, G2))
RIGHT = {
    "js.tree.map": lambda: js.tree.map(operator.add, G1, G2),
    "is_leaf": lambda: jax.tree.map(operator.add, G1, G2, is_leaf=js.is_slices),
    "scan": lambda: jax.lax.scan(
        lambda s, g: (js.tree.map(operator.add, s, g), None),
        js.tree.map(lambda g: jnp.zeros(g.shape), G1),
        STACKED,
    )[0],
    "sum_stacked": lambda: js.sum_stacked(STACKED, "sum"),
    "all_reduce": lambda: jax.tree.map(
        lambda x: x[0],
        batch(lambda g: js.all_reduce_slices(g, "b", "sum")),
        is_leaf=js.is_slices,
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_sums(name):
    assert_close(js.tree.to_dense(jax.jit(RIGHT[name])()), DENSE_SUM)


MOVED = {
    "jit": lambda s: jax.jit(lambda s: s)(s),
    "donated": lambda s: jax.jit(lambda s: s, donate_argnums=0)(copy.deepcopy(s)),
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "pickled leaves": lambda s: jax.tree.unflatten(
        jax.tree.structure(s), pickle.loads(pickle.dumps(jax.tree.leaves(s)))
    ),
    "deepcopy": copy.deepcopy,
    "device_get": jax.device_get,
    "device_put": lambda s: jax.device_put(s, jax.devices()[0]),
    "np.asarray": lambda s: jax.tree.map(np.asarray, s),
    "jnp.copy": lambda s: jax.tree.map(jnp.copy, s),
    "where": lambda s: jax.tree.map(lambda x, y: jnp.where(True, x, y), s, s),
    "stop_gradient": jax.lax.stop_gradient,
    "cond": lambda s: jax.lax.cond(True, lambda: s, lambda: -s),
    "while": lambda s: jax.lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1]), (0, s)
    )[1],
    "remat": jax.checkpoint(lambda s: s),
    "jvp": lambda s: jax.jvp(s.with_values, (s.values,), (s.values,))[0],
    "shard_map": lambda s: jax.shard_map(
        lambda s: s,
        mesh=jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=(jax.tree.map(lambda _: jax.P(), s),),
        out_specs=jax.P(),
    )(s),
    "export": lambda s: jax.export.export(jax.jit(lambda s: s))(s).call(s),
    "callback": lambda s: js.IndexedSlices(
        s.values,
        jax.pure_callback(
            lambda s: np.asarray(s.indices), jax.ShapeDtypeStruct((2,), "int32"), s
        ),
        s.dense_shape,
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_slices_stay_what_they_are(name):
    for dtype in ("int32", "int16"):
        slices = js.IndexedSlices(ROWS.values, ROWS.indices.astype(dtype), (V, D))
        moved = MOVED[name](slices)
        assert name == "callback" or moved.indices.dtype == dtype
        assert_close(moved.to_dense(), ROWS.to_dense())
        assert isinstance(np.asarray(moved.indices), np.ndarray)


def test_shapes_without_arrays():
    shapes = jax.eval_shape(lambda: ROWS)
    assert shapes.indices.dtype == "int32" and shapes.indices.shape == (2,)
    by_hand = jax.ShapeDtypeStruct((2, D), "float32"), jax.ShapeDtypeStruct((2,), "int64")
    for slices in (shapes, js.IndexedSlices(*by_hand, (V, D))):
        lowered = jax.jit(lambda s: s.to_dense()).lower(slices)
        assert lowered.out_info.shape == (V, D)
    marks = jax.tree.map(lambda x: None, ROWS), jax.tree.map(lambda x: x.dtype, ROWS)
    assert marks[0].indices is None and "key" in str(marks[1].indices)


@pytest.mark.parametrize(
    "check",
    [
        chex.assert_trees_all_close,
        chex.assert_trees_all_equal,
        functools.partial(jax.tree.map, np.testing.assert_allclose),
        functools.partial(jax.tree.map, np.testing.assert_array_equal),
        lambda *trees: chex.assert_equal(
            jax.tree.all(jax.tree.map(np.allclose, *trees)), 1
        ),
        lambda *trees: chex.assert_equal(
            bool(jax.tree.all(jax.tree.map(jnp.array_equal, *trees))), True
        ),
    ],
)
def test_comparisons(check):
    check(G1, jax.jit(lambda g: g)(G1))
    check({"t": EAGER}, {"t": jax.device_get(EAGER)})
    other = js.IndexedSlices(EAGER.values, jnp.array([3, 6]), (V, D))
    with pytest.raises(AssertionError):
        check(EAGER, other)


def test_other_checks_of_chex():
    chex.assert_trees_all_equal_shapes_and_dtypes(G1, G2)
    chex.assert_trees_all_equal_structs(G1, G2)
    chex.assert_trees_all_equal_sizes(G1, G2)
    chex.assert_tree_all_finite(G1)
    chex.assert_tree_no_nones(G1)
    with pytest.raises(AssertionError):
        chex.assert_tree_all_finite(EAGER.with_values(EAGER.values * jnp.nan))


def test_without_rows():
    none = js.IndexedSlices(jnp.zeros((0, D)), jnp.zeros(0, int), (V, D))
    for empty in (none, jax.jit(lambda s: s)(none), none * 2, -none, none.coalesce()):
        assert not empty.to_dense().any() and empty.square_sum() == empty.sum() == 0
        assert_close((empty + EAGER).to_dense(), EAGER.to_dense())
    assert js.global_norm(none) == 0 and js.concat_slices([none, none]).indices.size == 0


SAYS = {
    "max": (lambda: EAGER.max(), r"no slices.max.*2 rows of an array float32\[20, 3\]"),
    "size": (lambda: EAGER.size, "math.prod"),
    "T": (lambda: EAGER.T, r"slices.to_dense\(\).T"),
    "reshape": (lambda: EAGER.reshape(-1), "to_dense"),
    "std": (lambda: EAGER.std(), "to_dense"),
    "abs": (lambda: abs(EAGER), r"abs\(slices.coalesce"),
    "pow": (lambda: EAGER**2, "square_sum"),
    "len": (lambda: len(EAGER), "indices.size"),
    "float": (lambda: float(EAGER), "to_dense"),
    "bool": (lambda: 1 if EAGER else 2, "grad is None"),
    "plot": (lambda: EAGER[:, 0], "to_dense"),
    "assign": (lambda: setattr(EAGER, "values", 1), "with_values"),
    "block_until_ready": (lambda: ROWS.block_until_ready(), "jax.block_until_ready"),
    "tolist": (lambda: EAGER.tolist(), r"to_dense\(\).tolist"),
    "numpy's of other libraries": (lambda: EAGER.numpy(), "object has no attribute"),
    "dlpack": (lambda: np.from_dlpack(EAGER), r"no from_dlpack.*to_dense\(\) first"),
    "lax.add": (lambda: jax.lax.add(EAGER, EAGER), r"of jax.lax: .*to_dense\(\) first"),
    "typeof": (lambda: jax.typeof(ROWS), r"no jax.typeof.*to_dense\(\) first"),
    "a norm of a leaf": (
        lambda: jax.tree.map(np.linalg.norm, G1),
        r"np.norm got row numbers",
    ),
    "a pair": (
        lambda: js.sgd(0.1).apply(js.value_and_grad(loss)(PARAMS, IDS), (), PARAMS),
        "tx.apply got a pair.*unpack it: value, grads",
    ),
    "a pair of update": (
        lambda: js.adam(0.1).update((1.0, G1), js.adam(0.1).init(PARAMS), PARAMS),
        "tx.update got a pair",
    ),
    "updates and state": (
        lambda: js.apply_updates(PARAMS, js.sgd(1.0).update(G1, js.sgd(1.0).init(PARAMS))),
        "apply_updates got a pair.*updates, state = tx.update",
    ),
    "ragged": (
        lambda: js.embedding_lookup(TABLE, [[1, 2], [3]]),
        r"embedding_lookup got ids of different lengths.*embedding_lookup_sparse",
    ),
    "scalars have no rows": (
        lambda: js.optim.clip_rows_by_norm(1).update({"w": ROWS, "b": jnp.ones(())}, ()),
        r"got a scalar at \['b'\]; .*jslices.optim.masked",
    ),
    "classes": (lambda: js.optim.Adam, "type jslices.optim.adam$"),
    "all capitals": (lambda: js.SGD, "type jslices.sgd$"),
    "SparseAdam": (lambda: js.optim.SparseAdam, "type jslices.adam$"),
    "update": (lambda: js.sgd(0.1).update(G1), r"update\(\):? missing .*'state'"),
    "slices alone": (
        lambda: js.sgd(0.1).update(ROWS, js.sgd(0.1).init(PARAMS), PARAMS),
        "alone, where parameters are a dict",
    ),
    "added alone": (lambda: js.apply_updates(PARAMS, ROWS), "alone, where parameters"),
    "init": (lambda: js.adam(0.1).init(G1), "as gradients are"),
    "swapped": (
        lambda: js.sgd(0.1).apply(PARAMS, js.sgd(0.1).init(PARAMS), G1),
        "the order is tx.apply",
    ),
    "in a chain": (
        lambda: js.optim.chain(js.clip_by_global_norm(1.0), js.sgd(0.1)),
        r"jslices.optim.clip_by_global_norm\(max_norm\)",
    ),
    "of optim": (
        lambda: js.optim.clip_by_global_norm(G1, 1.0),
        r"clip_by_global_norm: too many positional.*takes max_norm",
    ),
    "former link": (
        lambda: js.optim.clip_global_norm,
        "type jslices.optim.clip_by_global_norm$",
    ),
    "former link of rows": (
        lambda: js.optim.clip_row_norms,
        "type jslices.optim.clip_rows_by_norm$",
    ),
    "former step": (lambda: js.optim.exact_step, "type jslices.train_step$"),
    "former sum": (lambda: js.reduce_stacked, "type jslices.sum_stacked$"),
    "former error": (lambda: js.DataLossError, "type jslices.errors.DataLossError$"),
    "former proof": (lambda: js.proof, "type jslices.testing$"),
    "former hint": (lambda: js.optim.PerformanceHint, "type jslices.PerformanceHint$"),
    "of js": (lambda: js.chain, "type jslices.optim.chain$"),
    "tree_map": (lambda: js.tree_map, "type jslices.tree.map$"),
    "misspelt": (lambda: js.optim.adm, "type jslices.optim.adam$"),
    "psum": (lambda: js.psum, "all_reduce_slices"),
    "unknown": (lambda: js.nothing_like_it, "no attribute 'nothing_like_it'$"),
}


@pytest.mark.parametrize("name", SAYS)
def test_errors_say_what_to_type(name):
    call, message = SAYS[name]
    with pytest.raises((TypeError, ValueError, AttributeError), match=message):
        call()


@pytest.mark.parametrize("f", [np.abs, np.max, np.isnan, np.sqrt, np.median])
def test_functions_of_numpy_make_an_array(f):
    with pytest.warns(js.DensificationWarning, match="turned 2 rows into a dense array"):
        made = f(EAGER)
    np.testing.assert_array_equal(made, f(np.asarray(EAGER.to_dense())))


def test_operators_of_numpy_stay_sparse():
    assert js.is_slices(np.float32(2) * EAGER) and js.is_slices(EAGER * np.float32(2))
    ones = np.ones((V, D), np.float32)
    assert_close(ones + EAGER, ones + EAGER.to_dense())  # without a warning
    assert_close(ones - EAGER, ones - EAGER.to_dense())


def test_repr_shows_the_first_rows():
    assert "int32[2] (3, 5): " in repr(EAGER) and "int32[2] (3, 5): " in repr(ROWS)
    many = js.IndexedSlices(jnp.ones((9, D)), jnp.arange(9), (V, D))
    assert "int32[9] (0, 1, 2, 3, ...): " in repr(many)
    assert "int32[2]: " in jax.eval_shape(lambda s: s, EAGER).__repr__()
