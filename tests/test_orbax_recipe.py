"""The recipe for Orbax: the same trees, for several processes or asynchronous saving."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jslices as js


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
