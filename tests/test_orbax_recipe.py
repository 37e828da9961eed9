"""The recipe for Orbax: the same trees, for several processes or asynchronous saving."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jslices as js
from jslices import dynamic

pytestmark = pytest.mark.interop


@pytest.fixture
def checkpoint_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("orbax.checkpoint")


@pytest.mark.filterwarnings("ignore")
def test_orbax_keeps_what_saver_keeps(checkpoint_module, tmp_path):
    params = {"table": jnp.arange(8.0).reshape(4, 2).astype(jnp.bfloat16), "w": jnp.ones(3)}
    tree = {
        "params": params,
        "state": js.adam(1e-3).init(params),
        "slices": js.IndexedSlices(jnp.ones((2, 2)), jnp.array([1, 4]), (4, 2)),
    }
    with checkpoint_module.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", tree)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        restored = checkpointer.restore(tmp_path / "orbax", shapes)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    ours = js.Saver().restore(js.Saver().save(restored, tmp_path / "m"), tree)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(tree), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.filterwarnings("ignore")
def test_shards_come_back_where_they_were(checkpoint_module, tmp_path):
    """In a CheckpointManager, as Orbax's documentation has it."""
    ocp = checkpoint_module
    rows = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    params = {"table": jax.device_put(jnp.arange(32.0).reshape(16, 2), rows)}
    tree = {"params": params, "state": js.adam(1e-3, untouched="exact").init(params)}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        restored = manager.restore(3, args=ocp.args.StandardRestore(shapes))
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
        np.testing.assert_array_equal(a, b)
    assert restored["state"].clock.last["table"].sharding.is_equivalent_to(rows, 1)


def loss(params, ids):
    return ((params["table"][ids] @ params["w"] - 1) ** 2).mean()


IDS = jnp.array([1, 3, 1])


def optimizer(kind, params):
    exact = js.adam(1e-1, untouched="exact")
    if kind == "exact":
        return exact
    return js.optim.multi_steps(exact, 2, jax.eval_shape(js.grad(loss), params, IDS))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["exact", "multi_steps"])
@pytest.mark.parametrize("devices", [1, 4])
def test_training_goes_on(checkpoint_module, kind, devices, tmp_path):
    """Before the first step, after one, and in the middle of several micro-batches."""
    ocp = checkpoint_module
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh(
        (devices,), ("x",), axis_types=auto, devices=jax.devices()[:devices]
    )
    params = {"table": jnp.arange(32.0).reshape(16, 2), "w": jnp.ones(2)}
    tx = optimizer(kind, params)
    if devices > 1:
        place = {"table": jax.P("x"), "w": jax.P()}
        params = {
            k: jax.device_put(x, NamedSharding(mesh, place[k])) for k, x in params.items()
        }
    step, state = jax.jit(js.train_step(loss, tx)), tx.init(params)

    def placed_shape(x):  # docs/moving.md
        place = x.sharding if x.committed else NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    shape_of = placed_shape if devices > 1 else ocp.utils.to_shape_dtype_struct
    with ocp.StandardCheckpointer() as checkpointer:
        for i in range(4):
            tree = {"params": params, "state": state}
            checkpointer.save(tmp_path / str(i), tree)
            checkpointer.wait_until_finished()
            params, state, value = step(params, state, (IDS + 5 * i) % 16)
            shapes = jax.tree.map(shape_of, tree)
            restored = checkpointer.restore(tmp_path / str(i), shapes)
            assert jax.tree.structure(restored) == jax.tree.structure(tree)
            again = step(restored["params"], restored["state"], (IDS + 5 * i) % 16)
            pairs = zip(*map(jax.tree.leaves, (again, (params, state, value))), strict=True)
            for a, b in pairs:
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.filterwarnings("ignore")
def test_shapes_of_slices_on_a_mesh(checkpoint_module):
    """By Orbax' function, which sees the bits of row numbers."""
    split = NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec("x"))
    parts = jnp.ones((8, 2)), jnp.arange(8)
    values, indices = (jax.device_put(x, split) for x in parts)
    slices = js.IndexedSlices(values, indices, (16, 2))
    shapes = jax.tree.map(checkpoint_module.utils.to_shape_dtype_struct, slices)
    assert (shapes.values.shape, shapes.indices.shape) == ((8, 2), (8,))
    assert shapes.indices.dtype == np.int32
    assert shapes.indices.sharding.is_equivalent_to(split, 1)


@pytest.mark.filterwarnings("ignore")
def test_keys_of_64_bits_are_cut_by_a_narrow_template(checkpoint_module, tmp_path):
    """As docs/checkpoints.md says, with what to do."""
    keys = np.array([3, 2**40 + 5])
    words = dynamic.wide_ids(keys)
    narrow, wide = ({"keys": x} for x in (jnp.zeros(2, jnp.int32), np.zeros(2, np.int64)))
    with checkpoint_module.StandardCheckpointer() as checkpointer:
        for name, tree in {"keys": {"keys": keys}, "words": words}.items():
            checkpointer.save(tmp_path / name, tree)
        checkpointer.wait_until_finished()
        assert checkpointer.restore(tmp_path / "keys", narrow)["keys"].tolist() == [3, 5]
        np.testing.assert_array_equal(
            checkpointer.restore(tmp_path / "keys", wide)["keys"], keys
        )
        again = checkpointer.restore(
            tmp_path / "words", jax.tree.map(jnp.zeros_like, words)
        )
    np.testing.assert_array_equal(again.to_int64(), keys)
    path = js.Saver().save({"keys": keys}, tmp_path / "m")
    with pytest.raises(js.InvalidArgumentError, match=r"saved as int64.*int32 is wanted"):
        js.Saver().restore(path, narrow)
