"""Arrays [L, V, D] whose rows two axes number, split over devices along V, L or both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, cost_on, dense, fast_jit, slow_unless
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jslices as js
import jslices.testing
from jslices._proof.cost import cost_of

L, V, D, K = 4, 20_000, 4, 8
RNG = np.random.default_rng(3)
TABLE = RNG.normal(size=(L, V, D)).astype(np.float32)
IDS = RNG.integers(0, V, (2, L, K)).astype(np.int32)
IDS[:, :, :2] = 3
IDS[0, 1, 4:6] = -1, V + 3  # the last row in JAX, and out of range
KEY = jax.random.key(0)
OPTIMIZERS = {
    "exact adam": js.adam(0.1, untouched="exact"),
    "adam": js.adam(0.1),
    "rowwise_adagrad": js.rowwise_adagrad(0.1),
    "from_optax": js.from_optax(optax.sgd(0.1, momentum=0.9)),
    "multi_steps": None,
}
# What is done with a table and a gradient, beside steps.
OPERATIONS = {
    "coalesce": lambda table, grad: grad.coalesce() * 2.0,
    "clip": lambda table, grad: js.clip_by_global_norm(grad, 0.5)[0],
    "sum": lambda table, grad: grad + grad,
    "array": lambda table, grad: table + grad,
    "apply_slices": lambda table, grad: js.apply_slices(table, grad, "sub"),
    "project_rows": lambda table, grad: js.project_rows(table, grad, 1.0),
    "rounded": lambda table, grad: js.apply_updates(
        table.astype(jnp.bfloat16), grad.astype("float32"), KEY
    ),
}

EVERY = *OPTIMIZERS, *OPERATIONS


class Run:
    """Gradients and steps of tables that stand somewhere."""

    def __init__(self, exchange=None, rows=None, layers=True):
        self.exchange, self.rows, self.layers = exchange, rows, layers

    def loss(self, table, ids):
        numbers = jnp.arange(L)[:, None]
        rows = table.at[numbers, ids].get(
            mode="fill", fill_value=0.5, out_sharding=self.rows
        )
        return (jnp.tanh(rows).sum(0) ** 2).sum()

    def with_more_reads(self, table, ids):
        one = table.at[1, ids[2]].get(out_sharding=self.rows and P(*self.rows[1:]))
        total = self.loss(table, ids) + (one**3).sum()
        if not self.layers:  # JAX refuses to take apart what is split along L
            return total

        def layer(x, of_layer):
            table, ids = of_layer
            return x + jnp.tanh(js.embedding_lookup(table, ids)).sum(-1), None

        x = jnp.zeros_like(ids[0], dtype=table.dtype)
        return total + (lax.scan(layer, x, (table, jnp.abs(ids) % V))[0] ** 2).sum()

    def beside(self, table, ids):
        """Of a table that is used whole as well, without a gradient."""
        return self.with_more_reads(table, ids) + lax.stop_gradient(table).max()

    def grad(self, loss, table, ids):
        grad = js.grad(loss, exchange=self.exchange)(table, ids)
        assert js.is_slices(grad) and grad.row_axes == 2
        return grad

    def lookup_ids(self, loss, table, ids):
        rows = js.lookup_ids(loss, exchange=self.exchange)(table, ids)
        assert js.is_slices(rows)
        return rows

    def steps(self, name, table, batches):
        tx = OPTIMIZERS[name]
        if name == "multi_steps":
            shapes = jax.eval_shape(lambda: self.grad(self.loss, table, batches[0]))
            tx = js.optim.multi_steps(js.adam(0.1), 2, shapes)
        catches_up = getattr(tx, "catches_up", False)

        def step(carry, ids):
            table, state = carry
            if catches_up:
                rows = self.lookup_ids(self.loss, table, ids)
                table, state = tx.catch_up(table, state, rows)
            return tx.apply(self.grad(self.loss, table, ids), state, table), None

        table, state = lax.scan(step, (table, tx.init(table)), batches)[0]
        return tx.flush(table, state)[0] if catches_up else table

    def everything(self, names, table, batches):
        """What has those names, a gradient, and the rows that were read."""
        grad = self.grad(self.loss, table, batches[0])
        arrays = {
            "gradient": self.grad(self.beside, table, batches[0]),
            **{x: self.steps(x, table, batches) for x in names if x in OPTIMIZERS},
            **{x: OPERATIONS[x](table, grad) for x in names if x in OPERATIONS},
        }
        read = self.lookup_ids(self.with_more_reads, table, batches[0])
        return dense(arrays), read.indices


@functools.cache
def on_one_device(names, layers=True):
    run = fast_jit(functools.partial(Run(layers=layers).everything, names))
    return run(jnp.asarray(TABLE), jnp.asarray(IDS))


def mesh_of(kind):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    return jax.make_mesh((2, 4), ("a", "x"), axis_types=(getattr(AxisType, kind),) * 2)


# Optimizers and operations, the kind of axes, the plan of an exchange, and the split. Where
# nobody tells XLA how gradients are split, it goes by what stands beside them: there exact
# steps are in every case, whose state is split as the table is.
FIRST, SECOND, THIRD = [[*OPERATIONS][i::3] for i in range(3)]
EXACT = "exact adam"
CASES = [
    (["adam", *FIRST], "Auto", "auto", P("a", "x")),
    ([EXACT, "from_optax", *SECOND], "Auto", "all_to_all", P(None, ("a", "x"))),
    (["multi_steps", *THIRD], "Auto", "all_to_all", P(None, "x")),
    ([EXACT, "rowwise_adagrad", *FIRST], "Auto", None, P(None, "x", "a")),
    ([EXACT, "multi_steps", *SECOND], "Auto", None, P("x")),
    ([EXACT, *THIRD], "Auto", None, P(None, ("a", "x"))),
    ([EXACT, *FIRST], "Explicit", None, P(None, "x")),
    (["adam", "rowwise_adagrad", *SECOND], "Explicit", None, P(None, "x", "a")),
    (["from_optax", "rowwise_adagrad", *THIRD], "Explicit", None, P("a", "x")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names, kind, plan, split",
    CASES,
    ids=lambda x: "-".join(x) if type(x) is list else str(x),
)
def test_the_same_on_a_mesh_and_no_table_is_sent(names, kind, plan, split):
    mesh = mesh_of(kind)
    left = tuple(axis for axis in ("a", "x") if axis not in split[2:])
    how = {"plan": plan, "overflow": "nan", "capacity": 8.0}  # has room for all ids
    exchange = js.Exchange(P(*split[:2]), **how) if plan else None
    rows = P(None, left, *split[2:]) if kind == "Explicit" else None
    layers = kind == "Auto" or split[0] is None
    wanted, wanted_read = on_one_device(EVERY)
    if not layers:
        gradient, wanted_read = on_one_device((), layers)
        wanted = wanted | gradient
    with jax.set_mesh(mesh):
        table = jax.device_put(TABLE, NamedSharding(mesh, split))
        ids = jax.device_put(IDS, NamedSharding(mesh, P(None, None, left)))
        run = functools.partial(Run(exchange, rows, layers).everything, names)
        compiled = fast_jit(run).lower(table, ids).compile()
        found, read = compiled(table, ids)
    for name in found:
        tolerance = {"rtol": 0, "atol": 0} if name == "rounded" else {"rtol": 1e-4}
        assert_close({name: found[name]}, {name: wanted[name]}, **tolerance)
        # On Auto axes nobody tells how columns are split.
        if kind == "Explicit" or not split[2:]:
            assert found[name].sharding.is_equivalent_to(table.sharding, 3), name
    assert rows_among(read) == rows_among(wanted_read)
    sent = cost_of(compiled).collectives
    assert max(x.nbytes for x in sent) < L * V // 8, (
        sent
    )  # no byte for each row of a device


def rows_among(numbers):
    return {*numbers.tolist()} & {*range(L * V)}


@functools.cache
def step_of_all_rows(exchange=None):
    """A function of a table ``[L, 16, D]``."""
    ids = np.random.default_rng(4).integers(0, 16, (L, 48)).astype(np.int32)

    def step(table):
        def loss(table):
            return (jnp.sin(table[jnp.arange(L)[:, None], ids]) ** 2).sum() + table[0].sum()

        grads = js.grad(loss, sparse=True, exchange=exchange)(table)
        new, _ = js.adam(0.1).apply(grads, js.adam(0.1).init(table), table)
        return new, js.apply_updates(table.astype(jnp.bfloat16), grads, KEY)

    return fast_jit(step)


@pytest.mark.parametrize(
    "split, exchange",
    slow_unless(
        [(P("a", "x"), js.Exchange(P("a", "x"))), (P(None, "x"), None)],
        lambda case: case[1] is not None,
    ),
    ids=str,
)
def test_a_step_of_all_rows_on_a_mesh(split, exchange):
    table = TABLE[:, :16]
    placed = jax.device_put(table, NamedSharding(mesh_of("Auto"), split))
    wanted = step_of_all_rows()(table)
    assert_close(step_of_all_rows(exchange)(placed), wanted, rtol=1e-5)


@pytest.mark.parametrize("split", [P("x"), P(None, "x")], ids=str)
def test_exact_steps_read_rows_without_a_gradient_as_they_are_now(split):
    """Rows of all tables of an array, which are sent from device to device."""
    rows = lambda table, ids: table[jnp.arange(L)[:, None], ids]  # noqa: E731
    tx, table = js.adam(0.1, untouched="exact"), TABLE[:, :4096]
    some, one = np.arange(4 * L).reshape(L, 4) % 8, np.full((L, 4), 9)
    batches = [(some, one), (one, one + 1), (one + 2, some)]  # `some` miss a step

    def loss(table, ids, others):
        stopped = lax.stop_gradient(rows(table, others))
        return (rows(table, ids) ** 2).sum() + stopped.sum()

    def last_value(table, exchange=None):
        step, state = js.train_step(loss, tx, exchange=exchange), tx.init(table)
        for batch in batches:
            table, state, value = step(table, state, *batch)
        return value

    wanted = last_value(jnp.array(table))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(table, NamedSharding(mesh, split))
        assert_close(last_value(placed, js.Exchange(split)), wanted, rtol=1e-5)


def test_a_shard_map_of_ones_own():
    """Every device has some layers, or some rows of all; the gradients are its own."""
    mesh = mesh_of("Auto")

    def stepped(table, ids):
        grads = js.grad(lambda t: jnp.sin(t[:, ids]).sum())(table)
        assert grads.row_axes == 2
        return js.apply_updates(
            table, js.sgd(0.1).update(grads, js.sgd(0.1).init(table))[0]
        )

    table, ids, alone = TABLE[:, :16], np.array([0, 1, 1], np.int32), jax.jit(stepped)
    for split, parts in [(P("x"), 1), (P(None, "x"), 4)]:
        found = jax.jit(
            jax.shard_map(stepped, mesh=mesh, in_specs=(split, P()), out_specs=split)
        )(table, ids)
        every = (ids + 16 // parts * np.arange(parts)[:, None]).reshape(-1)
        assert_close(found, alone(table, every), rtol=1e-5)


def test_explain_and_what_does_not_fit():
    mesh = mesh_of("Auto")
    table = jax.device_put(TABLE[:, :16], NamedSharding(mesh, P(None, "x")))

    def report(axis, table=table):
        look_up = js.explain(lambda t: t[2, jnp.arange(8) % 4].sum(), exchange=axis)
        return look_up(table).leaves[0]

    assert report(js.Exchange(P(None, "x"), "all_to_all")).exchange.fullest == 1
    assert report(js.Exchange(P(None, "x"))).row_axes == 2
    for axis, message in [
        (js.Exchange(P("a", None, "x")), "at most 2 axes of"),
        (js.Exchange(("a", "x")), r"4 along axis 0, which 8 devices .*P\(None, axis\)"),
        (js.Exchange(P(None, "y")), "and not 'y'"),
    ]:
        with pytest.raises(js.InvalidArgumentError, match=message):
            report(axis)
    odd = jax.device_put(TABLE[:, :18], NamedSharding(mesh, P()))
    with pytest.raises(js.InvalidArgumentError, match=r"padded_rows\(18, 4\)"):
        report(js.Exchange(P(None, "x")), odd)


@pytest.mark.devices
@pytest.mark.parametrize("rows", [2**17 + 8, 2**17 + 3])
def test_tiles_of_a_tpu(rows):
    table = jax.ShapeDtypeStruct((6, rows, 128), jnp.float32)

    def step(table, ids):
        grads = js.grad(lambda t: jnp.sin(t[jnp.arange(6)[:, None], ids]).sum())(table)
        return js.adam(0.1).apply(grads, js.adam(0.1).init(table), table)[0]

    def cost():
        ids = jax.ShapeDtypeStruct((6, 1000), jnp.int32)
        return cost_on("v5e", step, js.row_major(table), ids, donate_argnums=0)

    if rows % 8:
        with pytest.warns(js.PerformanceHint, match=r"padded_rows\(131075, 8\) = 131080"):
            cost()
    else:
        assert not cost().copies
