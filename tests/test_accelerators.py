"""What a compiled step does on TPUs and GPUs: copies, memory, kernels, order of additions.

Nothing is run; the bounds are those of the release of JAX that CI compiles with. CI takes
a case of each kind, ``python -m pytest -m devices`` all.
"""

import functools
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import cost_on, needs_device, slow_unless

import jslices as js
from jslices import dynamic
from jslices._proof.cost import cost_of
from jslices._proof.targets import target
from jslices.retrieval import top_k

V, K = 1_000_000, 2_000  # with more ids compilers take longer
#: With few XLA lays short rows that are written twice out by columns, and copies the table.
MANY = 10_000
S = jax.ShapeDtypeStruct
pytestmark = [
    pytest.mark.devices,
    pytest.mark.filterwarnings("ignore:the table.* has rows of 16 numbers"),
]


def training(tx, value_and_grad=js.value_and_grad, apply=False, clip=None):
    """A step with a small dense layer in the loss, where there is one."""

    def loss(params, ids):
        rows = params["table"][ids].reshape(ids.size, -1).astype(jnp.float32)
        if "w" not in params:
            return jnp.mean(jnp.tanh(rows) ** 2)
        return jnp.mean((rows @ params["w"] - 1) ** 2)

    if getattr(tx, "catches_up", False):
        return js.train_step(loss, tx)

    def step(params, state, ids):
        value, grads = value_and_grad(loss)(params, ids)
        if clip is not None:
            grads, _ = js.clip_by_global_norm(grads, clip)
        if apply:
            return *tx.apply(grads, state, params), value
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state, value

    return step


def arguments(tx, row, dtype=jnp.float32, layer=False, ids=K):
    params = {"table": S((V, *row), dtype)}
    if layer:
        params["w"] = S(row, dtype)
    return params, jax.eval_shape(tx.init, params), S((ids,), jnp.int32)


@functools.cache
def dense_cost(device, name, row, dtype, ids=K):
    tx = getattr(optax, name)(0.1)
    args = arguments(tx, row, dtype, ids=ids)
    return cost_on(device, training(tx, jax.value_and_grad), *args, donate_argnums=(0, 1))


def row_cost(device, tx, row, dtype=jnp.float32, layer=False, ids=K, **how):
    *kept, ids = arguments(tx, row, dtype, layer, ids)
    args = *js.row_major(tuple(kept)), ids
    return cost_on(device, training(tx, **how), *args, donate_argnums=(0, 1))


ROWS = [(16,), (48,), (64,), (100,), (128,), (200,), (256,), (300,), (8, 64)]


@pytest.mark.parametrize(
    "device, row, dtype",
    slow_unless(
        [
            *(("v5e", row, dtype) for row in ROWS for dtype in (jnp.float32, jnp.bfloat16)),
            *(("v6e", row, jnp.float32) for row in [(16,), (64,), (300,), (8, 64)]),
            ("v6e", (200,), jnp.bfloat16),
        ],
        [("v5e", (16,), jnp.float32), ("v6e", (64,), jnp.float32)].__contains__,
    ),
    ids=str,
)
def test_tpus_copy_no_table_whatever_the_length_of_its_rows(device, row, dtype):
    cost = row_cost(device, js.adam(0.1), row, dtype)
    assert cost.copies == 0
    dense = dense_cost(device, "adam", row, dtype)
    assert cost.accessed_bytes <= dense.accessed_bytes / 4
    if device == "v5e":  # elsewhere XLA takes tables that are gathered from for read whole
        assert cost.xla_accessed_bytes <= dense.xla_accessed_bytes / 4


LAZY = {
    "sgd": {},
    "sgd with momentum": {"momentum": 0.9},
    "adagrad": {},
    "rowwise_adagrad": {},
    "adamw": {},
    "partial_rowwise_adam": {},
    "amsgrad": {},
    "rmsprop": {},
    "adadelta": {},
    "ftrl": {},
    "proximal_adagrad": {},
    "lion": {},
    "lamb": {},
    "adafactor": {},
}


