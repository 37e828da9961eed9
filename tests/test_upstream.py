"""What JAX and XLA do that this package works around, so that an upgrade shows.

Each is told in ``findings/`` or in a comment of the code. If one fails after an upgrade,
the code that is named may become simpler, and pages that tell of it want another release.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import as_users, fast_jit

V, D, K = 300_000, 16, 1_000
OLD = jax.__version_info__ < (0, 12)  # 0.10.2; the rest of this page was read on 0.12.0.1
TABLE = jax.ShapeDtypeStruct((V, D), jnp.float32)
IDS, ROWS = jax.ShapeDtypeStruct((K,), jnp.int32), jax.ShapeDtypeStruct((K, D), jnp.float32)


def copies(step, *args):
    """How often the program for ``step``, whose tables are donated, copies one of them."""
    tables = [i for i, x in enumerate(args) if x.shape == (V, D)]
    text = as_users(step, donate_argnums=tables).lower(*args).compile().as_text()
    return len(re.findall(rf"= f32\[{V},{D}\]\S* copy\(", text))


def by_cond(value, ids):
    """``optim`` orders reads and writes so where a barrier does not (``at_once``)."""
    other, same = lambda value, ids: (-value, ~ids), lambda value, ids: (value, ids)
    return jax.lax.cond(value > jnp.inf, other, same, value, ids)


@pytest.mark.parametrize(
    "order, copied",
    [
        (lambda *both: both, True),
        (lambda *both: jax.lax.optimization_barrier(both), OLD),
        (by_cond, False),
    ],
    ids=["plain", "barrier", "cond"],
)
def test_a_table_that_is_read_after_its_write_is_copied(order, copied):
    """XLA:CPU of jaxlib 0.10.2 takes barriers out before it looks for copies."""

    def step(table, ids, rows):
        value, ids = order((table[ids] * rows).sum(), ids)
        return table.at[ids].add(rows), value

    assert bool(copies(step, TABLE, IDS, ROWS)) == copied


@pytest.mark.parametrize("rows, copied", [(1, True), (2, False)])
def test_a_step_of_one_row_copies_its_tables(rows, copied):
    """Of one row XLA:CPU computes the gather anew in each kernel that uses it."""

    def step(table, squares, ids, grad):
        total = squares[ids] + grad * grad
        squares = squares.at[ids].set(total, unique_indices=True)
        update = -0.1 * grad * jax.lax.rsqrt(total)
        return table.at[ids].add(update, unique_indices=True), squares

    ids, grad = jnp.arange(rows), jax.ShapeDtypeStruct((rows, D), jnp.float32)
    assert bool(copies(step, TABLE, TABLE, ids, grad)) == copied


def test_donated_arrays_are_paired_in_their_order():
    def step(state, params, ids, rows):
        return params.at[ids].add(rows), state.at[ids].add(rows * rows)

    assert copies(step, TABLE, TABLE, IDS, ROWS)
    assert not copies(lambda *args: step(*args)[::-1], TABLE, TABLE, IDS, ROWS)


@pytest.mark.parametrize("dtype, whole", [("bfloat16", OLD), ("float16", False)])
def test_a_table_of_16_bits_is_widened_as_a_whole(dtype, whole):
    """``_jax.WIDENS_BFLOAT16``: a step is then planned together, not in chunks."""
    table, rows = jax.ShapeDtypeStruct((V, D), dtype), jax.ShapeDtypeStruct((K, D), dtype)
    step = as_users(lambda table, ids, rows: table.at[ids].add(rows), donate_argnums=0)
    memory = step.lower(table, IDS, rows).compile().memory_analysis()
    assert (memory.temp_size_in_bytes > V * D) == whole


@pytest.mark.parametrize("reduce", [jnp.max, jnp.min])
def test_a_maximum_hides_nan_from_4096_elements(reduce):
    """``all_finite`` and norms do not ask a maximum (jaxlib 0.10.2 to 0.12.0.1)."""
    few, many = (jnp.zeros(size).at[7].set(jnp.nan) for size in (4_095, 4_096))
    found = [as_users(reduce)(x) for x in (few, many)]
    assert np.isnan(found).tolist() == [True, False]


def test_the_absolute_value_of_the_least_integer_is_not_negative_under_jit():
    """XLA of jaxlib 0.10.2 takes ``abs(x) >= 0`` for true: no check of numbers asks it."""

    def check(x):
        return jnp.abs(x), jnp.abs(x) >= 0

    size, is_positive = fast_jit(check)(jnp.array(jnp.iinfo(jnp.int32).min, jnp.int32))
    assert size < 0 and is_positive == OLD


def test_gradients_of_duplicates_stop_at_256_in_bfloat16():
    """``_rows.sums`` adds up duplicates in float32."""
    grad = jax.grad(lambda table: table[jnp.zeros(K, int)].astype(jnp.float32).sum())
    assert grad(jnp.zeros((2, 1), jnp.bfloat16))[0, 0] == 256


def test_an_id_beyond_the_table_reads_the_last_row_and_has_no_gradient():
    """``js.grad`` of ``table[ids]`` does the same."""
    table, ids = jnp.arange(4.0), jnp.array([5])
    assert table[ids] == 3
    assert not jax.grad(lambda table: table[ids].sum())(table).any()


def test_ids_of_64_bits_are_cut_silently():
    """Pages and ``dynamic.wide_ids`` reduce or split them before JAX sees them."""
    assert jnp.asarray(np.array([2**33 + 5])).tolist() == [5]
    with pytest.raises(OverflowError):
        jnp.asarray([2**33 + 5])


def test_the_dense_gradient_of_a_split_table_is_whole_on_every_device():
    """``js.Exchange`` and ``spread_ids`` keep rows where they are."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P("x"))
    table, ids = jax.device_put((jnp.zeros((40, 2)), jnp.zeros(8, jnp.int32)), split)
    grad = fast_jit(jax.grad(lambda table, ids: (table[ids] ** 2).sum()))(table, ids)
    assert grad.sharding.is_fully_replicated and not table.sharding.is_fully_replicated
