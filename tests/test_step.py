"""How a step is planned, and that every plan gives the same rows."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import examples
from helpers import assert_close, fast_jit, numpy_dense, slow_unless
from hypothesis import given
from hypothesis import strategies as st
from optimizers import BY_ROW, KINDS, THREE, drawn, label, make, slices_of

import jslices as js
from jslices.optim.engine.step import Plan, choose_plan, execute

V, D, K, CHUNK = 10, 3, 24, 4
# All plans for these sizes: there are at most V distinct rows, so three chunks.
PLANS = {
    "together": Plan("together", K, V),
    "in chunks": Plan("in chunks", K, V, chunk=CHUNK),
    "all rows": Plan("all rows", K, V),
}
IDS = st.lists(st.integers(-2, V + 2), min_size=K, max_size=K)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Arithmetic for NumPy and for JAX, and the arrays that it reads and writes by rows."""

    step: object
    shapes: tuple = ()
    num_read: int = 0


def run(step, plan, indices, values, p, arrays):
    """``(indices, update, *new)`` of ``step(g, *p, *arrays)``, with state by position."""

    def kernel(g, p, state):
        arrays = [state[str(n)] for n in range(len(state))]
        update, *new = step(g, *([] if p is None else [p]), *arrays)
        return update, {str(n): x for n, x in enumerate(new)}

    state = {str(n): x for n, x in enumerate(arrays)}
    indices, update, new = execute(kernel, (V,), plan, indices, values, p, state)
    return indices, update, *(new[str(n)] for n in range(len(state)))


def _rms(g):
    """The root of the mean of squares of each row, ``[U, 1]``."""
    return (g * g).mean(-1, keepdims=True) ** 0.5


KERNELS = {
    "no state": Kernel(lambda g: (0.5 * g,)),
    "two state arrays": Kernel(
        lambda g, m, v: ((m + g) / (v + g * g + 1), m + g, v + g * g), ((V, D), (V, D))
    ),
    "reads the parameter": Kernel(lambda g, p, m: (g + m - p, m * p), ((V, D), (V, D)), 1),
    "a number a row": Kernel(
        lambda g, s: (g / (1 + s[:, None]), s + _rms(g)[:, 0]), ((V,),)
    ),
    "whole rows": Kernel(lambda g, p: (g * _rms(p) / (1 + _rms(g)),), ((V, D),), 1),
}


def arrays_of(kernel):
    rng = np.random.default_rng(0)
    return [rng.uniform(0.5, 1, shape).astype(np.float32) for shape in kernel.shapes]


@functools.cache
def compiled(name, plan):
    """``(indices, values, *arrays) -> (indices, update, *new)`` by that plan."""
    kernel = KERNELS[name]
    return fast_jit(
        lambda indices, values, *arrays: run(
            kernel.step,
            plan,
            indices,
            values,
            arrays[0] if kernel.num_read else None,
            arrays[kernel.num_read :],
        )
    )


def in_numpy(kernel, ids, values):
    """The dense update and the new arrays: named rows alone are stepped."""
    arrays = arrays_of(kernel)
    named = np.isin(np.arange(V), ids)
    update, *new = kernel.step(numpy_dense(values, ids, (V, D)), *arrays)
    old = np.zeros_like(update), *arrays[kernel.num_read :]
    pick = lambda new, old: np.where(named.reshape(-1, *[1] * (old.ndim - 1)), new, old)  # noqa: E731
    return [pick(*pair) for pair in zip((update, *new), old, strict=True)]


def values_of(ids):
    rng = np.random.default_rng(1)
    return rng.normal(size=(len(ids), D)).astype(np.float32)


def check_entries(indices, update, ids):
    """Each row is named once; the other entries are empty, and zero."""
    indices = np.asarray(indices)
    named = indices[(0 <= indices) & (indices < V)]
    assert sorted(named.tolist()) == sorted({i for i in ids if 0 <= i < V})
    assert (indices[indices != V] < V).all() and (indices >= 0).all()
    assert not np.asarray(update)[indices == V].any()