@pytest.mark.parametrize(
    ["name"],
    slow_unless(
        [(name,) for name in LAZY],
        lambda case: case == ("adafactor",),
    ),
)
def test_no_optimizer_copies_a_table_on_a_tpu(name):
    needs_device("v5e")
    tx = getattr(js, name.split()[0])(0.1, **LAZY[name])
    cost = row_cost("v5e", tx, (64,), apply=name.startswith("a"))
    assert cost.copies == 0
    limit = dense_cost("v5e", "adam", (64,), jnp.float32).xla_accessed_bytes / 4
    assert cost.xla_accessed_bytes <= limit


EXACT = [
    ("sgd", {"momentum": 0.9}),
    ("adam", {}),
    ("adamw", {}),
    ("partial_rowwise_adam", {}),
    ("amsgrad", {}),
    ("rmsprop", {}),
    ("adadelta", {}),
    ("proximal_adagrad", {}),
    ("lion", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, more", EXACT, ids=str)
def test_no_exact_optimizer_copies_a_table_on_a_tpu(name, more):
    needs_device("v5e")
    tx = getattr(js, name)(0.1, untouched="exact", **more)
    cost = row_cost("v5e", tx, (64,))
    assert cost.copies == 0 and cost.temp_bytes < 12e6
    dense = dense_cost("v5e", "adam", (64,), jnp.float32)
    assert cost.accessed_bytes <= dense.accessed_bytes / 12
    if (
        name != "lion"
    ):  # of which XLA counts a branch for rows that wait for thousands of steps
        assert cost.xla_accessed_bytes <= dense.xla_accessed_bytes * 0.43


@pytest.mark.parametrize(
    "device, dim",
    slow_unless([("v5e", 64), ("v5e", 128), ("h100", 128)], [("v5e", 128)].__contains__),
)
def test_an_exact_step_reads_and_writes_its_state_once(device, dim):
    """On a TPU its rows as well, and there XLA fetches the last steps of all rows."""
    lazy, exact = (
        row_cost(device, js.adam(0.1, untouched=untouched), (dim,), layer=True)
        for untouched in ("lazy", "exact")
    )
    most = 2.2 if device == "v5e" else 1.5
    assert exact.accessed_bytes <= most * lazy.accessed_bytes
    assert exact.copies == lazy.copies == 0


@pytest.mark.parametrize(
    "device, dim, ids",
    slow_unless(
        [("v5e", dim, ids) for dim in (8, 16, 48) for ids in (1_000, K)] + [("v6e", 16, K)],
        [("v5e", 16, 1_000)].__contains__,
    ),
)
def test_no_exact_step_of_short_rows_copies_a_table_on_a_tpu(device, dim, ids):
    """Were rows written when they catch up, and then stepped, XLA would copy the table."""
    cost = row_cost(device, js.adam(0.1, untouched="exact"), (dim,), ids=ids)
    dense = dense_cost(device, "adam", (dim,), jnp.float32, ids=ids)
    assert cost.copies == 0 and cost.accessed_bytes <= dense.accessed_bytes / 7
    if device == "v5e":  # elsewhere tables that are gathered from count as read whole
        assert cost.seconds <= dense.seconds / 3


@pytest.mark.slow
def test_a_schedule_keeps_vectors_that_no_tpu_pads():
    tx = js.adamw(optax.linear_schedule(0.1, 0.0, 9), untouched="exact")
    cost = row_cost("v5e", tx, (128,))
    assert cost.copies == 0
    state = jax.eval_shape(tx.init, {"table": S((V, 128), jnp.float32)})
    by_row = [x for x in jax.tree.leaves(state) if x.shape[:1] == (V,)]
    assert {x.shape for x in by_row} == {(V,), (V, 128)}
    assert cost.argument_bytes < 1.01 * sum(x.size * 4 for x in by_row) + V * 128 * 4


def test_what_a_step_returns_is_row_major():
    needs_device("v5e")
    tx = js.adam(0.1)
    args = target("v5e").place(arguments(tx, (64,)))  # by columns, as a TPU prefers
    with jax.default_device(target("v5e").devices[0]):
        lowered = jax.jit(training(tx)).lower(*args)
    params, state, _ = lowered.compile().output_formats
    for x in (params["table"], state.mu["table"], state.nu["table"]):
        assert x.layout.major_to_minor == (0, 1)


@pytest.mark.parametrize("untouched, dim", [("lazy", 16), ("exact", 64)])
def test_the_types_of_arrays_on_a_mesh_suffice_to_compile_for_its_tpus(untouched, dim):
    needs_device("v5e:2x2")
    tx, mesh = js.adam(0.1, untouched=untouched), target("v5e:2x2").mesh
    by_rows = jax.NamedSharding(mesh, jax.P(*mesh.axis_names))

    def placed(x):
        where = by_rows if x.size >= K else jax.NamedSharding(mesh, jax.P())
        return S(x.shape, x.dtype, sharding=where)

    args = js.row_major(jax.tree.map(placed, arguments(tx, (dim,))))
    loss = lambda params, ids: jnp.mean(jnp.tanh(params["table"][ids]) ** 2)  # noqa: E731
    step = js.train_step(loss, tx, exchange=js.Exchange(*mesh.axis_names))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
    assert cost_of(compiled).copies == 0
    params, state, _ = compiled.output_formats
    for x in (params["table"], state.mu["table"], state.nu["table"]):
        assert x.layout.major_to_minor == (0, 1)


WRAPPED = {
    "chain": js.optim.chain(js.optim.clip_by_global_norm(1.0), js.adam(0.1)),
    "masked": js.optim.masked(js.adam(0.1), {"table": True, "w": False}),
    "freeze_rows": js.optim.freeze_rows(
        js.adam(0.1), {"table": lambda r: r < 9, "w": None}
    ),
    "from_optax": js.optim.from_optax(optax.adam(0.1)),
    "exact": js.optim.chain(
        js.optim.clip_by_global_norm(1.0), js.adam(0.1, untouched="exact")
    ),
    "frozen and exact": js.optim.freeze_rows(
        js.adam(0.1, untouched="exact"), {"table": lambda r: r < 9, "w": None}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_what_stands_round_an_optimizer_copies_no_table_on_a_tpu(name):
    cost = row_cost("v5e", WRAPPED[name], (16,) if "frozen" in name else (64,), layer=True)
    assert cost.copies == 0


@pytest.mark.parametrize(
    "dim, count", slow_unless([(16, MANY), (64, K)], lambda case: case == (64, K))
)
def test_loops_and_scatters_copy_no_table_on_a_tpu(dim, count):
    tx = js.adam(0.1)
    *kept, ids = arguments(tx, (dim,), ids=count)
    args = *js.row_major(tuple(kept)), S((10, count), jnp.int32)

    def steps(params, state, ids):
        body = lambda carry, ids: (training(tx)(*carry, ids)[:2], None)  # noqa: E731
        return js.row_major(jax.lax.scan(body, (params, state), ids)[0])

    assert cost_on("v5e", steps, *args, donate_argnums=(0, 1)).copies == 0
    table = js.row_major(S((V, dim), jnp.float32))
    for scatter in (js.scatter_add, js.scatter_update, js.scatter_max):
        write = lambda table, ids, f=scatter: f(table, ids, jnp.ones((count, dim)))  # noqa: E731
        assert cost_on("v5e", write, table, ids, donate_argnums=0).copies == 0


@pytest.mark.slow
@pytest.mark.parametrize("name, most", [("sgd", 16), ("adagrad", 18)])
def test_kernels_of_a_gpu(name, most):
    cost = row_cost("h100", getattr(js, name)(0.1), (64,), layer=True)
    assert cost.copies == 0 and count(cost) <= most
    assert cost.temp_bytes <= 4.5 * K * 64 * 4


def test_kernels_of_adam_on_a_gpu():
    row = functools.partial(row_cost, "h100", row=(64,), layer=True)
    lazy, exact = row(js.adam(0.1)), row(js.adam(0.1, untouched="exact"))
    assert lazy.copies == 0 and count(lazy) <= 18
    assert lazy.temp_bytes <= 4.5 * K * 64 * 4
    # Rows in turn, the log, and values of a gradient that wait for what is returned.
    assert exact.copies == 0 and count(exact) <= 32
    assert exact.accessed_bytes <= 1.55 * lazy.accessed_bytes


@pytest.mark.slow
def test_dense_arrays_beside_a_table_on_a_gpu():
    """Six of them take at most eight kernels more, not a few each."""

    def kernels(arrays):
        params = {str(i): S((64, 32), jnp.float32) for i in range(arrays)}
        params = js.row_major({"table": S((V, 64), jnp.float32), **params})
        tx = js.adam(0.1, untouched="exact")
        state = js.row_major(jax.eval_shape(tx.init, params))

        def loss(params, ids):
            rest = sum((params[str(i)] ** 2).sum() for i in range(arrays))
            return jnp.tanh(params["table"][ids]).sum() + rest

        args = params, state, S((K,), jnp.int32)
        return count(cost_on("h100", js.train_step(loss, tx), *args, donate_argnums=(0, 1)))

    assert kernels(6) <= kernels(0) + 8


#: What a loss ``(value, aux)`` returns or reads besides, of a table, ids and other ids.
AROUND = {
    "the loss alone": lambda t, i, o: ((jnp.tanh(t[i]) ** 2).mean(), None),
    "a linear loss": lambda t, i, o: (t[i].sum(), None),
    "the greatest of its rows": lambda t, i, o: (
        (jnp.tanh(t[i]) ** 2).mean(),
        jnp.abs(t[i]).max(),
    ),
    "rows": lambda t, i, o: ((jnp.tanh(t[i]) ** 2).mean(), (t[o], t[7])),
    "targets": lambda t, i, o: (((t[i] - jax.lax.stop_gradient(t)[o]) ** 2).mean(), None),
    "dots": lambda t, i, o: ((t[i] * t[o]).sum(), t[i].mean(0)),
}


@functools.cache
def cost_around(device, name, untouched):
    tx = js.adam(0.1, untouched=untouched)
    step = js.train_step(AROUND[name], tx, has_aux=True)
    table = js.row_major(S((V, 128), jnp.float32))
    state = js.row_major(jax.eval_shape(tx.init, table))
    ids = S((K,), jnp.int32)
    return cost_on(device, step, table, state, ids, ids, donate_argnums=(0, 1))


@pytest.mark.parametrize(
    ["device", "untouched", "name"],
    slow_unless(
        itertools.product(["h100", "v5e"], ["lazy", "exact"], AROUND),
        lambda case: case in {("h100", "lazy", "a linear loss"), ("v5e", "exact", "rows")},
    ),
)
def test_what_a_loss_returns_or_reads_copies_no_table(device, untouched, name):
    cost = cost_around(device, name, untouched)
    assert cost.copies == 0 and cost.temp_bytes < 16e6
    if name in ("a linear loss", "the greatest of its rows") and untouched == "lazy":
        if device == "h100":  # a kernel for what is returned
            assert count(cost) <= count(cost_around(device, "the loss alone", "lazy")) + 1


def test_a_gpu_does_not_copy_the_steps_of_all_rows_for_a_few_ids():
    needs_device("h100")
    momentum = js.sgd(0.1, momentum=0.9, untouched="exact")
    args = arguments(momentum, (16,), layer=True, ids=20)
    step, how = training(momentum), {"donate_argnums": (0, 1), "device": "h100"}
    js.testing.assert_in_place(step, *args, **how)


@pytest.mark.slow
def test_kernels_of_clipped_gradients_and_of_bags_on_a_gpu():
    adam = js.adam(0.1)
    clipped = row_cost("h100", adam, (64,), layer=True, clip=1.0)
    assert clipped.copies == 0 and count(clipped) <= 24

    def bags(table, state, ids):
        def loss(table):
            bags = js.embedding_lookup_sparse(table, ids, None, combiner="mean")
            return jnp.mean(jnp.tanh(bags) ** 2)

        return adam.apply(js.grad(loss)(table), state, table)

    table = S((V, 64), jnp.float32)
    args = table, jax.eval_shape(adam.init, table), S((K // 10, 10), jnp.int32)
    cost = cost_on("h100", bags, *args, donate_argnums=(0, 1))
    assert cost.copies == 0 and count(cost) <= 20


@pytest.mark.parametrize("device", ["v5e", "h100"])
def test_a_map_of_ids_copies_no_table_and_is_not_padded(device):
    tx, row = js.adam(0.1), (64,)
    map_ = jax.eval_shape(lambda: dynamic.id_map(V))
    params = {"table": S((map_.num_rows, *row), jnp.float32)}
    params, state = js.row_major((params, jax.eval_shape(tx.init, params)))
    batch = dynamic.WideIds(S((K,), jnp.uint32), S((K,), jnp.uint32))

    def step(ids, params, state, batch):
        ids, out = ids.admit(batch)
        new = {"table": out.fresh}, {"table": 0.0}
        params, state = js.checkpoint.reset_rows(tx, params, state, *new)
        return ids, *training(tx)(params, state, out.rows)

    cost = cost_on(device, step, map_, params, state, batch, donate_argnums=(0, 1, 2))
    alone = row_cost(device, tx, row)
    assert cost.copies == 0 and cost.temp_bytes <= 4.5 * K * 64 * 4
    assert cost.argument_bytes - alone.argument_bytes <= 2 * 12 * V
    if device == "h100":
        assert count(cost) - count(alone) <= 28


def count(cost):
    return sum(cost.kernels.values())


def float_additions(text):
    """The scatters of floats, as they are written, whose places need not be distinct."""
    found = re.findall(r"= \(?(?:f|bf)\d+\[.* scatter\(.*", text)
    return [line for line in found if "unique_indices=true" not in line]


@pytest.mark.parametrize(
    "device, name, ids, rows",
    slow_unless(
        [
            (device, *step, rows)
            for device in ("v5e", "h100")
            for step in [("sgd", K), ("adam", 300), ("adam", K), ("adafactor", K)]
            for rows in (V, K)
        ],
        [
            ("v5e", "sgd", K, K),
            ("h100", "adam", K, V),
        ].__contains__,
    ),
)
def test_no_two_additions_race(device, name, ids, rows):
    """As many ids as rows: all rows are stepped, or every entry by itself."""
    needs_device(device)
    tx = getattr(js, name)(0.1)
    table = js.row_major(S((rows, 16), jnp.float32))
    args = table, js.row_major(jax.eval_shape(tx.init, table)), S((ids,), jnp.int32)

    def step(table, state, ids):
        grads = js.grad(lambda table: jnp.sum(jnp.tanh(table[ids])))(table)
        updates, state = tx.update(grads, state, table)
        return js.apply_updates(table, updates), state

    found = target(device)
    with jax.default_device(found.devices[0]):
        text = jax.jit(step).lower(*found.place(args)).compile().as_text()
    assert " scatter(" in text and not float_additions(text)


@pytest.mark.parametrize("device", ["v5e", "h100"])
def test_plain_additions_race_and_are_found(device):
    needs_device(device)
    add = jax.jit(lambda table, ids: table.at[ids].add(1.0))
    args = target(device).place((S((V, 16), jnp.float32), S((K,), jnp.int32)))
    assert float_additions(add.lower(*args).compile().as_text())


@pytest.mark.slow
@pytest.mark.parametrize("device", ["v5e", "h100"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rounding_stochastically_copies_no_table(device, dtype):
    tx = js.adam(0.1)
    *kept, ids = arguments(tx, (64,), dtype)
    args = *js.row_major(tuple(kept)), ids, jax.eval_shape(lambda: jax.random.key(0))

    def step(params, state, ids, key):
        loss = lambda params: jnp.tanh(params["table"][ids].astype(float)).sum()  # noqa: E731
        return tx.apply(js.grad(loss)(params), state, params, key)

    cost = cost_on(device, step, *args, donate_argnums=(0, 1))
    assert cost.copies == 0 and cost.temp_bytes < 16e6


def test_on_a_tpu_few_entries_suffice_to_step_all_rows():
    def way(entries, row, platform):
        table, values = S((V, *row), jnp.float32), S((entries, *row), jnp.float32)
        ids = S((entries,), jnp.int32)
        gradient = jax.eval_shape(lambda *x: js.IndexedSlices(*x, (V, *row)), values, ids)
        return js.adam(0.1).plan(gradient, table, platform).way

    assert way(300_000, (64,), "tpu") == "all rows" != way(300_000, (64,), "gpu")
    assert way(100_000, (64,), "tpu") == "together"
    assert way(3_000, (), "tpu") == "all rows" != way(3_000, (), "gpu")


def test_gpus_rank_in_rounds_of_16():
    """``lax.top_k`` sorts everything for k = 17; rounds move less, in less memory."""

    def cost(find, *args):
        found = cost_on("h100", find, *args)
        return found.accessed_bytes, found.temp_bytes, "sort" in found.kernels

    scores = S((32, V), jnp.float32)
    sorts = [cost(functools.partial(jax.lax.top_k, k=k), scores) for k in (16, 17)]
    assert sorts[0][0] < sorts[1][0] / 4 and sorts[0][1] == 0
    search = lambda k: cost(lambda t, q: top_k(t, q, k), S((V, 64), "f"), S((32, 64), "f"))  # noqa: E731
    by_rounds, sorted_once = search(64), search(65)
    assert by_rounds[0] < sorted_once[0] and by_rounds[1] <= sorted_once[1]


@pytest.mark.parametrize(
    "impl, folded, parts",
    [
        ("threefry2x32", False, 0),
        ("rbg", False, 8),
        ("unsafe_rbg", False, 8),
        ("rbg", True, 1),
    ],
)
def test_what_a_tpu_draws_of_a_split_table(impl, folded, parts):
    """How many parts of it each of eight chips holds besides its own; docs/sharding.md."""
    needs_device("v5e:2x4")
    mesh = jax.sharding.Mesh(js.testing.devices("v5e:2x4"), ("x",))
    rows, rest = (jax.NamedSharding(mesh, p) for p in (jax.P("x"), jax.P()))
    height = 2**23

    def own_rows(key):
        key = jax.random.fold_in(key, jax.lax.axis_index("x"))
        return jax.random.normal(key, (height // 8, 64))

    spread = jax.shard_map(own_rows, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("x"))
    draw = spread if folded else lambda key: jax.random.normal(key, (height, 64))
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    key = S(key.shape, key.dtype, sharding=rest)
    memory = jax.jit(draw, out_shardings=rows).lower(key).compile().memory_analysis()
    part = height // 8 * 64 * 4
    assert memory.output_size_in_bytes == pytest.approx(part, rel=0.01)
    assert memory.temp_size_in_bytes / part == pytest.approx(parts, abs=0.1)


def test_a_tpu_keeps_a_table_of_the_host_there():
    """The lines of docs/devices.md."""
    needs_device("v5e")
    page = (pathlib.Path(__file__).parent.parent / "docs" / "devices.md").read_text()
    (code,) = re.findall(r"```py\n(from jax.experimental.compute_on.*?)```", page, re.S)
    names = {"jax": jax, "jnp": jnp}
    exec(code, names)
    place = functools.partial(
        jax.sharding.SingleDeviceSharding, js.testing.devices("v5e")[0]
    )
    table = S((V, 64), jnp.float32, sharding=place(memory_kind="pinned_host"))
    ids, w = (
        S((1_000,), jnp.int32, sharding=place()),
        S((64,), jnp.float32, sharding=place()),
    )
    step = jax.jit(names["step"], donate_argnums=0)
    memory = step.lower(table, ids, w).compile().memory_analysis()
    assert memory.host_alias_size_in_bytes >= V * 64 * 4
    assert memory.host_temp_size_in_bytes < 1e6 and memory.temp_size_in_bytes < 1e6
