"""Row gradients over devices: equal to the dense mean, and no table is ever sent."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, slow_unless
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jslices as js

V, D, B = 512, 4, 6
RNG = np.random.default_rng(11)
TABLE = RNG.normal(size=(V, D)).astype(np.float32)
IDS = RNG.integers(0, 20, (4 * B,)).astype(np.int32)


@pytest.fixture(params=["Auto", "Explicit"])
def mesh(request):
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    kind = getattr(jax.sharding.AxisType, request.param)
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))


def per_device(mesh, function, check_vma=True):
    """``function`` of each device's share, its result the same on all."""
    shares = PartitionSpec(("x", "y"))
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=shares, out_specs=PartitionSpec(), check_vma=check_vma
    )

    def put(x):
        return jax.device_put(x, NamedSharding(mesh, shares))

    return lambda *x: jax.jit(mapped).lower(*map(put, x)).compile(), put


def collectives(compiled):
    """``(name, shape)`` of everything that devices send one another."""
    names = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
    found = []
    for line in compiled.as_text().splitlines():
        match = re.search(rf"= (.*?) ({names})(?:-start)?\(", line)
        if match:
            shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
            found += [(match[2], shape) for shape in shapes]
    return found


@pytest.mark.parametrize("check_vma, reduction", [(True, "mean"), (False, "sum")])
@pytest.mark.parametrize("num_rows", [V, 5])
def test_equals_the_dense_reduction_and_sends_no_table(
    mesh, check_vma, reduction, num_rows
):
    values = RNG.normal(size=(4 * B, D)).astype(np.float32)
    indices = RNG.integers(-1, min(num_rows, 20) + 1, 4 * B)
    sparse = num_rows == V

    def reduce(values, indices):
        slices = js.IndexedSlices(values, indices, (num_rows, D))
        return js.all_reduce_slices(slices, ("x", "y"), reduction)

    compile_, put = per_device(mesh, reduce, check_vma)
    arguments = put(values), put(indices)
    compiled = compile_(*arguments)
    out = compiled(*arguments)
    wanted = np.zeros((num_rows, D), np.float32)
    held = (indices >= 0) & (indices < num_rows)
    np.add.at(wanted, indices[held], values[held])
    factor = np.float32(4 if reduction == "mean" else 1)
    assert_close(out, wanted / factor)
    # Rows that no device had stay untouched, whichever way it was done.
    touched = np.asarray(out.indices)
    touched = touched[touched < num_rows]
    np.testing.assert_array_equal(np.sort(touched), np.unique(indices[held]))
    sent = collectives(compiled)
    assert sent
    if sparse:  # 24 rows and their numbers, and nothing else
        assert set(sent) == {("all-gather", f"{4 * B},{D}"), ("all-gather", f"{4 * B}")}
    else:
        assert ("all-reduce", f"{num_rows},{D}") in sent
    table_sized = f"f32[{V},{D}]"
    assert table_sized not in compiled.as_text()


def test_over_one_axis_of_two(mesh):
    def reduce(values, indices):
        slices = js.IndexedSlices(values, indices, (V, 1))
        one = js.all_reduce_slices(slices, "y", "sum")
        return js.all_reduce_slices(one, "x", "sum")

    values, indices = np.ones((4, 1), np.float32), np.array([3, 3, 3, 7])
    compile_, put = per_device(mesh, reduce)
    out = compile_(put(values), put(indices))(put(values), put(indices))
    wanted = np.zeros((V, 1), np.float32)
    wanted[3], wanted[7] = 3, 1
    assert_close(out, wanted)


@pytest.mark.parametrize(
    "num_rows, dtype, gathers",
    # 4 devices send 6 slots of 4 values and an index: 480 bytes, 288 in 16 bits. An
    # all-reduce moves 2 V rows of float32 and as many flags: 34 V bytes.
    [
        (15, "float32", True),
        (14, "float32", False),
        (9, "bfloat16", True),
        (8, "bfloat16", False),
    ],
)
def test_the_choice_is_made_by_counting_bytes(num_rows, dtype, gathers):
    def reduce(values, indices):
        slices = js.IndexedSlices(values, indices, (num_rows, D))
        return js.all_reduce_slices(slices, "d")

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=auto)
    spec = PartitionSpec("d")
    mapped = jax.shard_map(reduce, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    values = jax.ShapeDtypeStruct((4 * B, D), dtype)
    program = str(jax.make_jaxpr(mapped)(values, jax.ShapeDtypeStruct((4 * B,), "int32")))
    program = program.replace("lax.psum", "")  # in the dtype of row numbers
    assert ("all_gather" in program, "psum" in program) == (gathers, not gathers)


def test_capacity_and_unknown_shapes():
    def reduce(values, indices, **options):
        slices = js.IndexedSlices(values, indices)
        return js.all_reduce_slices(slices, "d", "sum", **options)

    values = np.ones((3, 4, 1), np.float32)
    indices = np.array([[8, 8, 9, 9], [9, -1, -1, -1], [-1, -1, -1, -1]])
    for options, size in [({}, 12), ({"capacity": 2}, 6)]:
        call = jax.vmap(functools.partial(reduce, **options), axis_name="d")
        out = jax.jit(call)(values, indices)
        assert out.indices.shape == (3, size) and out.dense_shape is None
        np.testing.assert_array_equal(np.asarray(out.indices)[:, :2], [[8, 9]] * 3)
        np.testing.assert_array_equal(np.asarray(out.values)[:, :3, 0], [[2, 3, 0]] * 3)
    call = jax.vmap(functools.partial(reduce, capacity=1), axis_name="d")
    out = jax.jit(call)(values, indices)  # too small, and that is seen
    assert np.isnan(np.asarray(out.values)[:, 0]).all()


def test_sixteen_bits_are_summed_in_float32():
    values = jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16)
    for num_rows in (2, 100):

        def reduce(values, num_rows=num_rows):
            slices = js.IndexedSlices(values, jnp.array([1]), (num_rows,))
            return js.all_reduce_slices(slices, "d", "sum").to_dense()[1]

        out = jax.jit(jax.vmap(reduce, axis_name="d"))(values)
        np.testing.assert_array_equal(out.astype("f4"), [258] * 3)


