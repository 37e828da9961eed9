"""Rows that are read again for a large gradient: less memory, the same numbers."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jslices as js
from jslices._grad import reread

V, K, D = 1_000_000, 50_000, 80  # rows of 16 MB
BYTES = K * D * 4


def squares(params, ids):
    return jnp.mean(params["table"][ids] ** 2)


def squares_with_aux(params, ids):
    rows = params["table"][ids]
    return jnp.mean(jnp.tanh(rows) * rows), {"rows": rows[:2], "name": "aux", "none": None}


def translations(params, ids):
    """Two lookups of one table, and a penalty."""
    head, tail = params["table"][ids], params["table"][ids[::-1]]
    far = jnp.abs(head - tail).sum(-1)
    return jnp.mean(jnp.maximum(0, far - 1)) + 0.1 * jnp.mean(head**2)


def factors(params, ids):
    """Matrix factorization: each gradient needs the rows of the other table."""
    users, items = params["table"][ids], params["other"][ids[::-1]]
    error = (users * items).sum(-1) - 1
    return jnp.mean(error**2) + 0.1 * (jnp.mean(users**2) + jnp.mean(items**2))


def relations(params, ids):
    """TransE: what is computed for one table is the gradient of the other."""
    far = params["table"][ids] + params["other"][ids // 2] - params["table"][ids[::-1]]
    return jnp.sum(jnp.abs(far))


def interactions(params, ids):
    """A factorization machine."""
    rows = params["table"][ids.reshape(-1, 2)]
    return jnp.mean(rows.sum(1) ** 2 - (rows**2).sum(1))


def with_a_dense_layer(params, ids):
    rows = params["table"][ids]
    return jnp.mean(jax.nn.relu(rows @ params["scale"])) + jnp.mean(rows**2)


def shifted(params, ids):
    return jnp.sum((params["table"][ids] - params["scale"][None]) ** 2)


def cast(params, ids):
    rows = params["table"][ids].astype(jnp.bfloat16)
    return jnp.mean(rows**2).astype(jnp.float32)


def filled(params, ids):
    return jnp.sum(jnp.exp(params["table"].at[ids].get(mode="fill", fill_value=0.5)))


def masked(params, ids):
    return jnp.sum(jax.nn.relu(params["table"][ids]) ** 2 * (ids % 2)[:, None])


# How often rows are read again.
MODELS = {
    squares: 1,
    translations: 2,
    interactions: 1,
    cast: 1,
    filled: 1,
    masked: 1,
    factors: 0,
    relations: 0,
    with_a_dense_layer: 0,
    shifted: 0,
}


def make_params(num_rows=40, dim=6, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {"table": draw(num_rows, dim), "other": draw(num_rows, dim), "scale": draw(dim)}


def read_always(monkeypatch):
    monkeypatch.setattr(reread, "LARGE", 0)
    monkeypatch.setattr(reread, "is_large", lambda *shape: True)


@pytest.fixture
def always(monkeypatch):
    read_always(monkeypatch)


def compiled_step(loss, tx, num_rows=V, dim=D, num_ids=K):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        value, grads = js.value_and_grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state, value

    params = jax.eval_shape(make_params)
    table = jax.ShapeDtypeStruct((num_rows, dim), jnp.float32)
    params = params | {"table": table, "scale": jax.ShapeDtypeStruct((dim,), jnp.float32)}
    arguments = (
        params,
        jax.eval_shape(tx.init, params),
        jax.ShapeDtypeStruct((num_ids,), jnp.int32),
    )
    js.testing.assert_in_place(step, *arguments)
    js.testing.assert_no_dense_temporary(step, *arguments)
    return step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes / BYTES


@pytest.mark.parametrize(
    "loss, arrays, saved", [(squares, 1, 1), (translations, 2, 2), (interactions, 1.5, 1)]
)
def test_a_step_holds_fewer_arrays(loss, arrays, saved, monkeypatch):
    """In arrays of the rows' size, for the gradient of each lookup one."""
    assert BYTES >= reread.LARGE
    few = compiled_step(loss, js.adagrad(0.1))
    assert arrays <= few < arrays + 0.4
    monkeypatch.setattr(reread, "LARGE", 10**12)
    assert few + 0.85 * saved < compiled_step(loss, js.adagrad(0.1))


def test_it_is_left_where_memory_is_kept(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert 2.5 <= compiled_step(interactions, js.adagrad(0.1)) < 2.9
    assert 1 <= compiled_step(squares, js.adagrad(0.1)) < 1.4  # by slot: it pays anyway


def both_ways(loss):
    """The loss, the gradients, and the gradients from rows that are read again."""

    def run(params, ids):
        value, grads = js.value_and_grad(loss)(params, ids)
        return value, grads, read_again(grads)

    return run


def read_again(grads):
    def again(grad):
        if not js.is_slices(grad):
            return grad
        return js.IndexedSlices(reread.values_again(grad), grad.indices, grad.dense_shape)

    return jax.tree.map(again, grads, is_leaf=js.is_slices)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("loss", MODELS)
def test_gradients_are_those_of_jax(loss):
    params, ids = make_params(), jnp.array([3, 3, 7, -1, 39, 0])
    plain = str(jax.make_jaxpr(js.value_and_grad(loss))(params, ids)).count(" gather[")
    again = str(jax.make_jaxpr(both_ways(loss))(params, ids)).count(" gather[")
    assert again == plain + MODELS[loss]
    value, *ours = jax.jit(both_ways(loss))(params, ids)
    wanted = jax.jit(jax.value_and_grad(loss))(params, ids)
    for grads in ours:
        got = value, js.tree.to_dense(grads)
        chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-6)
    # XLA may contract other products and sums: a unit in the last place.
    chex.assert_trees_all_close(*ours, rtol=5e-7, atol=1e-6)


