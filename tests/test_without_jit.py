"""Without ``jax.jit`` a gradient is JAX's, and a warm call compiles nothing."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, fast_jit, slow_unless
from jax import lax

import jslices as js

IDS = jax.device_put(np.array([3, 1, 3, 7, -1], np.int32))
HOST = {
    "t": np.linspace(-1, 1, 80, dtype=np.float32).reshape(10, 8),
    "w": np.linspace(0, 1, 8, dtype=np.float32)[None],
}
PARAMS = jax.device_put(HOST)
LARGE = {**PARAMS, "t": jax.device_put(np.tile(HOST["t"], (300, 1)))}

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
)


@jax.jit
def jitted(p, ids):
    return jnp.tanh(p["t"][ids] * p["w"]).sum()


@jax.jit
def normalized(table):
    return table / (1 + jnp.linalg.norm(table, axis=1, keepdims=True))


@jax.jit
def twice_jitted(p, ids):
    return jitted(p, ids) + jitted({**p, "t": normalized(p["t"])}, ids[:2])


def in_a_view(p, ids):
    return jitted({**p, "t": jnp.sin(p["t"])[1:]}, ids[:4]) + jitted(p, ids)


def out_of_a_call(p, ids):
    return (normalized(p["t"])[ids] * p["w"]).sum()


def turn(carry, i):
    p, total = carry
    return (p, total + p["t"][i][None] * p["w"]), None


def looped(p, ids):
    (_, total), _ = lax.scan(turn, (p, jnp.zeros((1, 8))), ids)
    return total.sum()


def first(p, ids):
    return p["t"][ids].sum()


def second(p, ids):
    return (jnp.cos(p["t"])[ids[:2]] * p["w"]).sum()


def branched(p, ids):
    return lax.cond(ids[0] > 1, first, second, p, ids) + lax.switch(
        ids[1], (first, second), {**p, "t": -p["t"]}, ids
    )


checkpointed = jax.checkpoint(second)


def used_whole(p, ids):
    return jitted(p, ids) + lax.scan(lambda c, _: (c, None), p["t"].sum(), None, 2)[0]


def softened(p, ids):
    return (jax.nn.softplus(jax.nn.relu(p["t"]))[ids] * p["w"]).sum()


def looked_up_twice(p, ids):
    return jitted(p, ids) + first(p, ids[:1]) + looped(p, ids)


LOSSES = [
    jitted,
    twice_jitted,
    in_a_view,
    out_of_a_call,
    looped,
    branched,
    checkpointed,
    softened,
    looked_up_twice,
]


@pytest.mark.parametrize(
    "loss",
    slow_unless(
        [(loss,) for loss in LOSSES],
        lambda case: case[0] == branched,
    ),
    ids=lambda loss: loss.__name__,
)
def test_a_warm_call_compiles_nothing(loss):
    for _ in range(2):
        value, grads = js.value_and_grad(loss)(PARAMS, IDS)
    compiled.clear()
    # Other functions around the same, and other numbers, as in a loop of steps.
    other = jax.device_put(jax.tree.map(lambda x: np.float32(0.5) * x, HOST))
    compiled.clear()
    warm = js.value_and_grad(lambda p: loss(p, IDS))(PARAMS)
    halved = js.value_and_grad(loss)(other, IDS)
    assert compiled == []
    assert js.is_slices(grads["t"]) and js.is_slices(halved[1]["t"])
    assert_close(warm, (value, grads))
    wanted = fast_jit(jax.value_and_grad(loss))
    assert_close((value, grads), wanted(PARAMS, IDS))
    assert_close(halved, wanted(other, IDS))
    assert_close((value, grads), fast_jit(js.value_and_grad(loss))(PARAMS, IDS))


def test_tables_of_other_shapes_and_kinds():
    """What is kept for some operands is not taken for others."""
    for rows, ids, dtype in [(10, IDS, "f4"), (12, IDS, "f4"), (10, IDS[:3], "bf16")]:
        dtype = jnp.bfloat16 if dtype == "bf16" else dtype
        p = {"t": jax.device_put(np.ones((rows, 8), dtype)), "w": PARAMS["w"]}
        got = js.grad(looked_up_twice)(p, ids)
        assert js.is_slices(got["t"]) and got["t"].shape == (rows, 8)
        wanted = fast_jit(jax.grad(looked_up_twice))(p, ids)
        assert_close(got, wanted, rtol=1e-2 * (dtype == jnp.bfloat16))


def test_sparse_and_dense_by_turns():
    wanted = fast_jit(jax.grad(jitted))(PARAMS, IDS)
    for kind in (None, False, None, False, True):
        got = js.grad(jitted, sparse={"t": kind, "w": None})(PARAMS, IDS)["t"]
        assert js.is_slices(got) == (kind is not False)
        assert_close(got, wanted["t"])
    with pytest.warns(js.DensificationWarning, match=r"\.sum\(\)"):
        grads = js.grad(used_whole)(LARGE, IDS)
    assert_close(grads, fast_jit(jax.grad(used_whole))(LARGE, IDS))


@pytest.mark.parametrize(
    "loss",
    slow_unless([(twice_jitted,), (branched,)], lambda case: case[0] is twice_jitted),
    ids=lambda loss: loss.__name__,
)
def test_under_vmap_and_vjp(loss):
    ids = np.asarray(IDS)
    batch, grad = np.stack([ids, ids[::-1]]), jax.grad(loss)
    got = jax.vmap(lambda ids: js.grad(loss)(PARAMS, ids))(batch)
    wanted = jax.device_get(fast_jit(jax.vmap(lambda ids: grad(PARAMS, ids)))(batch))
    assert_close(got["w"], wanted["w"])
    assert_close(fast_jit(jax.vmap(js.IndexedSlices.to_dense))(got["t"]), wanted["t"])
    value, pull = js.vjp(loss, PARAMS, IDS)
    first = {name: x[0] for name, x in wanted.items()}
    assert_close(pull(np.ones((), value.dtype))[0], first)


def test_nothing_holds_what_the_user_lets_go():
    def train():
        @jax.jit
        def loss(p, ids):
            return looped(p, ids) + p["t"][ids].sum()

        for _ in range(2):
            js.grad(loss)(PARAMS, IDS)
            js.grad(lambda p: jax.checkpoint(loss)(p, IDS))(PARAMS)
        return weakref.ref(loss)

    gone = [train() for _ in range(2)]
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_lines_are_those_of_the_call_at_hand():
    """``jnp.take`` is one program of JAX's own, wherever it is called."""

    def here(table):
        return jnp.take(table, IDS, axis=0).sum() + table.sum()

    def there(table):
        return jnp.take(table, IDS, axis=0).sum() * table.mean()

    for fun, text in [(here, "+ table.sum"), (there, "* table.mean"), (here, "+ table.")]:
        with pytest.warns(js.DensificationWarning) as caught:
            js.grad(fun)(LARGE["t"])
        line = fun.__code__.co_firstlineno + 1
        assert text and f":{line}" in str(caught[0].message)
