"""from_optax: the transformation itself, on the touched rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, dense, fast_jit, slow_unless

import jslices as js
from jslices.testing import assert_in_place

V, D = 8, 3
RNG = np.random.default_rng(2)
SHAPES = {"table": (V, D), "w": (D,)}
PARAMS = {k: RNG.normal(size=shape).astype(np.float32) for k, shape in SHAPES.items()}
PARAMS = jax.device_put(PARAMS)
TRANSFORMATIONS = {
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1, weight_decay=0.1),
    "rmsprop": optax.rmsprop(0.1, momentum=0.9, centered=True),
    "lion": optax.lion(0.1),
    "partition": optax.partition(
        {"rows": optax.adam(0.1), "rest": optax.sgd(0.1, momentum=0.9)},
        {"table": "rows", "w": "rest"},
    ),
    "masked": optax.chain(
        optax.masked(optax.scale_by_adam(), {"table": True, "w": False}), optax.scale(-0.1)
    ),
    "chain": optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.01),
        optax.scale_by_schedule(optax.cosine_decay_schedule(-0.1, 10)),
    ),
}


def grads_of(rng, ids):
    values = rng.normal(size=(len(ids), D)).astype(np.float32)
    w = rng.normal(size=D).astype(np.float32)
    values, ids, w = jax.device_put((values, np.array(ids, np.int32), w))
    return {"table": js.IndexedSlices(values, ids, (V, D)), "w": w}


@functools.cache
def compiled_update(name):
    """The transformation's update on slices with ``len(ALL_ROWS)`` ids."""
    return fast_jit(js.from_optax(TRANSFORMATIONS[name]).update)


ALL_ROWS = [*range(V), 1, 1, V]