@pytest.mark.parametrize(
    "name, plan",
    # Without arrays there is nothing to read or write a chunk at a time.
    [
        (k, p)
        for k in KERNELS
        for p in PLANS.values()
        if (k, p.chunk) != ("no state", CHUNK)
    ],
    ids=lambda x: x if isinstance(x, str) else x.way,
)
@examples(12)
@given(ids=IDS)
def test_every_plan_is_the_plain_loop(name, plan, ids):
    """Duplicates, negative and out-of-range ids: as in NumPy, and the rest to the bit."""
    kernel, values = KERNELS[name], values_of(ids)
    indices, update, *new = compiled(name, plan)(
        np.array(ids, np.int32), values, *arrays_of(kernel)
    )
    check_entries(indices, update, ids)
    wanted, *wanted_arrays = in_numpy(kernel, ids, values)
    dense = numpy_dense(update, indices, (V, *update.shape[1:]))
    np.testing.assert_allclose(dense, wanted, rtol=1e-4, atol=1e-5)
    untouched = ~np.isin(np.arange(V), ids)
    for got, array in zip(new, wanted_arrays, strict=True):
        np.testing.assert_allclose(got, array, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(got)[untouched], array[untouched])


@given(ids=IDS)
def test_entries_that_are_not_summed_add_up_to_the_same(ids):
    values = values_of(ids)
    plan = Plan("together", K, K, sums=False)
    indices, update = compiled("no state", plan)(np.array(ids, np.int32), values)
    assert indices.tolist() == [i if 0 <= i < V else V for i in ids]
    assert not np.asarray(update)[np.asarray(indices) == V].any()
    dense = numpy_dense(update, indices, (V, D))
    np.testing.assert_allclose(
        dense, 0.5 * numpy_dense(values, ids, (V, D)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("dtype", [np.int8, np.uint16])
def test_indices_of_any_integer_dtype(plan, dtype):
    ids = np.arange(K) % (V + 2)
    results = compiled("two state arrays", plan)(
        ids.astype(dtype), values_of(ids), *arrays_of(KERNELS["two state arrays"])
    )
    wanted = in_numpy(KERNELS["two state arrays"], ids, values_of(ids))
    for got, array in zip(results[2:], wanted[1:], strict=True):
        np.testing.assert_allclose(got, array, rtol=1e-5)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_dtypes_of_the_arrays_are_kept(plan):
    """bfloat16 values and state next to float32 arithmetic."""
    kernel = lambda g, m: (g.astype(jnp.float32) + m, m + g.astype(jnp.float32))  # noqa: E731
    ids = np.arange(K, dtype=np.int32) % 4
    values, m = np.ones((K, D), jnp.bfloat16), np.ones((V, D), jnp.bfloat16)
    step = fast_jit(lambda *x: run(kernel, plan, *x[:2], None, x[2:]))
    _, update, new = step(ids, values, m)
    assert (update.dtype, new.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(new)[:, 0], [7] * 4 + [1] * 6)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("bad", [np.inf, np.nan, -np.inf])
def test_what_is_not_finite_stays_in_its_row(plan, bad):
    ids = np.array([3, 7] * (K // 2), np.int32)
    values = values_of(ids)
    values[3] = bad
    kernel = KERNELS["two state arrays"]
    step = compiled("two state arrays", plan)
    indices, update, *new = step(ids, values, *arrays_of(kernel))
    dense = numpy_dense(update, indices, (V, D))
    assert not np.isfinite(dense[7]).all()
    for array in (dense, *new):
        assert np.isfinite(np.delete(array, 7, 0)).all()


@pytest.mark.parametrize(
    "kernel",
    [
        lambda g, a, b: (g, a, b + g),  # a state array stays as it was
        lambda g, a, b: (a + g, a + g, a + g),
        lambda g, a, b: (g * 2, b, a),
        lambda g, a, b: (lambda c: (c, b * c, c))(a + g),  # the update is also state
        lambda g, a, b: (lambda c: (c, c, c))(jnp.sin(g + a * b)),
        lambda g, a, b: (a * 0 + jnp.nan, g / 0 * 0, jnp.where(g > 1, b, jnp.inf)),
    ],
)
def test_a_pass_over_all_rows_keeps_those_without_a_gradient(kernel):
    a = np.arange(40, dtype=np.float32).reshape(V, 4)
    b, rows = 7 - a, np.ones((5, 4), np.float32)
    ids = np.array([1, 4, 4, V, 1], np.int32)
    named = np.isin(np.arange(V), ids)[:, None]

    @fast_jit
    def both(rows, dense, a, b):
        stepped = run(kernel, Plan("all rows", 5, V), ids, rows, None, (a, b))
        return stepped, kernel(dense, a, b)

    (indices, *new), wanted = both(rows, numpy_dense(rows, ids, (V, 4)), a, b)
    check_entries(indices, new[0], [1, 4])
    for got, each, old in zip(new, wanted, (0 * a, a, b), strict=True):
        np.testing.assert_allclose(got, np.where(named, each, old), rtol=1e-6)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_state_that_a_kernel_does_not_return_stays(plan):
    ids = np.arange(K, dtype=np.int32) % 4
    a, b = np.ones((V, D), np.float32), np.full((V, D), 2, np.float32)
    step = fast_jit(lambda *x: run(lambda g, a, b: (b, a + g), plan, *x[:2], None, x[2:]))
    _, update, new_a, same_b = step(ids, np.ones((K, D), np.float32), a, b)
    assert np.asarray(update).sum() == 4 * D * 2
    np.testing.assert_array_equal(new_a[:, 0], [7] * 4 + [1] * 6)
    np.testing.assert_array_equal(same_b, b)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_derivatives_by_what_a_kernel_closes_over_and_by_rows(plan):
    """Of any plan, forward and reverse: a learned learning rate, and learned gradients."""
    rng = np.random.default_rng(6)
    ids = rng.integers(-2, V + 2, K).astype(np.int32)
    values, m = values_of(ids), rng.uniform(size=(V, D)).astype(np.float32)

    def after(rate, values, m):
        kernel = lambda g, m: (rate * g / (1 + m), m + rate * g * g)  # noqa: E731
        indices, update, new = run(kernel, plan, ids, values, None, [m])
        return (jnp.zeros((V, D)).at[indices].add(update, mode="drop") * new).sum()

    def wanted(rate, values, m):
        g = jnp.zeros((V + 1, D)).at[jnp.where(ids < 0, V, ids)].add(values, mode="drop")
        return (rate * g[:V] / (1 + m) * (m + rate * g[:V] ** 2)).sum()

    @fast_jit
    def derivatives(*at):
        ways = jax.jacrev, jax.jacfwd
        return [[way(f, (0, 1, 2))(*at) for way in ways] for f in (after, wanted)]

    assert_close(*derivatives(0.1, values, m), rtol=1e-4, atol=1e-5)


# Every optimizer, by sizes that give the way.
SIZES = {"in chunks": (20_000, 80, 5_000), "all rows": (300, 3, 600)}


@functools.cache
def sizes_of(way):
    """A table, history, and slices whose plan takes that way."""
    num_rows, dim, count = SIZES[way]
    rng = np.random.default_rng(0)
    ids = (num_rows * rng.random(count) ** 2).astype(np.int32)  # some are named often
    ids[::50] = rng.choice([-1, num_rows, num_rows + 7], len(ids[::50]))  # some are no rows
    table, history = drawn(rng, (num_rows, dim)), drawn(rng, (num_rows, dim))
    grads = slices_of(rng, ids, table.shape)
    assert choose_plan(grads, [table]).way == way
    return table, history, grads


@pytest.mark.parametrize(
    "name, kwargs, way",
    slow_unless(
        [(*case, way) for case in [*KINDS, THREE[0]] for way in SIZES],
        lambda case: (case[0], case[2]) == ("adafactor", "all rows"),
    ),
    ids=label,
)
def test_every_optimizer_steps_rows_as_whole_arrays(name, kwargs, way):
    """``update`` and ``apply``, against the optimizer itself on the dense gradient."""
    table, history, grads = sizes_of(way)
    tx = make(js, name, 0.1, kwargs)
    _, state = tx.update(history, tx.init(table), table)

    @fast_jit
    def both(grads, state, table):
        updates, new = tx.update(grads, state, table)
        return (js.apply_updates(table, updates), new), tx.apply(grads, state, table)

    results = both(grads, state, table)
    wanted = dense_step(tx, (name, kwargs) in BY_ROW, grads.to_dense(), state, table)
    named = np.isin(np.arange(len(table)), grads.indices)
    plain_sgd = (name, kwargs) == ("sgd", {})
    for got in results:
        for new, each, old in zip(
            *map(jax.tree.leaves, (got, wanted, (table, state))), strict=True
        ):
            if old.shape[:1] != table.shape[:1]:
                continue
            rows = named.reshape(-1, *[1] * (old.ndim - 1))
            np.testing.assert_allclose(new, np.where(rows, each, old), rtol=2e-5, atol=2e-6)
            if not plain_sgd:  # which adds each entry to the rows as they are
                np.testing.assert_array_equal(new[~named], old[~named])


def dense_step(tx, by_row, grads, state, table):
    update = tx.update
    if by_row:  # norms and means are those of a row
        axes = jax.tree.map(lambda x: 0 if x.shape[:1] == table.shape[:1] else None, state)
        update = fast_jit(jax.vmap(tx.update, (0, axes, 0), (0, axes)))
    updates, state = update(grads, state, table)
    return table + updates, state


def shapes_of(num_rows, dim, count, dtype=jnp.float32):
    values = jax.ShapeDtypeStruct((count, dim), dtype)
    indices = jax.ShapeDtypeStruct((count,), jnp.int32)
    grad = js.IndexedSlices(values, indices, (num_rows, dim))
    return grad, [jax.ShapeDtypeStruct((num_rows, dim), dtype)]


@pytest.mark.parametrize(
    "num_rows, dim, count, way",
    [
        (1_000, 16, 100, "together"),  # few
        (1_000, 16, 600, "all rows"),  # half of the table
        (100_000, 4, 5_000, "together"),  # many, but short
        (100_000, 16, 26_000, "in chunks"),
        (100_000, 16, 27_000, "all rows"),
        (100_000, 64, 15_000, "in chunks"),
        (1_000_000, 16, 300_000, "in chunks"),  # a large table
        (1_000_000, 64, 100_000, "in chunks"),
        (100_000, 64, 200_000, "all rows"),
    ],
)
def test_the_way_follows_from_the_shapes(num_rows, dim, count, way):
    plan = choose_plan(*shapes_of(num_rows, dim, count))
    assert (plan.way, plan.sums, plan.entries) == (way, True, count)
    assert plan.capacity == (num_rows if way == "all rows" else min(count, num_rows))
    assert (plan.chunk is not None) == (way == "in chunks")
    # Elsewhere a loop over chunks would only launch more kernels.
    other = choose_plan(*shapes_of(num_rows, dim, count), "gpu")
    assert other.way == ("all rows" if way == "all rows" else "together")


@pytest.mark.parametrize("count, sums", [(511, True), (512, False), (100_000, False)])
def test_a_linear_rule_without_state_adds_each_entry_by_itself(count, sums):
    grad = shapes_of(10**6, 64, count)[0]
    plan = choose_plan(grad, [], linear=True)
    assert (plan.way, plan.sums) == ("together", sums)
    assert choose_plan(grad, [], "gpu", linear=True) == plan
    # Not with state, nor in 16 bits, which would round each time.
    assert choose_plan(*shapes_of(10**6, 64, count), linear=True).sums
    narrow = shapes_of(10**6, 64, count, jnp.bfloat16)[0]
    assert choose_plan(narrow, [], linear=True).sums


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(5, 80), (15_000, 2), (100_000, 80)], ids=str)
def test_sgd_of_many_entries_is_compiled_for_all_platforms(shape, dtype):
    """An update has one shape, whatever each platform does."""
    grads = js.IndexedSlices(
        jax.ShapeDtypeStruct((20_000, shape[1]), dtype),
        jax.ShapeDtypeStruct((20_000,), jnp.int32),
        shape,
    )
    updates, _ = jax.eval_shape(js.sgd(0.1).update, grads, js.sgd(0.1).init(jnp.ones(2)))
    assert updates.values.dtype == dtype and updates.dense_shape == shape
    assert updates.values.shape[1:] == shape[1:]


def test_without_duplicates_nothing_is_summed():
    plan = choose_plan(*shapes_of(1_000, 16, 600), unique=True)
    assert (plan.way, plan.sums, plan.capacity) == ("together", False, 600)


def test_a_plan_says_what_it_does_and_why():
    plan = choose_plan(*shapes_of(100_000, 64, 15_000))
    for part in ("15,000 entries", f"in chunks of {plan.chunk}", "duplicates summed first"):
        assert part in str(plan)
    assert plan.why and str(plan).endswith(plan.why)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.way = "together"


@pytest.mark.parametrize(
    "length, rows, entries_per_row",
    [
        *((1, 10**5, 0.27 / 8), (4, 10**6, 0.27 / 2), (8, 10**6, 0.27), (256, 10**4, 0.27)),
        *((16, 10**6, 1 / 3), (32, 10**6, 2 / 3), (256, 10**5, 1.34), (256, 10**6, 1.34)),
    ],
)
def test_how_many_entries_are_enough_for_all_rows(length, rows, entries_per_row):
    enough = int(np.ceil(rows * min(entries_per_row, 2)))
    ways = [
        choose_plan(*shapes_of(rows, length, count)).way == "all rows"
        for count in (enough - 2, enough + 2)
    ]
    assert ways == [False, True] or length == 256


@pytest.mark.parametrize("num_rows", [20, 100_000])
def test_a_cond_may_choose_between_an_update_and_zeros(num_rows):
    rows = np.ones((20, 2), np.float32)
    grads = js.IndexedSlices(rows, np.arange(20) % 7, (num_rows, 2))
    params, tx = np.zeros((num_rows, 2), np.float32), js.adam(0.5)

    @fast_jit
    def step(params, keep):
        updates, _ = tx.update(grads, tx.init(params), params)
        zeros = jnp.zeros_like(updates.values)
        none = js.IndexedSlices(zeros, updates.indices, updates.dense_shape)
        updates = jax.lax.cond(keep, lambda: updates, lambda: none)
        return js.apply_updates(params, updates)

    first = np.asarray(step(params, True))[:8]
    np.testing.assert_allclose(first, [[-0.5] * 2] * 7 + [[0] * 2], 1e-5)
    assert not np.asarray(step(params, False)).any()


def test_updates_of_all_rows_are_slices_like_others():
    rows = np.ones((600, 2), np.float32)
    grads = js.IndexedSlices(rows, np.arange(600) % 7, (1000, 2))
    tx, params = js.adam(0.5), np.zeros((1000, 2), np.float32)
    updates, _ = fast_jit(tx.update)(grads, tx.init(params), params)
    assert type(updates) is js.IndexedSlices

    @fast_jit
    def added(params, updates):
        return (
            js.apply_updates(params, updates),
            optax.apply_updates(params, updates),
            js.apply_updates(params, updates.coalesce()),
            params + updates,
            (params - updates * 2) / -2,
        )

    wanted = np.where(np.arange(1000)[:, None] < 7, -0.5, params)
    for new in added(params, updates):
        np.testing.assert_allclose(new, wanted, rtol=1e-5, atol=1e-7)


def test_many_entries_of_sgd_stay_as_they_are():
    ids = np.repeat([1, -1, 2], 300)
    values = np.where(ids[:, None] < 0, np.nan, np.ones((900, 2), np.float32))
    tx = js.sgd(0.5)
    update = fast_jit(tx.update)
    tall = js.IndexedSlices(values, ids, (500, 2))
    short, state = np.zeros((5, 2), np.float32), tx.init(np.zeros((5, 2), np.float32))
    updates, _ = update(tall, state)
    assert updates.values.shape == (900, 2)
    assert not np.asarray(updates.values)[300:600].any()
    first = numpy_dense(updates.values, updates.indices, (500, 2))[:5, 0]
    np.testing.assert_array_equal(first, [0, -150, -150, 0, 0])
    # Short rows, each named many times: the dense sum.
    grads = js.IndexedSlices(values, ids, (5, 2))
    updates, _ = update(grads, state)
    assert updates.indices.tolist() == [5, 1, 2, *[5] * 897]
    np.testing.assert_array_equal(np.asarray(updates.values)[:4, 0], [0, -150, -150, 0])
    for params in (jax.device_put(short), short):
        stepped = np.asarray(js.apply_updates(params, updates))
        np.testing.assert_array_equal(stepped[:, 0], [0, -150, -150, 0, 0])
    # 16 bits would round at each addition, so there they are summed first.
    narrow = js.IndexedSlices(values.astype(jnp.bfloat16), ids, (5, 2))
    updates, _ = update(narrow, state)
    assert sorted(updates.indices.tolist()) == [1, 2, *[5] * 898]


def test_a_profile_tells_reads_and_the_way_of_a_step():
    table, ids = np.ones((50, 4), np.float32), np.arange(7, dtype=np.int32)
    step = fast_jit(js.train_step(lambda t, ids: (t[ids] ** 2).sum(), js.adam(0.1)))
    text = step.lower(table, js.adam(0.1).init(table), ids).compile().as_text()
    names = set(re.findall(r'op_name="([^"]*)"', text))
    for part in ("(read 7 rows)/", "/step 7 entries together/"):
        assert any(part in name for name in names)
