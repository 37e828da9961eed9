"""Each primitive of JAX as a function of rows, against jax.grad.

JAX's own tests have calls of all its primitives; some of each become row programs here, in
three forms. Most primitives mix rows somewhere: whether a gradient is rows or dense is not
asked, only whether it is right.
"""

import collections
import random
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from jax import lax

import jslices as js

IDS = np.array([2, 0, 3, 2], np.int32)
EDGES = np.array([0, -1, 5], np.int32)
#: Those whose gradients at these numbers, drawn by JAX, are not worth comparing.
UNSTABLE = ("eig", "svd", "qr")


def total(tree):
    """A number that tells all elements apart."""
    inexact = [y for y in jax.tree.leaves(tree) if jnp.issubdtype(y.dtype, jnp.inexact)]
    weights = [(1 + np.arange(y.size) % 7).reshape(y.shape) for y in inexact]
    sums = [jnp.sum(y * w.astype(y.dtype)) for y, w in zip(inexact, weights, strict=True)]
    return sum((x.real.astype("float32") for x in sums), jnp.float32(0))


def with_rows(tree):
    return [y for y in jax.tree.leaves(tree) if y.ndim and y.shape[0]]


def rows_of_vmap(f, x):
    """Rows of a vmapped function, and four arrays of that shape."""
    stacked = np.stack([x, x * 0.75, x * 0.5, x * 0.25]).astype(x.dtype)
    return lambda x: total(jax.tree.map(lambda y: y[IDS], jax.vmap(f)(x))), stacked


def tables_in_a_scan(f, x):
    def loss(x):
        read = lambda x: total([y[EDGES] for y in with_rows(f(x))])  # noqa: E731
        return lax.scan(lambda c, x: (c, read(x)), 0, x)[1].sum()

    return loss, np.stack([x, x * 0.5]).astype(x.dtype)


def one_hot_product(f, x):
    def product(y):
        return jnp.tensordot(jax.nn.one_hot(EDGES, y.shape[0], dtype=y.dtype), y, 1)

    inexact = lambda y: jnp.issubdtype(y.dtype, jnp.inexact)  # noqa: E731
    return lambda x: total([product(y) for y in with_rows(f(x)) if inexact(y)]), x


def calls():
    """One call of each group of JAX's, for each small inexact operand."""
    from jax._src.internal_test_util.test_harnesses import all_harnesses

    groups = collections.defaultdict(list)
    for call in all_harnesses:
        if call.dtype in (np.float32, np.complex64) and call.group_name not in UNSTABLE:
            groups[call.group_name].append(call)
    for name, group in sorted(groups.items()):
        call = random.Random(name).choice(group)
        args = call.dyn_args_maker(np.random.RandomState(0))
        for at, arg in enumerate(args):
            small = hasattr(arg, "dtype") and 0 < np.size(arg) <= 500
            if small and jnp.issubdtype(arg.dtype, jnp.inexact):
                f = lambda x: call.dyn_fun(*args[:at], x, *args[at + 1 :])  # noqa: B023, E731
                yield call.fullname, f, np.asarray(arg)


@pytest.mark.slow
@pytest.mark.parametrize("form", [rows_of_vmap, tables_in_a_scan, one_hot_product])
@jax.numpy_rank_promotion("allow")
def test_primitives(form):
    warnings.simplefilter("ignore")
    wrong, checked = [], 0
    for name, f, operand in calls():
        loss, x = form(f, operand)
        try:
            wanted = jax.jit(jax.value_and_grad(loss))(x)
        except Exception:  # not differentiable, or not of this shape
            continue
        if not all(np.isfinite(y).all() for y in wanted):
            continue  # of rows that are not read, JAX gets 0 times infinity
        checked += 1
        try:
            found = jax.jit(js.value_and_grad(loss))(x)
            size = max(1.0, *(float(np.abs(y).max()) for y in wanted))
            assert_close(found, wanted, rtol=1e-3, atol=3e-5 * size)
        except Exception as error:
            wrong.append((name, repr(error)))
    assert not wrong
    assert checked > 50