def test_a_training_step_over_devices(mesh):
    """Each device its part of the batch; the table is replicated, and stays the same."""
    tx = js.adam(0.1)
    replicated, shares = PartitionSpec(), PartitionSpec(("x", "y"))

    def loss(table, ids):
        return (table[ids] ** 2).sum(axis=-1).mean()

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(replicated, replicated, shares),
        out_specs=replicated,
    )
    def step(table, state, ids):
        own = lax.pcast(table, ("x", "y"), to="varying")
        grad = js.all_reduce_slices(js.grad(loss)(own, ids), ("x", "y"))
        updates, state = tx.update(grad, state, table)
        return js.apply_updates(table, updates), state

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    @jax.jit
    def step_alone(table, state):
        updates, state = tx.update(js.grad(loss)(table, IDS), state, table)
        return js.apply_updates(table, updates), state

    table = put(TABLE, replicated)
    state = jax.tree.map(lambda x: put(x, replicated), tx.init(TABLE))
    alone, alone_state = TABLE, tx.init(TABLE)
    for _ in range(3):
        table, state = step(table, state, put(IDS, shares))
        alone, alone_state = step_alone(alone, alone_state)
    assert_close(table, alone, rtol=1e-4, atol=1e-5)
    sent = collectives(step.lower(table, state, put(IDS, shares)).compile())
    assert sent and not [shape for _, shape in sent if shape.startswith(f"{V},")]


@pytest.mark.parametrize(
    "check_vma, reduction",
    slow_unless(
        [(check, how) for check in (True, False) for how in ("mean", "sum")],
        lambda case: case in ((True, "mean"), (False, "sum")),
    ),
)
def test_a_tree_of_gradients(mesh, reduction, check_vma):
    """The step of the page on sharding: that of one device with the whole batch."""
    params = {"w": (D,), "b": (), "unused": (9, 2)}
    params = {name: np.ones(shape, np.float32) for name, shape in params.items()}
    params["table"] = TABLE
    axes, tx = ("x", "y"), js.sgd(1.0)

    def loss(params, ids):
        reduce = jnp.mean if reduction == "mean" else jnp.sum
        return reduce((params["table"][ids] @ params["w"] + params["b"]) ** 2)

    def step(params, ids, differ=True):
        mine = lax.pcast(params, axes, to="varying") if differ else params
        grads = js.all_reduce_slices(js.grad(loss)(mine, ids), axes, reduction)
        return tx.apply(grads, tx.init(params), params)[0]

    def mapped(step):
        specs = PartitionSpec(), PartitionSpec(axes)
        return jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma
        )

    @jax.jit
    def alone(params):
        return tx.apply(js.grad(loss)(params, IDS), tx.init(params), params)[0]

    wanted = alone(params)
    params, ids = jax.device_put((params, IDS), NamedSharding(mesh, PartitionSpec()))
    ids = jax.device_put(ids, NamedSharding(mesh, PartitionSpec(axes)))
    assert_close(jax.jit(mapped(step))(params, ids), wanted, rtol=1e-4, atol=1e-5)
    if check_vma:
        same = mapped(functools.partial(step, differ=False))
        message = r"at \['b'\] is the same along 'x'.*pcast\(params"
        is_dense = pytest.warns(js.DensificationWarning, match="pcast")
        with is_dense, pytest.raises(js.InvalidArgumentError, match=message):
            jax.eval_shape(same, params, ids)


def test_errors():
    row = js.IndexedSlices(jnp.ones((1, 1)), [0], (9, 1))
    with pytest.raises(TypeError, match=r"arrays, got a str at \['w'\]"):
        js.all_reduce_slices({"w": "a"}, "d")
    with pytest.raises(js.InvalidArgumentError, match=r"'MEAN'\): wanted .mean. or"):
        js.all_reduce_slices(row, "d", "MEAN")
    with pytest.raises(js.InvalidArgumentError, match=r"capacity=0\): wanted an int of"):
        js.all_reduce_slices(row, "d", capacity=0)
    with pytest.raises(TypeError, match="from_optax"):
        js.all_reduce_slices(jax.tree.map(lambda x: jnp.zeros(x.shape), row), "d")