@pytest.mark.usefixtures("always")
def test_gradients_that_are_changed_are_computed_once():
    def run(params, ids):
        value, grads = js.value_and_grad(interactions)(params, ids)
        grads = jax.tree.map(lambda x: 2 * x, grads)
        return value, read_again(grads)

    params, ids = make_params(), jnp.array([3, 7])
    assert str(jax.make_jaxpr(run)(params, ids)).count(" gather[") == 1
    _, grads = jax.jit(run)(params, ids)
    np.testing.assert_allclose(
        grads["table"].values, params["table"][ids[::-1]] * 4 / 6, rtol=1e-6
    )


@pytest.mark.usefixtures("always")
def test_what_the_function_returns_besides():
    params, ids = make_params(), jnp.array([3, 3, 7])

    def run(params, ids):
        (value, aux), grads = js.value_and_grad(squares_with_aux, has_aux=True)(params, ids)
        grads = read_again(grads)
        assert aux.pop("name") == "aux" and aux.pop("none") is None
        return value, aux, grads["table"].to_dense()

    value, aux, grad = jax.jit(run)(params, ids)
    wanted = jax.value_and_grad(lambda *args: squares_with_aux(*args)[0])(params, ids)
    chex.assert_trees_all_close((value, grad), (wanted[0], wanted[1]["table"]), rtol=1e-5)
    np.testing.assert_array_equal(aux["rows"], params["table"][jnp.array([3, 3])])


@pytest.mark.usefixtures("always")
def test_arguments_by_number_and_integers():
    table, ids = make_params()["table"], jnp.array([3, 3, 7])

    def loss(ids, scale, table):
        return scale * jnp.sum(table[ids] ** 2)

    @jax.jit
    def step(*args):
        value, grads = js.value_and_grad(loss, argnums=(2, 0, 1), allow_int=True)(*args)
        return value, read_again(grads)

    value, (rows, none, scale) = step(ids, 2.0, table)
    assert value == 2 * scale and none.dtype == jax.dtypes.float0
    np.testing.assert_allclose(rows.values, 4 * table[ids], rtol=1e-6)


@pytest.mark.usefixtures("always")
def test_transformed():
    params, ids = make_params(), jnp.array([[3, 3, 7], [1, 2, 3]])

    def of(value_and_grad, dense):
        def run(params, ids):
            value, grads = value_and_grad(squares)(params, ids)
            grads = read_again(grads)
            return value + jnp.sum(dense(grads["table"]) ** 2)

        return run

    ours, theirs = (
        of(js.value_and_grad, lambda g: g.to_dense()),
        of(jax.value_and_grad, lambda g: g),
    )
    for transform in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f))):
        chex.assert_trees_all_close(
            transform(ours)(params, ids[0]), transform(theirs)(params, ids[0]), rtol=1e-5
        )
    many = jax.vmap(ours, in_axes=(None, 0))(params, ids)
    chex.assert_trees_all_close(
        many, jax.vmap(theirs, in_axes=(None, 0))(params, ids), rtol=1e-5
    )


@pytest.mark.usefixtures("always")
def test_effects_happen_once(capfd):
    def loss(params, ids):
        value = squares(params, ids)
        jax.debug.print("value {}", value)
        return value

    jax.block_until_ready(jax.jit(both_ways(loss))(make_params(), jnp.array([1])))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("value") == 1


@pytest.mark.usefixtures("always")
def test_a_table_that_is_used_whole_is_said_once():
    def tied(params, ids):
        return jnp.mean(params["table"][ids] ** 2) + jnp.sum(params["table"].max())

    with pytest.warns(js.DensificationWarning) as seen:
        jax.make_jaxpr(both_ways(tied))(make_params(), jnp.array([1]))
    assert len(seen) == 1


@pytest.mark.usefixtures("always")
def test_what_is_not_compiled_reads_once():
    _, grads = js.value_and_grad(squares)(make_params(), jnp.array([1]))
    assert reread.values_again(grads["table"]) is grads["table"].values


@pytest.mark.usefixtures("always")
def test_per_device():
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    kind = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    all_alike, shares = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(all_alike, shares), out_specs=all_alike
    )
    def run(table, ids):
        own = jax.lax.pcast({"table": table}, ("data",), to="varying")
        _, _, grads = both_ways(squares)(own, ids)
        return js.all_reduce_slices(grads["table"], "data").to_dense()

    params, ids = make_params(), jnp.arange(8) * 3 % 10
    wanted = jax.grad(squares)(params, ids)["table"]
    np.testing.assert_allclose(run(params["table"], ids), wanted, rtol=1e-5)
