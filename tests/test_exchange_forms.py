"""Tables split over devices: axes of two kinds, no ``set_mesh``, no ``jax.jit``."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, fast_jit, numpy_dense, slow_but_first
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jslices as js

pytestmark = pytest.mark.filterwarnings("ignore::jslices.DensificationWarning")

P = PartitionSpec
V, D = 64, 4
TABLE = np.random.default_rng(3).normal(size=(V, D)).astype(np.float32)
ROOMY = js.Exchange("x", "all_to_all", capacity=8.0)  # has room for all ids
IDS = np.array([[3, 9], [3, 63], [0, 1], [9, 9]] * 2, np.int32)


def placed(shape, kinds):
    """A mesh, and the table on it."""
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    names = ("a", "x")[-len(shape) :]
    kinds = tuple(getattr(AxisType, kind) for kind in kinds)
    mesh = jax.make_mesh(shape, names, axis_types=kinds)
    return mesh, jax.device_put(TABLE, NamedSharding(mesh, P("x")))


def on_host(slices):
    assert js.is_slices(slices)
    return numpy_dense(slices.values, slices.indices, slices.dense_shape)


@functools.cache
def gradient_of(loss):
    """The dense gradient on one device."""
    return jax.device_get(fast_jit(jax.grad(loss))(TABLE))


def scanned(table):
    def body(total, ids):
        return total + jnp.sin(js.embedding_lookup(table, ids)).sum(), None

    return jax.lax.scan(body, 0.0, jnp.asarray(IDS))[0]


def squared(table):
    return (js.embedding_lookup(table, jnp.array([3, 9, 3])) ** 2).sum()


@pytest.mark.parametrize(
    "exchange", [None, pytest.param(ROOMY, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("loss", [squared, scanned])
def test_without_jit_ids_may_be_on_one_device(loss, exchange):
    _, table = placed((8,), ["Auto"])
    found = js.grad(loss, exchange=exchange)(table)
    assert_close(on_host(found), gradient_of(loss), rtol=1e-5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_set_mesh_tells_programs_of_ids_alone(kind):
    mesh, table = placed((8,), [kind])
    exchange = ROOMY if kind == "Auto" else None
    rows = js.lookup_ids(squared, exchange=exchange)
    with jax.set_mesh(mesh):
        held = np.asarray(jax.jit(rows)(table).indices)
    assert set(held[held < V].tolist()) == {3, 9}


@pytest.mark.parametrize("kinds", [("Explicit", "Auto"), ("Auto", "Explicit")], ids=str)
def test_axes_of_both_kinds(kinds):
    mesh, table = placed((2, 4), kinds)
    exchange = js.Exchange("x") if kinds[1] == "Auto" else None
    with jax.set_mesh(mesh):
        found = fast_jit(js.grad(scanned, exchange=exchange))(table)
    assert_close(on_host(found), gradient_of(scanned), rtol=1e-5)


@pytest.mark.parametrize("is_set", [True, False])
def test_loops_on_explicit_axes(is_set):
    mesh, table = placed((8,), ["Explicit"])
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        found = fast_jit(js.grad(scanned))(table)
        rows = fast_jit(lambda t: (js.lookup_ids(scanned)(t), t.sum()))(table)[0]
    assert_close(on_host(found), gradient_of(scanned), rtol=1e-5)
    held = np.asarray(rows.indices)
    assert set(held[held < V].tolist()) == set(IDS.ravel().tolist())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_rows_catch_up_without_jit(kind):
    mesh, table = placed((8,), [kind])
    tx, ids = js.adam(0.1, untouched="exact"), jnp.array([3, 9])
    with jax.set_mesh(mesh):
        caught_up, _ = tx.catch_up(table, tx.init(table), ids)
    np.testing.assert_array_equal(np.asarray(caught_up), TABLE)


def test_safe_bags_on_explicit_axes():
    mesh, table = placed((8,), ["Explicit"])
    ids = np.where(IDS == 9, -1, IDS)

    def loss(table, ids):
        return (js.safe_embedding_lookup_sparse(table, ids) ** 2).sum()

    with jax.set_mesh(mesh):
        split = jax.device_put(ids, NamedSharding(mesh, P("x")))
        found = fast_jit(js.grad(loss))(table, split)
    wanted = fast_jit(jax.grad(loss))(TABLE, ids)
    assert_close(on_host(found), wanted, rtol=1e-5)


@pytest.mark.parametrize("kind", slow_but_first("Auto", "Explicit"))
def test_products_that_read_rows(kind):
    """Of a sparse matrix on Explicit axes, too, of which JAX tells no type."""
    mesh, table = placed((8,), [kind])
    places = np.stack([np.arange(8, dtype=np.int32) % 5, IDS[:, 1]], axis=1)
    matrix = BCOO((np.arange(8, dtype=np.float32), places), shape=(5, V))

    def loss(table, ids):
        rows = jnp.sin(jax.nn.one_hot(ids, V) @ table).sum(1) ** 2
        return rows.sum() + (jnp.sin(matrix @ table) ** 2).sum()

    wanted = fast_jit(jax.grad(loss))(TABLE, IDS)
    with jax.set_mesh(mesh):
        ids = jax.device_put(IDS, NamedSharding(mesh, P("x")))
        found = fast_jit(js.grad(loss, exchange=ROOMY))(table, ids)
    assert_close(on_host(found), wanted, rtol=1e-5)


def test_rows_are_masked_and_frozen_where_they_are():
    _, table = placed((8,), ["Auto"])
    odd = np.arange(V) % 2 == 1
    tx = js.optim.freeze_rows(js.sgd(0.1), odd)

    def stepped(table, exchange):
        grads = js.grad(squared, exchange=exchange)(table)
        masked = js.mask_rows(grads, odd)
        return masked.to_dense(), tx.apply(grads, tx.init(table), table)[0]

    found = fast_jit(lambda t: stepped(t, ROOMY))(table)
    wanted = fast_jit(lambda t: stepped(t, None))(TABLE)
    assert_close(found, wanted, rtol=1e-5)
