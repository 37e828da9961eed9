"""js.optim.multi_steps: one step for k gradients, with rows that stay rows."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit, slow_unless

import jslices as js
import jslices.testing

V, D, K, B = 11, 3, 3, 4
RNG = np.random.default_rng(0)
SIZES = {"table": (V, D), "w": (D,)}
PARAMS = {k: RNG.normal(size=size).astype(np.float32) for k, size in SIZES.items()}
PARAMS = jax.device_put(PARAMS)
# Two steps of three micro-batches of four; duplicates in one and among several.
BATCHES = np.array(
    [[0, 3, 3, 1], [3, 5, 6, 6], [1, 1, 1, 1], [2, 3, 9, 9], [9, 0, 0, 2], [8, 8, 4, 3]]
)


def loss(params, ids):
    rows = params["table"].at[ids].get(mode="fill", fill_value=0)
    return ((rows @ params["w"] - 1) ** 2).mean() + (rows**2).mean()


grad = js.grad(loss)
SHAPES = jax.eval_shape(grad, PARAMS, BATCHES[0])
OPTIMIZERS = {
    "sgd": js.sgd(0.1, momentum=0.9),
    "adam": js.adam(optax.exponential_decay(0.1, 1, 0.5)),
    "adamw": js.adamw(0.1, weight_decay=0.1),
    "adafactor": js.adafactor(0.1, min_dim_size_to_factor=1),
    "lifted": js.from_optax(optax.rmsprop(0.1)),
    "chain": js.optim.chain(js.optim.clip_by_global_norm(0.1), js.adagrad(0.1)),
    "exact": js.lion(0.1, weight_decay=0.1, untouched="exact"),
}
grads_of = fast_jit(grad)
QUICKLY = {"xla_backend_optimization_level": 0}
flush = functools.cache(lambda tx: fast_jit(tx.flush))


@functools.cache
def wrapped(name, use_grad_mean=True):
    return js.optim.multi_steps(OPTIMIZERS[name], K, SHAPES, use_grad_mean)


@functools.cache
def stepping(tx, how):
    """``step(params, state, ids)``, traced once if it is compiled."""

    def step(params, state, ids):
        params, state = tx.catch_up(params, state, {"table": ids, "w": None})
        grads = grad(params, ids)
        if how in ("scan", "apply"):
            return tx.apply(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state

    if how == "scan":
        return step
    chex.clear_trace_counter()
    return fast_jit(chex.assert_max_traces(n=1)(step))


@functools.cache
def train(tx, how):
    """Parameters and state after each micro-batch."""
    step, carry = stepping(tx, how), (PARAMS, tx.init(PARAMS))
    if how == "scan":
        body = lambda carry, ids: (step(*carry, ids),) * 2  # noqa: E731
        stacked = fast_jit(lambda carry, batches: jax.lax.scan(body, carry, batches)[1])
        after = stacked(carry, BATCHES)
        after = jax.device_get(after)
        return [jax.tree.map(lambda x, k=k: x[k], after) for k in range(len(BATCHES))]
    return [carry := step(*carry, ids) for ids in BATCHES]


@functools.cache
def wanted(name, reduction="mean"):
    """Parameters after each step on the mean gradient of three micro-batches at once."""
    tx = OPTIMIZERS[name]

    @fast_jit
    def step(params, state, batches):
        params, state = tx.catch_up(params, state, {"table": batches, "w": None})
        batch_grad = lambda ids: grad(params, ids)  # noqa: E731
        grads = js.accumulate_gradients(batch_grad, batches, reduction)
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state

    carry = PARAMS, tx.init(PARAMS)
    return [carry := step(*carry, ids) for ids in BATCHES.reshape(2, K, B)]


# The wrapping is the same for all, so that each is run in one way or another; the
# docstring's example runs without jit.
RUNS = [(name, "jit") for name in ("adafactor", "adamw", "chain", "sgd")]
RUNS += [("adam", "apply"), ("exact", "apply"), ("lifted", "scan")]


@pytest.mark.parametrize(
    "name, how",
    slow_unless(sorted(RUNS), lambda run: run[0] in ("adam", "chain")),
)
def test_equals_a_step_on_the_mean_gradient(name, how):
    tx = wrapped(name)
    got, start = train(tx, how), (PARAMS, tx.init(PARAMS))
    for k, (params, state) in enumerate(got):
        assert (int(state.mini_step), int(state.gradient_step)) == (
            (k + 1) % K,
            (k + 1) // K,
        )
        chex.assert_trees_all_equal_shapes_and_dtypes(state, start[1])
        if k % K < K - 1 and name != "exact":  # whose rows catch up in between
            before = got[k - 1] if k else start
            chex.assert_trees_all_equal(params, before[0])
            chex.assert_trees_all_equal(state.inner_opt_state, before[1].inner_opt_state)
    for (params, state), (there, inner) in zip(got[K - 1 :: K], wanted(name), strict=True):
        if name == "exact":
            there, flushed = flush(tx)(there, state._replace(inner_opt_state=inner))
            inner = flushed.inner_opt_state
            params, state = flush(tx)(params, state)
        assert_close(params, there, rtol=1e-5, atol=1e-6)
        assert_close(state.inner_opt_state, inner, rtol=1e-5, atol=1e-6)


def test_a_step_that_takes_all_rows():
    """As many ids as rows: a step then passes over the whole table, under jit too."""
    ids = np.arange(8 * V) % (V - 1)
    shapes = jax.eval_shape(grad, PARAMS, ids)
    tx, alone = js.optim.multi_steps(js.adam(0.1), 2, shapes), js.adam(0.1)

    @fast_jit
    def both(params):
        grads, state = grad(params, ids), tx.init(params)
        wanted, _ = alone.apply(grads, alone.init(params), params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
            params = js.apply_updates(params, updates)
        return params, wanted

    assert_close(*both(PARAMS))


def test_an_update_names_the_rows_of_k_gradients_and_not_of_one():
    """A pass over all rows returns more entries than one gradient has, and all count."""
    first, second = (
        js.IndexedSlices(np.ones((300, 4), np.float32), ids, (700, 4))
        for ids in np.arange(600).reshape(2, 300)
    )
    table = np.zeros((700, 4), np.float32)
    tx = js.optim.multi_steps(js.adam(0.1), 2, first)
    _, state = tx.update(first, tx.init(table), table)
    updates, _ = fast_jit(lambda grads: tx.update(grads, state, table))(second)
    moved = np.asarray(js.apply_updates(table, updates)[:, 0])
    np.testing.assert_allclose(moved, -0.1 * (np.arange(700) < 600), rtol=1e-4)


def test_the_sum_of_gradients():
    got = train(wrapped("sgd", use_grad_mean=False), "jit")[K - 1 :: K]
    for (params, _), (there, _) in zip(got, wanted("sgd", "sum"), strict=True):
        assert_close(params, there)


def test_equals_multi_steps_of_optax_on_dense_gradients():
    """Exact rows and a flush: every row, the ones without gradient too."""
    tx = wrapped("exact")
    params, _ = flush(tx)(*train(tx, "apply")[-1])
    theirs = optax.MultiSteps(optax.lion(0.1, weight_decay=0.1), K)
    there, state, update = PARAMS, theirs.init(PARAMS), fast_jit(theirs.update)
    dense_grad = fast_jit(jax.grad(loss))
    for ids in BATCHES:
        updates, state = update(dense_grad(there, ids), state, there)
        there = optax.apply_updates(there, updates)
    assert_close(params, there, rtol=1e-4, atol=1e-5)


def test_updates_between_steps_are_empty():
    tx = js.optim.multi_steps(js.adam(0.1), K, SHAPES)
    state, update = tx.init(PARAMS), fast_jit(tx.update)
    shapes = jax.eval_shape(tx.update, SHAPES, state, PARAMS)[0]
    for run in (tx.update, update):
        updates, _ = run(grads_of(PARAMS, BATCHES[0]), state, PARAMS)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, shapes)
        np.testing.assert_array_equal(updates["table"].indices, V)
        assert not any(np.any(x) for x in (updates["table"].values, updates["w"]))


def test_no_array_of_the_size_of_the_table():
    """What waits is k * K rows, and a step copies no table."""
    height, count = 20_000, 4
    table = np.zeros((height, 8), np.float32)
    like = js.IndexedSlices(table[:count], np.arange(count), table.shape)
    tx = js.optim.multi_steps(js.adam(0.1), K, like)
    state = tx.init(table)
    assert sum(x.size for x in jax.tree.leaves(state.acc_grads)) == K * count * (8 + 1)

    def step(table, state, grads):
        updates, state = tx.update(grads, state, table)
        return js.apply_updates(table, updates), state

    def applied(table, state, grads):
        return tx.apply(grads, state, table)

    for run in (step, applied):
        lowered = jax.jit(run, donate_argnums=(0, 1)).lower(table, state, like)
        memory = lowered.compile(QUICKLY).memory_analysis()
        assert memory.temp_size_in_bytes < table.nbytes // 8
        assert memory.alias_size_in_bytes >= 3 * table.nbytes


def test_padding_none_narrow_indices_and_16_bits():
    params = {"table": np.zeros((200, 2), jnp.bfloat16), "none": np.ones(2, np.float32)}

    def gradient(values, indices):
        rows = np.repeat(np.array(values, jnp.bfloat16)[:, None], 2, axis=1)
        return {"table": js.IndexedSlices(rows, np.int8(indices)), "none": None}

    parts = [
        gradient([256, 1], [5, -1]),
        gradient([1, 7], [5, 9]),
        gradient([1, 1], [5, 9]),
    ]
    add = js.optim.chain(js.sgd(1.0), js.optim.scale(-1.0))
    tx = js.optim.multi_steps(add, 3, parts[0], use_grad_mean=False)
    state, step = tx.init(params), fast_jit(tx.apply)
    for part in parts:
        params, state = step(part, state, params)
    # In 16 bits 256 + 1 + 1 is 256.
    wanted = np.zeros((200, 2))
    wanted[5], wanted[9] = 258, 8
    np.testing.assert_array_equal(params["table"], wanted)


def test_a_step_on_rows_that_did_not_catch_up_is_refused():
    tx = js.optim.multi_steps(OPTIMIZERS["exact"], 1, SHAPES)
    first = fast_jit(tx.update)
    _, state = first(grads_of(PARAMS, BATCHES[0]), tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"row 5 did its last step at 0"):
        tx.update(grads_of(PARAMS, BATCHES[1]), state, PARAMS)


def test_errors():
    make = js.optim.multi_steps
    with pytest.raises(TypeError, match=r"wants transformations \(.*, got 0.1"):
        make(0.1, 2, SHAPES)
    for k in (lambda step: 2, 2.0, True):
        with pytest.raises(TypeError, match=r"every_k_schedule=.*\): wanted an int of at"):
            make(js.sgd(0.1), k, SHAPES)
    with pytest.raises(ValueError, match=r"every_k_schedule=0\): wanted an int"):
        make(js.sgd(0.1), 0, SHAPES)
    tx = make(js.sgd(0.1), 2, SHAPES)
    state = tx.init(PARAMS)
    longer = jax.eval_shape(grad, PARAMS, np.arange(B + 1))
    wanted = r"float32\[4, 3\] at \['table'\], got slices of float32\[5, 3\]"
    with pytest.raises(ValueError, match=wanted):
        tx.update(longer, state, PARAMS)
    with pytest.raises(ValueError, match=r"made for .* at \['table'\], got None; make"):
        tx.update({"table": None, "w": PARAMS["w"]}, state, PARAMS)
    with pytest.raises(ValueError, match=r"got float32\[3\] in .*'w': \*"):
        tx.update({"w": PARAMS["w"]}, state, PARAMS)
    good = grads_of(PARAMS, BATCHES[0])
    rows = good["table"]
    other = js.IndexedSlices(rows.values, rows.indices, (V + 1, D))
    with pytest.raises(ValueError, match=r"slices of an array of shape \(12, 3\) where"):
        tx.update({**good, "table": other}, state, PARAMS)
    taller, wider = (
        {**PARAMS, "table": jnp.zeros(shape)} for shape in ((V + 1, D), (V, D + 1))
    )
    with pytest.raises(ValueError, match=r"shape \(11, 3\).* \(12, 3\)"):
        tx.update(good, tx.init(taller), taller)
    with pytest.raises(ValueError, match=r"tx.init got one of shape \(11, 4\)"):
        tx.init(wider)
    scaled = jax.tree.map(lambda x: jnp.zeros(x.shape), good)
    with pytest.raises(TypeError, match=r"not row numbers any more"):
        tx.update(scaled, state, PARAMS)
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), rows)
    with pytest.raises(ValueError, match=r"carries a batch axis from vmap"):
        make(js.sgd(0.1), 2, batch).init(PARAMS["table"])


def test_no_table_is_copied_of_an_exact_optimizer():
    """In a branch XLA copies what the log of steps waits for."""
    shapes = jax.ShapeDtypeStruct((100_000, 4), np.float32), jnp.zeros(2, jnp.int32)
    loss = lambda table, ids: (table[ids] ** 2).sum()  # noqa: E731
    grads = jax.eval_shape(js.grad(loss), *shapes)
    tx = js.optim.multi_steps(js.sgd(0.1, 0.9, untouched="exact"), 2, grads)
    state = jax.eval_shape(tx.init, shapes[0])
    args = shapes[0], state, shapes[1]
    jslices.testing.assert_in_place(js.train_step(loss, tx), *args, donate_argnums=(0, 1))
