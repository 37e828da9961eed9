"""What several tests compare with."""

import json
import os
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from quick_flags import WITHOUT_FUSION_EMITTERS

import jslices as js
import jslices.testing
from jslices._proof.cost import cost_of
from jslices._proof.targets import target

GOLDEN = pathlib.Path(__file__).parent / "golden"


def golden(name):
    """A section of TensorFlow's numbers, arrays decoded."""
    return decode(json.loads((GOLDEN / f"{name}.json").read_text()))


def decode(x):
    if isinstance(x, dict) and set(x) == {"d", "s", "v"}:
        values = [float(v) if isinstance(v, str) else v for v in x["v"]]
        if x["d"].startswith("complex"):  # real and imaginary parts in turn
            values = np.array(values, float).reshape(-1, 2) @ [1, 1j]
        return np.array(values, x["d"]).reshape(x["s"])
    if isinstance(x, dict):
        return {key: decode(value) for key, value in x.items()}
    return [decode(value) for value in x] if isinstance(x, list) else x


def dense(tree):
    """The tree with every IndexedSlices as the array it stands for."""
    return jax.tree.map(
        lambda x: x.to_dense() if js.is_slices(x) else x, tree, is_leaf=js.is_slices
    )


def slow_unless(cases, quick):
    """The cases; those for which ``quick`` is not true are slow: they run in CI alone."""
    return [
        pytest.param(*case, marks=[] if quick(case) else pytest.mark.slow) for case in cases
    ]


def slow_but_first(first, *others):
    """The values of one parameter; all but the first one are slow."""
    return [first, *(pytest.param(other, marks=pytest.mark.slow) for other in others)]


def needs_device(name):
    """Skips the test where the compiler for a device is not installed.

    Such a test is marked ``devices``; the newest-JAX part of .ci/run has the compilers.
    """
    try:
        js.testing.devices(name)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


def cost_on(device, step, *args, donate_argnums=()):
    """The ``Cost`` of a step compiled for a device; see :func:`needs_device`."""
    needs_device(device)
    step = jax.jit(step, donate_argnums=donate_argnums)
    with jax.default_device(target(device).devices[0]):
        return cost_of(step.lower(*target(device).place(args)).compile())


def traced_as_on(platform):
    """In this context steps are traced as where JAX's default device is a ``platform``."""
    return mock.patch.object(jax, "default_backend", lambda: platform)


def fast_jit(f, **options):
    """``f`` compiled in half the time; what XLA does before machine code stays the same."""
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(f, compiler_options=quick, **options)


def as_users(f, **options):
    """``f`` jitted so that the program, if not its machine code, is what users get.

    For tests that read programs: one of the flags in ``conftest.py`` changes the program.
    """
    quick = WITHOUT_FUSION_EMITTERS in os.environ["XLA_FLAGS"]
    users = {"xla_cpu_use_fusion_emitters": True} if quick else {}
    return jax.jit(f, compiler_options=users, **options)


def array(x, dtype=np.float32):
    """An array of JAX; ``jnp.asarray`` would compile a program for each new shape."""
    return jax.device_put(np.asarray(x, dtype))


def all_at_once(functions, *args):
    """``{name: f(*args)}``, compiled as one program, which takes less than one for each."""
    return fast_jit(lambda *args: {name: f(*args) for name, f in functions.items()})(*args)


def lists(elements, sizes):
    """Lists of a few sizes only: JAX compiles every shape anew."""
    return st.sampled_from(sizes).flatmap(
        lambda size: st.lists(elements, min_size=size, max_size=size)
    )


def gradients(fun, *args, argnums=0):
    """The gradients of jslices and of JAX, compiled as one program."""
    both = {"ours": js.grad(fun, argnums), "theirs": jax.grad(fun, argnums)}
    found = all_at_once(both, *args)
    return found["ours"], found["theirs"]


def assert_close(actual, wanted, rtol=1e-5, atol=1e-6):
    """Two trees are close, IndexedSlices compared as arrays."""
    actual, wanted = numpy_tree(actual), numpy_tree(wanted)
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (w.shape, w.dtype)
        np.testing.assert_allclose(
            a.astype(np.float64) if a.dtype == jnp.bfloat16 else a,
            w.astype(np.float64) if w.dtype == jnp.bfloat16 else w,
            rtol=rtol,
            atol=atol,
        )


def numpy_tree(tree):
    """The tree as NumPy's arrays, IndexedSlices summed by NumPy: nothing is compiled."""
    return jax.tree.map(numpy_array, tree, is_leaf=js.is_slices)


def numpy_array(x):
    if not js.is_slices(x):
        return np.asarray(x)
    if x.is_placed:  # devices number rows of their own
        return np.asarray(x.to_dense())
    values, indices = np.asarray(x.values), np.asarray(x.indices)
    wide = np.float32 if values.dtype.itemsize < 4 else values.dtype
    batch, count = indices.shape[:-1], int(np.prod(x.dense_shape[: x.row_axes]))
    out = np.zeros((*batch, count, *x.dense_shape[x.row_axes :]), wide)
    for example in np.ndindex(batch):
        good = (0 <= indices[example]) & (indices[example] < count)
        np.add.at(out[example], indices[example][good], values[example][good].astype(wide))
    return out.reshape(*batch, *x.dense_shape).astype(values.dtype)


def ulps(actual, wanted):
    """How many float32 lie between two trees, at most: 0 if they are equal."""
    return max(int(np.abs(_place(a) - _place(w)).max()) for a, w in _pairs(actual, wanted))


def _pairs(actual, wanted):
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    leaves = (map(np.asarray, jax.tree.leaves(tree)) for tree in (actual, wanted))
    pairs = list(zip(*leaves, strict=True))
    assert all(a.dtype == w.dtype == np.float32 and a.shape == w.shape for a, w in pairs)
    return pairs


def _place(x):
    """The position of each float32 in the order of all of them."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def numpy_dense(values, indices, shape):
    """The array that slices stand for, by the plainest loop."""
    out = np.zeros(shape, np.asarray(values).dtype)
    for row, index in zip(np.asarray(values), np.asarray(indices), strict=True):
        if 0 <= index < shape[0]:
            out[index] += row
    return out