@pytest.mark.parametrize(
    "name",
    slow_unless([(x,) for x in TRANSFORMATIONS], lambda case: case[0] in ("adam", "chain")),
)
def test_equals_optax_on_rows_touched_each_step(name):
    rng = np.random.default_rng(3)
    tx, update = TRANSFORMATIONS[name], compiled_update(name)
    params, state = PARAMS, js.from_optax(tx).init(PARAMS)
    wanted, wanted_state = PARAMS, tx.init(PARAMS)
    apply, their_update = fast_jit(js.apply_updates), fast_jit(tx.update)
    for _ in range(3):
        grads = grads_of(rng, ALL_ROWS)
        updates, state = update(grads, state, params)
        params = apply(params, updates)
        updates, wanted_state = their_update(dense(grads), wanted_state, wanted)
        wanted = apply(wanted, updates)
    assert_close(params, wanted, rtol=1e-4, atol=1e-5)
    assert_close(state, wanted_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_untouched_rows_and_their_state_stay(name):
    rng, update = np.random.default_rng(4), compiled_update(name)
    state = js.from_optax(TRANSFORMATIONS[name]).init(PARAMS)
    _, state = update(grads_of(rng, ALL_ROWS), state, PARAMS)
    few = [5, 2, 5, *[V] * (len(ALL_ROWS) - 3)]
    updates, new = update(grads_of(rng, few), state, PARAMS)
    indices = np.asarray(updates["table"].indices)
    assert sorted(indices[indices < V]) == [2, 5] and indices.max() == V
    assert not np.asarray(updates["table"].values)[indices == V].any()
    rest = np.array([0, 1, 3, 4, 6, 7])
    state, new = jax.device_get((state, new))
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        if before.shape == (V, D):
            np.testing.assert_array_equal(before[rest], after[rest])


def test_without_jit():
    rng, name = np.random.default_rng(4), "adamw"
    tx, grads = js.from_optax(TRANSFORMATIONS[name]), grads_of(rng, ALL_ROWS)
    got = tx.update(grads, tx.init(PARAMS), PARAMS)
    assert_close(got, compiled_update(name)(grads, tx.init(PARAMS), PARAMS))


def test_without_sparse_leaves_it_is_the_transformation():
    tx = optax.adam(0.1)
    got = js.from_optax(tx).update(PARAMS, tx.init(PARAMS), PARAMS)
    assert_close(got, tx.update(PARAMS, tx.init(PARAMS), PARAMS))


def test_in_place():
    table = jax.ShapeDtypeStruct((200_000, 16), jnp.float32)
    tx = js.from_optax(optax.adam(0.1))

    def step(table, state, ids):
        grads = js.grad(lambda t: (t[ids] ** 2).sum())(table)
        updates, state = tx.update(grads, state, table)
        return js.apply_updates(table, updates), state

    state = jax.eval_shape(tx.init, table)
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    memory = assert_in_place(step, table, state, ids, donate_argnums=(0, 1))
    assert memory.temp_bytes < 200_000 * 16
    assert memory.alias_bytes >= 3 * 200_000 * 16 * 4


@pytest.mark.parametrize(
    "tx",
    [
        optax.lamb(0.1),
        optax.lars(0.1),
        optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
        optax.adafactor(0.1),
        optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
        optax.chain(optax.scale_by_param_block_norm(), optax.sgd(0.1)),
    ],
    ids=["lamb", "lars", "block_rms", "adafactor", "noise", "block_norm"],
)
def test_what_mixes_rows_is_refused(tx):
    lifted, state = js.from_optax(tx), jax.eval_shape(tx.init, PARAMS)
    grads = grads_of(RNG, [1, 5])
    with pytest.raises(ValueError, match=r"does not treat each row by itself.* differ by"):
        jax.eval_shape(lifted.update, grads, state, PARAMS)
    # On dense gradients it is what it is.
    got, wanted = (
        str(jax.make_jaxpr(each.update)(dense(grads), state, PARAMS))
        for each in (lifted, tx)
    )
    assert got == wanted


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.apply_every(2), optax.sgd(1.0)),
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
        optax.contrib.prodigy(1.0),
        optax.contrib.dadapt_adamw(1.0),
        optax.contrib.dog(1.0),
        optax.contrib.mechanize(optax.sgd(1.0)),
        optax.contrib.momo(1.0),
        optax.lbfgs(),
        optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
    ],
    ids=[
        "every",
        "sam",
        "prodigy",
        "dadapt",
        "dog",
        "mechanize",
        "momo",
        "lbfgs",
        "search",
    ],
)
def test_what_acts_on_all_rows_in_some_step_is_refused(tx):
    with pytest.raises(ValueError, match=r"cannot lift optax.* all rows together"):
        state = jax.eval_shape(tx.init, PARAMS)
        jax.eval_shape(js.from_optax(tx).update, grads_of(RNG, [1]), state, PARAMS)


def test_extra_arguments_go_through():
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    grads = grads_of(RNG, [1, 1])

    @fast_jit
    def update(grads, value):
        return js.from_optax(tx).update(grads, tx.init(PARAMS), PARAMS, value=value)[0]

    updates, grads = update(grads, 1.0), dense(grads)
    assert_close(updates["table"], -np.float32(0.1) * np.asarray(grads["table"]))


def test_accumulation_is_refused():
    steps = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    tx = js.from_optax(optax.chain(optax.clip(1.0), steps))
    with pytest.raises(ValueError, match=r"MultiSteps: .*jslices.accumulate_gradients"):
        tx.update(grads_of(RNG, [1]), tx.init(PARAMS), PARAMS)


def test_errors():
    with pytest.raises(TypeError, match="wants an Optax transformation"):
        js.from_optax(0.1)
    tx = js.from_optax(optax.adam(0.1))
    grads = grads_of(RNG, [1])
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(grads, tx.init(PARAMS))
    factored = js.from_optax(optax.scale_by_factored_rms(min_dim_size_to_factor=2))
    with pytest.raises(ValueError, match=r"cannot tell the rows of a state array of shape"):
        factored.update(grads, factored.init(PARAMS), PARAMS)
