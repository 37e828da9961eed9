"""Arrays into which no gradient comes: gradients without rows, and nothing is stepped."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, dense, fast_jit, slow_unless
from optimizers import FIRST, THREE, label, make

import jslices as js

V, D = 20, 2
RNG = np.random.default_rng(0)
SHAPES = {"a": (V, D), "b": (V, D), "wa": (D, D), "wb": (D, D)}
PARAMS = {k: RNG.normal(size=shape).astype(np.float32) for k, shape in SHAPES.items()}
PARAMS = jax.device_put(PARAMS | {"scale": np.float32(1.5)})
IDS = jax.device_put(np.array([3, 5, 3], np.int32))
stop = jax.lax.stop_gradient


def task(name):
    """A loss of one table and one weight, the others unused."""

    def loss(p, ids):
        return ((p[name][ids] @ p["w" + name]) ** 2).sum()

    return loss


TASK_A, TASK_B = task("a"), task("b")
grad_a, grad_b = (fast_jit(js.grad(f)) for f in (TASK_A, TASK_B))


FACTORED = ("adafactor", {"min_dim_size_to_factor": 1})
DECAYING = ("adamw", "lion")


def assert_same_bits(left, right):
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)),
        left,
        right,
    )


# --- what the gradients are --------------------------------------------------------------


def used_by_nobody(p, ids):
    return p["scale"] * 2


def stopped(p, ids):
    return (stop(p["a"])[ids] + stop(p["a"][ids])).sum() * p["scale"] + stop(p["wa"]).sum()


def of_no_ids(p, ids):
    return (p["a"][ids[:0]] @ p["wb"]).sum() * p["scale"]


def in_a_branch(p, ids):
    return jax.lax.cond(
        p["scale"] > 0, lambda: stop(p["a"]).sum() * p["scale"], lambda: p["scale"]
    )


def in_a_loop(p, ids):
    turn = lambda total, i: (total + stop(p["a"][i]).sum() * p["scale"], None)  # noqa: E731
    return jax.lax.scan(turn, 0.0, ids)[0]


@pytest.mark.parametrize(
    "loss", [used_by_nobody, stopped, of_no_ids, in_a_branch, in_a_loop]
)
def test_no_gradient_no_rows(loss):
    """With jit and without."""
    wanted = fast_jit(jax.grad(loss))(PARAMS, IDS)
    for grad in (fast_jit(js.grad(loss)), js.grad(loss)):
        grads = grad(PARAMS, IDS)
        for name in ("a", "b", "wa"):
            g = grads[name]
            assert js.is_slices(g) and g.values.shape == (0, D), name
            assert g.dense_shape == PARAMS[name].shape and g.dtype == PARAMS[name].dtype
        assert not js.is_slices(grads["scale"])
        assert_close(dense(grads), wanted)


@pytest.mark.parametrize("read", (stop, lambda x: x > 1), ids=("stopped", "truths"))
def test_tables_in_one_array(read):
    """Each turn of a loop gets one; AdamW would decay all rows of a dense gradient."""
    tables, tx = jnp.ones((2, 9, D)), js.adamw(0.1, weight_decay=0.1)

    def loss(tables, scale):
        total = lambda sum, table: (sum + scale * read(table[IDS]).sum(), None)  # noqa: E731
        return jax.lax.scan(total, 0.0, tables)[0]

    grads = js.grad(loss)(tables, 2.0)
    assert js.is_slices(grads) and not grads.values.size
    moved, _ = tx.apply(grads, tx.init(tables), tables)
    np.testing.assert_array_equal(moved, tables)


def test_vjp_and_tuples_of_arguments():
    rows, pull = js.vjp(lambda a, b: a[IDS], PARAMS["a"], PARAMS["b"])
    used, unused = pull(jnp.ones_like(rows))
    assert used.indices.shape == (3,) and unused.indices.shape == (0,)
    mapped = jax.vmap(js.grad(TASK_A), (None, 0))(PARAMS, jnp.stack([IDS, IDS]))
    assert mapped["b"].values.shape == (2, 0, D) and mapped["b"].indices.shape == (2, 0)


@pytest.mark.parametrize("sparse", [False, {"b": False}], ids=["all", "one"])
def test_sparse_false_gives_zeros(sparse):
    if isinstance(sparse, dict):
        sparse = {name: sparse.get(name) for name in PARAMS}
    grads = js.grad(TASK_A, sparse=sparse)(PARAMS, IDS)
    assert_same_bits(grads["b"], np.zeros((V, D)))
    assert js.is_slices(grads["wb"]) == isinstance(sparse, dict)


def test_explain_says_so():
    tx = js.adam(0.1)
    report = js.explain(TASK_A, optimizer=tx)(PARAMS, IDS)
    (leaf,) = (leaf for leaf in report.leaves if leaf.path == "p['b']")
    assert (leaf.kind, leaf.sparse_bytes, leaf.step_bytes) == ("unused", 0, 0)
    assert leaf.step is None
    assert "p['b']:\n  no gradient comes in: no rows, not stepped" in str(report)


# --- what becomes of them ----------------------------------------------------------------


@pytest.mark.parametrize(
    "name, kwargs",
    slow_unless(
        [FIRST[0], *THREE, FACTORED, *(case for case in FIRST if case[0] in DECAYING)],
        lambda case: case[0] not in DECAYING,
    ),
    ids=label,
)
def test_lazy_optimizers_move_no_bit(name, kwargs):
    tx = make(js, name, 0.1, kwargs)

    def run(params):
        both = lambda p, ids: TASK_A(p, ids) + TASK_B(p, ids) * p["scale"]  # noqa: E731
        params, state = tx.apply(js.grad(both)(params, IDS), tx.init(params), params)
        grads = js.grad(TASK_A)(params, IDS)
        updates, new = tx.update(grads, state, params)
        return (params, state), tx.apply(grads, state, params), (updates, new)

    before, after, (updates, new) = fast_jit(run)(PARAMS)
    moved = {path for path, _ in _changes(before, after)}
    assert not any(path.endswith(("['b']", "['wb']")) for path in moved)
    assert any(path.endswith("['a']") for path in moved)
    assert not any(path.endswith("['b']") for path, _ in _changes(before[1], new))
    assert updates["b"].indices.shape == (0,)


def _changes(before, after):
    old, new = (jax.tree_util.tree_leaves_with_path(x) for x in (before, after))
    for (path, x), (_, y) in zip(old, new, strict=True):
        if np.asarray(x).tobytes() != np.asarray(y).tobytes():
            yield jax.tree_util.keystr(path), y


@pytest.mark.slow
def test_exact_ones_catch_up():
    tx = js.lion(0.1, weight_decay=0.1, untouched="exact")
    other = optax.lion(0.1, weight_decay=0.1)
    tasks = [TASK_A, TASK_A, TASK_B, TASK_A, TASK_B, stopped]
    steps = {f: fast_jit(js.train_step(f, tx)) for f in set(tasks)}

    @fast_jit
    def densely(params, state, choice):
        grads = jax.lax.switch(
            choice, [lambda p, f=f: jax.grad(f)(p, IDS) for f in steps], params
        )
        updates, state = other.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mine, wanted = (PARAMS, tx.init(PARAMS)), (PARAMS, other.init(PARAMS))
    for f in tasks:
        *mine, _ = steps[f](*mine, IDS)
        wanted = densely(*wanted, list(steps).index(f))
    assert_close(tx.flush(*mine)[0], wanted[0], rtol=1e-4, atol=1e-5)


def test_lookup_ids_of_what_is_read_whole_not_at_all_or_behind_stop_gradient():
    rows = js.lookup_ids(TASK_A)(PARAMS, IDS)
    assert [rows[name] for name in ("b", "wa", "wb", "scale")] == [None] * 4
    np.testing.assert_array_equal(js.lookup_ids(stopped)(PARAMS, IDS)["a"], [3, 5, 3] * 2)
    tx = js.adam(0.1, untouched="exact")
    tx.catch_up(PARAMS, tx.init(PARAMS), jax.jit(js.lookup_ids(TASK_A))(PARAMS, IDS))


NAMES = {name: name for name in PARAMS} | {"wa": "w", "wb": "w"}
AROUND = {
    "from_optax": js.from_optax(optax.sgd(0.1, momentum=0.9)),
    "chain of clips": js.optim.chain(
        js.optim.clip_by_global_norm(1.0),
        js.optim.clip_by_block_rms(1.0),
        js.adam(0.1),
    ),
    "freeze_rows": js.optim.freeze_rows(
        js.adam(0.1), {n: (lambda rows: rows < 1) if n in "ab" else None for n in PARAMS}
    ),
    "partition": js.optim.partition(
        {
            "a": js.adam(0.1),
            "b": js.adam(0.1),
            "w": optax.adam(0.1),
            "scale": optax.sgd(1.0),
        },
        NAMES,
    ),
    "masked": js.optim.chain(
        js.optim.masked(optax.trace(0.9), {n: n in ("wa", "wb", "scale") for n in PARAMS}),
        js.sgd(0.1),
    ),
    "optax.chain": js.optim.chain(optax.identity(), js.sgd(0.1)),
}


@pytest.mark.parametrize("name", AROUND)
def test_around_a_step(name):
    tx = AROUND[name]

    def run(params):
        state = tx.init(params)
        params, state = tx.apply(js.grad(TASK_B)(params, IDS), state, params)
        return params, tx.apply(js.grad(TASK_A)(params, IDS), state, params)

    before, (after, _) = fast_jit(run)(PARAMS)
    assert_same_bits(before["b"], after["b"])
    assert not np.array_equal(before["a"], after["a"])
    if name == "partition":  # Optax's own gets zeros, and goes on by momentum
        assert not np.array_equal(before["wb"], after["wb"])


def test_sums_norms_and_buffers():
    @fast_jit
    def compute(params):
        one, two = js.grad(TASK_A)(params, IDS), js.grad(TASK_B)(params, IDS)
        return {
            "one": one,
            "sum": js.tree.map(operator.add, one, two),
            "norm": js.global_norm(one),
            "finite": (js.all_finite(one), js.all_finite(one["b"])),
            "mean": js.accumulate_gradients(
                lambda ids: js.grad(TASK_A)(params, ids), jnp.stack([IDS, IDS])
            ),
        }

    found = compute(PARAMS)
    wanted = fast_jit(jax.grad(lambda p: TASK_A(p, IDS) + TASK_B(p, IDS)))(PARAMS)
    assert js.is_slices(found["sum"]["a"]) and found["sum"]["a"].indices.shape == (3,)
    assert not js.is_slices(found["sum"]["wa"])
    assert_close(found["sum"], wanted)
    one = jax.device_get(jax.tree.leaves(dense(found["one"])))
    norm = np.sqrt(sum((x**2).sum() for x in one))
    np.testing.assert_allclose(found["norm"], norm, rtol=1e-5)
    assert all(found["finite"])
    assert_close(found["mean"], found["one"])
    assert found["mean"]["b"].indices.shape == (0,)


def test_multi_steps_of_two_tasks_by_turns():
    example = jax.eval_shape(
        lambda p: js.grad(lambda p, i: TASK_A(p, i) + TASK_B(p, i))(p, IDS), PARAMS
    )
    tx = js.optim.multi_steps(js.adam(0.1), 2, example, use_grad_mean=False)
    params, state = PARAMS, tx.init(PARAMS)
    step = fast_jit(tx.apply)
    for grad in (grad_a, grad_b):
        params, state = step(grad(params, IDS), state, params)
    alone = js.adam(0.1)

    @fast_jit
    def wanted(params):
        grads = js.grad(lambda p: TASK_A(p, IDS) + TASK_B(p, IDS))(params)
        return alone.apply(grads, alone.init(params), params)[0]

    assert_close(params, wanted(PARAMS))


def test_a_host_table():
    tx = js.adam(0.1)
    with js.HostTable((V, D), tx, init=1.0) as table:
        rows, places = table.fetch(np.array(IDS))
        values, state = rows.unpack()
        grads = js.grad(lambda t: stop(t)[places].sum())(values)
        table.store(rows.pack(*tx.apply(grads, state, values)))
        assert_same_bits(table.read(np.arange(V)), np.ones((V, D), np.float32))


def test_a_step_reads_and_writes_nothing_of_an_unused_table():
    tall = jax.ShapeDtypeStruct((10**6, 16), jnp.float32)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    params["b"] = tall
    tx = js.adam(0.1)

    def step(params, state, ids):
        return tx.apply(js.grad(TASK_A)(params, ids), state, params)

    state = jax.eval_shape(tx.init, params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, IDS).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 10**5
    cost = compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    assert cost["bytes accessed"] < 10**5


def test_plain_optax_is_told_what_to_type():
    tx = optax.adam(0.1)
    grads = grad_a(PARAMS, IDS)
    params = {name: PARAMS[name] for name in ("wa", "wb", "scale")}  # no table
    grads = {name: grads[name] for name in params}
    wanted = (
        r"\['wb'\].*sparse=False in jslices.grad gives zeros; type jslices.adam for optax"
    )
    with pytest.raises(ValueError, match=wanted):
        tx.update(grads, tx.init(params), params)
    zeros = js.grad(TASK_A, sparse=False)(PARAMS, IDS)
    updates, _ = fast_jit(tx.update)(zeros, tx.init(PARAMS))
    assert_same_bits(updates["b"], np.zeros((V, D)))
