"""The recipe for Orbax: the same trees, for several processes or asynchronous saving."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jslices as js

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
