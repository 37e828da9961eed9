"""What devices send one another, as it is read from compiled programs."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import as_users, slow_but_first, slow_unless
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jslices as js
import jslices.testing
from jslices._proof.cost import kernels
from jslices._proof.program import Module
from jslices._proof.wire import traffic
from jslices.testing import assert_no_table_on_wire, collectives

PROGRAMS = pathlib.Path(__file__).parent / "programs"
V, D, K = 40_000, 16, 64
OWN = 64 * 32 * 4  # bytes of a device's part of X
S = jax.ShapeDtypeStruct


@pytest.fixture(params=["Auto", "Explicit"])
def mesh(request):
    return mesh_of((8,), ("x",), getattr(AxisType, request.param))


def mesh_of(shape, names, kind=AxisType.Auto):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def placed(mesh, shape, dtype, *spec):
    return S(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


# --- the reader --------------------------------------------------------------------


def test_collectives_of_all_forms():
    module = Module((PROGRAMS / "collectives.hlo").read_text())
    found = traffic(module)
    own, part = 8 * 4 * 4, 2 * 4 * 4
    figures = [(x.kind, x.nbytes, x.received, x.turns) for x in found.collectives]
    assert sorted(figures, key=str) == [
        ("all-gather", 4 * own, 3 * own, 1),
        ("all-reduce", 4, 6, 1),
        ("all-to-all", own + own // 2, (own + own // 2) * 3 // 4, 1),
        ("collective-permute", own, own, 1),
        ("collective-permute", own, own, None),
        ("reduce-scatter", part, 3 * part, 1),
    ]
    assert found.least == found.most == sum(x.received for x in found.collectives)
    assert kernels(module) == {"convert": 1}


@pytest.mark.parametrize(
    "kind, groups, received",
    [
        ("all-reduce", "replica_groups={{0,1},{2,3}}", 2 * 100 * 1 // 2),
        ("all-reduce", "replica_groups={{0,1,2,3,4,5},{6,7}}", 2 * 100 * 5 // 6),
        ("all-reduce", "replica_groups={}", 2 * 100 * 7 // 8),
        ("all-reduce", "replica_groups={{0},{1}}", 0),
        ("all-gather", "replica_groups=[2,4]<=[8]", 75),
        ("all-gather", "replica_groups=[4,2]<=[2,4]T(1,0)", 50),
        ("all-gather", "replica_groups=mesh['a'=2,'x'=4] {'x'}", 75),
        ("all-gather", "replica_groups=mesh['a'=2,'x'=4] {'a','x'}", 100 * 7 // 8),
        ("all-gather", "replica_groups=mesh['a'=2,'x'=4] {'x':(1)2}", 50),
        ("all-to-all", "replica_groups=[1,8]<=[8]", 100 * 7 // 8),
        ("reduce-scatter", "replica_groups=[2,4]<=[8]", 300),
        ("ragged-all-to-all", "replica_groups={{0,1,2,3},{4,5,6,7}}", 100),
        ("collective-broadcast", "replica_groups={{0,1}}", 100),
        ("collective-permute", "source_target_pairs={{0,1},{1,0}}", 100),
        ("collective-permute", "source_target_pairs={{0,0},{1,1}}", 0),
    ],
)
def test_groups_of_devices(kind, groups, received):
    (found,) = traffic(only(f"{kind}(%x), channel_id=1, {groups}")).collectives
    assert (found.kind, found.nbytes, found.received) == (kind, 100, received)


def test_groups_of_devices_that_cannot_be_read():
    with pytest.raises(NotImplementedError, match=r"these groups .* replica_groups=new"):
        traffic(only("all-reduce(%x), replica_groups=new"))


def only(instruction):
    return Module(
        "HloModule jit_step, replica_count=1, num_partitions=8\n\n"
        "ENTRY %main (x: s32[25]) -> s32[25] {\n"
        "  %x = s32[25]{0} parameter(0)\n"
        f"  ROOT %it = s32[25]{{0}} {instruction}\n}}\n"
    )


@pytest.fixture(scope="module")
def found():
    """What a program on a mesh of 2 x 4 sends, by the name of the primitive."""
    mesh = mesh_of((2, 4), ("a", "x"))
    turn = [(n, (n + 1) % 4) for n in range(4)]

    def exchange(x, count):
        def body(carry):
            left, x = carry
            return left - 1, lax.ppermute(x, "x", turn)

        return (
            lax.psum(x, "a"),
            lax.all_gather(x, "x"),
            lax.psum_scatter(x, ("a", "x"), tiled=True),
            lax.all_to_all((3 * x).astype(jnp.int8), "x", 0, 0, tiled=True),
            lax.scan(lambda x, _: (2 * lax.pmax(x, "a"), None), x, None, 5)[0],
            lax.while_loop(lambda carry: carry[0] > 0, body, (count[0], x))[1],
        )

    by_rows = P(("a", "x"))
    mapped = jax.shard_map(
        exchange, mesh=mesh, in_specs=(by_rows, P()), out_specs=by_rows, check_vma=False
    )
    return collectives(mapped, S((512, 32), jnp.float32), S((1,), jnp.int32))


@pytest.mark.parametrize(
    "name, kind, devices, nbytes, turns",
    [
        ("psum", "all-reduce", 2, OWN, 1),
        ("all_gather", "all-gather", 4, 3 * OWN, 1),
        ("reduce_scatter", "reduce-scatter", 8, OWN // 8 * 7, 1),
        ("all_to_all", "all-to-all", 4, OWN // 4 * 3 // 4, 1),
        ("pmax", "all-reduce", 2, OWN, 5),
        ("ppermute", "collective-permute", 2, OWN, None),
    ],
)
def test_the_collectives_of_a_program(found, name, kind, devices, nbytes, turns):
    (one,) = [x for x in found.collectives if x.op_name.endswith("/" + name)]
    assert (one.kind, one.devices, one.received) == (kind, devices, nbytes)
    assert one.turns == turns and not one.branch
    assert one.line.file == __file__


def test_what_is_received_in_all_turns(found):
    each = sum(x.received * (x.turns or 1) for x in found.collectives)
    assert found.least == found.most == each
    said = str(found)
    assert said.startswith("each device receives ")
    assert "8.2 KB received in each of 5 turns (jit(exchange)" in said
    assert "8.2 KB received in each turn of a loop" in said


def test_branches_are_apart():
    mesh = mesh_of((8,), ("x",))

    def choose(x, which):
        x = lax.psum(x, "x")
        return lax.switch(
            which[0],
            [lambda: x, lambda: lax.pmax(x, "x"), lambda: lax.all_gather(x, "x").sum(0)],
        )

    mapped = jax.shard_map(
        choose, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False
    )
    found = collectives(mapped, S((512, 32), jnp.float32), S((1,), jnp.int32))
    summed = 2 * OWN * 7 // 8
    assert (found.least, found.most) == (summed, summed + 7 * OWN)
    where = {x.op_name.rsplit("/", 1)[-1]: x.branch for x in found.collectives}
    assert where["psum"] == ()
    assert where["pmax"][0].startswith("branch 2 of 3 of conditional")
    assert where["all_gather"][0].startswith("branch 3 of 3 of conditional")
    assert "as branches are taken" in str(found)


# --- tables on the wire ------------------------------------------------------------


def sent_by(step, *args, **options):
    with pytest.raises(AssertionError) as caught:
        assert_no_table_on_wire(step, *args, **options)
    first, *problems = str(caught.value).split("\n- ")
    assert first == f"{step.__name__} sends whole tables:"
    return problems


def test_a_replicated_table_stepped_from_a_divided_batch():
    """What JAX makes of plain code: the sum over devices of what each would write."""
    mesh = mesh_of((8,), ("x",))

    def step(table, ids):
        rows = table[ids]
        return table.at[ids].add(-0.1 * rows)

    table = placed(mesh, (V, D), jnp.float32)
    ids = placed(mesh, (K,), jnp.int32, "x")
    summed, advice = sent_by(step, table, ids)
    assert "all-reduce of f32[40000,16] among 8 devices, 4.5 MB received" in summed
    assert f"at {__file__}:" in summed and "table.at[ids].add" in summed
    assert summed.endswith(
        "as large as args[0] float32[40000,16] (2.6 MB), or has an axis as long"
    )
    assert "jslices.Exchange" in advice


def test_a_map_from_rows_to_entries_and_tables_in_parts():
    mesh = mesh_of((8,), ("x",))

    def slots(table, ids):
        slot = jnp.zeros((V,), jnp.int32).at[ids].max(jnp.arange(K, dtype=jnp.int32))
        return table[ids] * slot[ids][:, None]

    def whole(table, ids):
        return table[ids], lax.with_sharding_constraint(table, NamedSharding(mesh, P()))

    ids = placed(mesh, (K,), jnp.int32, "x")
    problems = sent_by(slots, placed(mesh, (V, D), jnp.float32), ids)
    assert any("s32[40000]" in problem for problem in problems)
    problems = sent_by(whole, placed(mesh, (V, D), jnp.float32, "x"), ids)
    assert any("all-gather of f32[40000,16]" in problem for problem in problems)


def loss(params, ids):
    return (js.embedding_lookup(params["t"], ids) ** 2).sum()


@pytest.mark.parametrize(
    "tx, spec",
    slow_unless(
        [(js.sgd(0.1), ("x",)), (js.adam(0.1), ("x",)), (js.adam(0.1), ())],
        lambda case: case[1] == ("x",),
    ),
    ids=["sgd, split", "adam, split", "adam, whole"],
)
def test_row_gradients_do_not_send_tables(mesh, tx, spec):
    exchange = {"t": js.Exchange("x", overflow="nan")} if spec else None

    def step(params, state, ids):
        grads = js.grad(loss, exchange=exchange)(params, ids)
        return tx.apply(grads, state, params)

    params = {"t": placed(mesh, (V, D), jnp.float32, *spec)}
    state = jax.tree.map(
        lambda x: placed(mesh, x.shape, x.dtype, *spec[: x.ndim]),
        jax.eval_shape(tx.init, {"t": S((V, D), jnp.float32)}),
    )
    ids = placed(mesh, (K,), jnp.int32, "x")
    with jax.set_mesh(mesh):
        found = assert_no_table_on_wire(step, params, state, ids)
    assert 0 < found.most < 8 * K * (4 * D + 4)


LAZY_AND_EXACT = pytest.mark.parametrize(
    "tx",
    [
        pytest.param(js.adam(0.1), id="lazy"),
        pytest.param(js.adam(0.1, untouched="exact"), id="exact", marks=pytest.mark.slow),
    ],
)


@LAZY_AND_EXACT
def test_moments_split_beside_a_table_on_every_device(mesh, tx):
    """Each device has the table and a part of the moments, and steps as one device does."""

    @functools.partial(as_users, donate_argnums=(0, 1))
    def step(params, state, ids):
        params, state = tx.catch_up(params, state, js.lookup_ids(loss)(params, ids))
        return tx.apply(js.grad(loss)(params, ids), state, params)

    params = {"t": np.arange(V * D, dtype=np.float32).reshape(V, D) % 7}
    ids = np.arange(2 * K, dtype=np.int32).reshape(2, K) * 9_001 % V
    everywhere, split = (NamedSharding(mesh, P(*spec)) for spec in ((), ("x",)))
    here = jax.device_put(params, everywhere)
    state = jax.tree.map(
        lambda x: jax.device_put(x, split if x.shape[:1] == (V,) else everywhere),
        tx.init(params),
    )
    batches = [jax.device_put(x, split) for x in ids]
    with jax.set_mesh(mesh):
        sent = assert_no_table_on_wire(step, here, state, batches[0])
        memory = js.testing.assert_in_place(step, here, state, batches[0])
        for batch in batches:
            here, state = step(here, state, batch)
    assert 0 < sent.most < 6 * K * (4 * D + 4) * tx.catches_up + 6 * K * (4 * D + 4)
    moments = 2 * D + tx.catches_up  # and of exact ones when a row was last stepped
    log = sum(x.nbytes for x in state.clock.log) if tx.catches_up else 0
    assert memory.argument_bytes - log < 1.01 * V * 4 * (D + moments / 8)
    assert state.mu["t"].sharding.is_equivalent_to(split, 2)
    alone = params, tx.init(params)
    for batch in ids:
        alone = step(*alone, batch)
    np.testing.assert_allclose(here["t"], alone[0]["t"], rtol=1e-6)
    np.testing.assert_allclose(state.nu["t"], alone[1].nu["t"], rtol=1e-6)


@pytest.mark.parametrize("mesh", slow_but_first("Explicit", "Auto"), indirect=True)
def test_rows_of_ids_catch_up_where_they_are(mesh):
    tx, split = js.sgd(0.1, 0.9, untouched="exact"), NamedSharding(mesh, P("x"))
    rows = js.IndexedSlices(jnp.ones((2, 2)), jnp.array([3, 9]), (16, 2))
    none = js.IndexedSlices(jnp.ones((0, 2)), jnp.zeros(0, int), (16, 2))
    table, state = jnp.ones((16, 2)), tx.init(jnp.ones((16, 2)))
    for grad in (rows, none):
        table, state = tx.apply(grad, state, table)
    expected = tx.catch_up(table, state, jnp.array([9, 3, 15]))[0]
    assert expected[3, 0] < table[3, 0]
    tall = lambda x: jax.device_put(x, split) if x.shape[:1] == (16,) else x  # noqa: E731
    with jax.set_mesh(mesh):
        ids = jnp.array([9, 3, 15])
        found = jax.jit(tx.catch_up)(*jax.tree.map(tall, (table, state)), ids)[0]
    assert found.sharding.is_equivalent_to(split, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@LAZY_AND_EXACT
def test_columns_stay_where_they_are(tx):
    """On Auto axes nobody says how columns are split; ids may be split along that axis."""
    mesh = mesh_of((2, 4), ("a", "x"))
    exchange = {"t": js.Exchange("x", overflow="nan")}

    @jax.jit
    def step(params, state, ids):
        rows = js.lookup_ids(loss, exchange=exchange)(params, ids)
        params, state = tx.catch_up(params, state, rows)
        grads = js.grad(loss, exchange=exchange)(params, ids)
        return tx.flush(*tx.apply(grads, state, params))

    split = NamedSharding(mesh, P("x", "a"))
    params = {"t": placed(mesh, (V, D), jnp.float32, "x", "a")}
    state = jax.tree.map(
        lambda x: placed(mesh, x.shape, x.dtype, *("x", "a")[: x.ndim * (V in x.shape)]),
        jax.eval_shape(tx.init, {"t": S((V, D), jnp.float32)}),
    )
    ids = placed(mesh, (K,), jnp.int32, ("a", "x"))
    assert_no_table_on_wire(step, params, state, ids)
    new, changed = step.lower(params, state, ids).compile().output_shardings
    for x in (new["t"], changed.mu["t"], changed.nu["t"]):
        assert x.is_equivalent_to(split, 2), x


def test_what_is_no_table_is_said():
    x = S((V, D), jnp.float32)
    with pytest.raises(
        ValueError, match=r"looks up rows of no argument .* lower min_bytes"
    ):
        assert_no_table_on_wire(lambda x: x.sum(), x)


def test_on_one_device_nothing_is_sent():
    found = assert_no_table_on_wire(
        lambda t, i: t[i], S((V, D), jnp.float32), S((K,), jnp.int32)
    )
    assert found == (0, 0, ()) and str(found) == "each device receives 0 B"
