"""Tables row by row: what is placed anew, what stays, and what is said."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import traced_as_on
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

import jslices as js

needs_constraints = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 1), reason="jit cannot donate to constrained layouts"
)


def by_columns(x):
    return jax.device_put(x, Format(Layout((1, 0)), x.sharding))


def order(x):
    return x.format.layout.major_to_minor


def test_arrays_are_placed_row_by_row():
    table = by_columns(jnp.arange(60.0).reshape(20, 3))
    tree = {"table": table, "done": jnp.ones((4, 2)), "bias": jnp.ones(3), "none": None}
    placed = js.row_major(tree)
    assert order(table) == (1, 0) and order(placed["table"]) == (0, 1)
    np.testing.assert_array_equal(placed["table"], table)
    assert placed["table"].sharding == table.sharding
    # What is to stay is handed back, and so is what is no array of JAX.
    for name in ("done", "bias", "none"):
        assert placed[name] is tree[name]
    host, number = np.ones((4, 2)), 3
    assert js.row_major((host, number)) == (host, number)


def test_structs_become_those_of_row_major_arrays():
    sharding = SingleDeviceSharding(jax.devices()[-1])
    for struct in (
        jax.ShapeDtypeStruct((20, 3), jnp.bfloat16),
        jax.ShapeDtypeStruct((20, 4, 3), jnp.float32, sharding=sharding),
    ):
        placed = js.row_major(struct)
        assert (placed.shape, placed.dtype) == (struct.shape, struct.dtype)
        assert order(placed) == tuple(range(struct.ndim))
        assert struct.sharding in (None, placed.sharding)
    for shape in ((), (20,), (20, 1)):
        struct = jax.ShapeDtypeStruct(shape, jnp.float32)
        assert js.row_major(struct) is struct


def test_nothing_changes_under_jit_vmap_and_grad():
    x = jnp.arange(24.0).reshape(4, 3, 2)
    np.testing.assert_array_equal(jax.jit(js.row_major)(x), x)
    np.testing.assert_array_equal(jax.vmap(js.row_major)(x), x)
    slope = jax.grad(lambda x: (js.row_major(x) ** 2).sum())(x)
    np.testing.assert_array_equal(slope, 2 * x)


def test_lookups_of_a_table_placed_by_rows_give_rows():
    loss = lambda table: (js.row_major(table)[jnp.array([1, 1, 3])] ** 2).sum()  # noqa: E731
    table = jnp.arange(10.0).reshape(5, 2)
    gradient = jax.jit(js.grad(loss))(table)
    assert js.is_slices(gradient)
    np.testing.assert_array_equal(gradient.to_dense(), jax.grad(loss)(table))


@pytest.mark.as_users
def test_a_donated_table_is_still_written_in_place():
    tx = js.adam(0.1)

    def step(table, state, ids):
        grads = js.grad(lambda table: (table[ids] ** 2).sum())(table)
        return tx.apply(grads, state, js.row_major(table))

    table = jax.ShapeDtypeStruct((100_000, 16), jnp.float32)
    ids = jax.ShapeDtypeStruct((100,), jnp.int32)
    args = table, jax.eval_shape(tx.init, table), ids
    js.testing.assert_in_place(step, *args, donate_argnums=(0, 1))


def test_the_state_of_a_row_major_table_is_row_major():
    table = jnp.ones((640, 3))
    state = js.adam(0.1).init({"table": table})
    assert order(state.mu["table"]) == (0, 1)


@needs_constraints
def test_types_of_arrays_on_a_mesh_tell_that_a_program_is_for_a_tpu():
    tpu = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    for device, wanted in ((tpu, True), (None, False)):
        mesh = AbstractMesh((2,), ("x",), abstract_device=device)
        split = jax.NamedSharding(mesh, jax.P("x"))
        struct = jax.ShapeDtypeStruct((640, 3), jnp.float32, sharding=split)
        program = jax.make_jaxpr(js.row_major)(struct)
        assert ("layout_constraint" in str(program)) == wanted


@needs_constraints
def test_a_program_for_a_tpu_that_its_trace_did_not_know_of_is_noticed():
    tx = js.sgd(0.1)

    def step(table, state, ids):
        return tx.apply(js.grad(lambda table: table[ids].sum())(table), state, table)

    def lowered(dim):
        table = jax.ShapeDtypeStruct((646, dim), jnp.float32)
        args = table, jax.eval_shape(tx.init, table), jax.ShapeDtypeStruct((9,), jnp.int32)
        traced = jax.jit(step).trace(*args)
        return traced.lower(lowering_platforms=("tpu",)).as_text()

    lowered(128)  # is laid out by rows anyway
    said = (
        r"compiled for a TPU but was traced for a cpu: the TPU returns its table of shape "
        r"\(646, 3\) by columns, .*Lower it within jax.default_device\(tpu\)"
    )
    with pytest.warns(js.PerformanceHint, match=said):
        lowered(3)
    with traced_as_on("tpu"):
        assert "LayoutConstraint" in lowered(5)


def test_short_rows_on_a_tpu_with_sparse_cores_are_noticed():
    tx = js.sgd(0.1)

    def traced(kind, dim):
        device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
        auto = (AxisType.Auto,)
        mesh = AbstractMesh((1,), ("x",), axis_types=auto, abstract_device=device)
        split = jax.NamedSharding(mesh, jax.P("x"))
        table = jax.ShapeDtypeStruct((1_000_448, dim), jnp.float32, sharding=split)
        ids = jax.ShapeDtypeStruct((9,), jnp.int32, sharding=split)
        grad = js.grad(lambda table, ids: table[ids].sum())
        step = lambda table, ids: tx.apply(grad(table, ids), tx.init(table), table)  # noqa: E731
        jax.make_jaxpr(step)(table, ids)

    for kind, dim in (("TPU v5 lite", 16), ("TPU v6 lite", 64), ("TPU v6 lite", 1)):
        traced(kind, dim)
    said = (
        r"shape \(1000448, 16\) has rows of 16 .* on a TPU v6 lite .*\[V \* 16 / 128, 128\]"
    )
    with pytest.warns(js.PerformanceHint, match=said):
        traced("TPU v6 lite", 16)


def test_a_table_by_columns_is_noticed_once():
    params = {
        "noticed": by_columns(jnp.ones((1_000_000, 2))),
        "w": by_columns(jnp.ones((9, 3))),
    }
    said = (
        r"the table at \['noticed'\], float32\[1000000, 2\], is laid out by columns: each "
        r"lookup, and each step, copies all of it, 8.0 MB, to rows and back. Type params = "
        r"jslices.row_major\(params\) before tx.init\(params\)"
    )
    with pytest.warns(js.PerformanceHint, match=said):
        js.adam(0.1).init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        js.adam(0.1).init(params)
        js.adam(0.1).init(js.row_major(params))
