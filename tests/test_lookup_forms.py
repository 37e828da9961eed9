"""Every way to write a lookup: which give rows, which warn, which are none.

A form is one of three kinds:

- ``rows``: the gradient is IndexedSlices;
- ``warns``: the table is looked up, but not by whole rows or not only, so that its gradient
  is dense, and a warning names a line and what to write there;
- ``silent``: an ordinary weight, which is dense as it should be.

Each gradient is JAX's own.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    all_at_once,
    array,
    assert_close,
    dense,
    fast_jit,
    gradients,
    slow_unless,
)
from jax import lax
from jax.experimental import sparse
from jax.experimental.xla_metadata import set_xla_metadata

import jslices as js

V, D, F = 6, 4, 3
RNG = np.random.default_rng(11)
TABLE, STACKED, WEIGHT = (
    array(RNG.normal(size=size)) for size in [(V, D), (F, V, D), (D, 3)]
)
IDS = array([4, 1, 4, 0], np.int32)
FIELD_IDS = array([[4, 1], [0, 0], [5, 2]], np.int32)
ROW = array(np.linspace(0.5, 1.0, D))


def from_columns(table):
    """Of rows, some columns, and in another order."""
    return {
        "some": lambda: table[IDS, :2],
        "but_one": lambda: table[IDS, 1:],
        "one": lambda: table[IDS, 2],
        "last": lambda: table[IDS, -1],
        "reversed": lambda: table[IDS, ::-1],
        "every_other": lambda: table[IDS, ::2],
        "outer": lambda: table[IDS[:, None], jnp.array([0, 2])],
        "along_axis": lambda: jnp.take_along_axis(table, IDS[:, None], axis=0),
        "traced": lambda: table[IDS, IDS[1]],
        "of_two_axes": lambda: table[IDS.reshape(2, 2), 1:3],
        "of_one_row": lambda: table[IDS[0], 1:],
        "element": lambda: table[IDS[0], 2],
        "beyond": lambda: table[IDS + 3, 1:],
        "below": lambda: table[IDS - V - 1, 0],
        "filled": lambda: table.at[IDS + 3, 1:].get(mode="fill", fill_value=0.5),
        "clipped": lambda: table.at[IDS + 3, :3].get(mode="clip"),
        "vmapped": lambda: jax.vmap(lambda i: table[i, :2])(IDS),
        "vmapped_element": lambda: jax.vmap(lambda i: table[i, 3])(IDS),
        "largest": lambda: lax.top_k(table, 2)[0][IDS],
    }


def from_other_numbers(table):
    """Rows that have other numbers where they are looked up."""
    return {
        "padding_above": lambda: jnp.pad(table, ((1, 0), (0, 0)))[IDS],
        "padding_below": lambda: jnp.pad(table, ((0, 3), (0, 0)), constant_values=2.0)[
            IDS + 3
        ],
        "reversed": lambda: table[::-1][IDS],
        "flipped": lambda: jnp.flip(table)[IDS],
        "every_other": lambda: table[::2][IDS % 3],
        "backwards": lambda: table[4:0:-2][IDS % 2],
        "columns_too": lambda: table[1::2, ::2][IDS % 3],
        "rolled": lambda: jnp.roll(table, 2, axis=0)[IDS],
        "tiled": lambda: jnp.tile(table, (2, 1))[IDS + 4],
        "tiled_both_ways": lambda: jnp.tile(table, (3, 2))[IDS * 2, 2:],
        "tiled_for_each": lambda: jax.vmap(lambda t, i: t[i])(
            jnp.tile(table, (F, 1, 1)), FIELD_IDS
        ),
        "new_axis": lambda: table[None][0][IDS],
        "new_axes": lambda: table[None, :, None][0, :, 0][IDS],
        "split": lambda: jnp.split(table, 2)[1][IDS % 3],
        "split_unevenly": lambda: jnp.array_split(table, 4)[0][IDS % 2],
        "fields": lambda: table.reshape(F, 2, D)[1][IDS % 2],
        "field_and_id": lambda: table.reshape(F, 2, D)[IDS % F, IDS % 2],
        "each_field": lambda: table.reshape(F, 2, D)[jnp.arange(F), jnp.array([0, 1, 1])],
        "vmapped_fields": lambda: jax.vmap(lambda t, i: t[i])(
            table.reshape(F, 2, D), FIELD_IDS % 2
        ),
        "fields_share_ids": lambda: jax.vmap(lambda t: t[IDS % 2])(table.reshape(F, 2, D)),
        "transposed": lambda: table.T[:, IDS],
        "transposed_back": lambda: jnp.sin(table.T.T)[IDS],
        "of_three_axes": lambda: table.reshape(V, 2, 2).transpose(2, 0, 1)[:, IDS],
        "columns_vmapped": lambda: jax.vmap(lambda column: column[IDS], 1, 1)(table),
        "padding_row": lambda: table.at[0].set(0.0)[IDS],
        "last_row": lambda: table.at[-1].set(ROW)[IDS + 2],
        "row_of_an_id": lambda: table.at[IDS[1]].set(ROW)[IDS],
        "no_row": lambda: table.at[V + 2].set(ROW)[IDS],
        "row_of_each": lambda: jax.vmap(lambda i, row: table.at[i].set(row)[IDS[1:]])(
            IDS, jnp.tile(ROW, (4, 1)) * IDS[:, None]
        ),
        "row_of_each_in_turn": lambda: jax.vmap(
            lambda i: jax.vmap(lambda j: table.at[i].set(ROW * j).at[j].set(0.0)[IDS + 3])(
                IDS[::-1] - 2
            )
        )(IDS),
        "row_of_each_two": lambda: jax.vmap(
            lambda i: jax.vmap(
                lambda j: table.at[i * j % 9].set(ROW * j, mode="clip")[IDS]
            )(IDS[:3])
        )(IDS),
        "same_row_of_each": lambda: jax.vmap(
            lambda i: lax.cond(i > 1, lambda: table.at[1].set(ROW)[i], lambda: table[i + 1])
        )(IDS),
    }


@jax.custom_jvp
def soft(x):
    return jnp.tanh(x)


@soft.defjvp
def _(primals, tangents):
    return soft(*primals), 2 * (1 - soft(*primals) ** 2) * tangents[0]


@jax.custom_jvp
def shrink(x, by):
    return x * by, x.sum(axis=-1)


@shrink.defjvp
def _(primals, tangents):
    (x, by), (dx, dby) = primals, tangents
    return shrink(x, by), (3 * dx * by + x * dby, 2 * dx.sum(axis=-1))


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x * 4) / 4


straight_through.defvjp(
    lambda x: (straight_through(x), x), lambda x, g: (jnp.where(abs(x) < 1, 2 * g, 0.0),)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def reverse_gradient(x, by):
    return x


reverse_gradient.defvjp(lambda x, by: (x, None), lambda by, _, g: (-by * g,))


def doubled(f):
    """Twice the derivative of ``f``: every function that this makes is on one line."""
    g = jax.custom_jvp(lambda x: f(x))
    g.defjvp(lambda primals, tangents: (g(*primals), jax.jvp(f, primals, tangents)[1] * 2))
    return g


@jax.custom_gradient
def threefold(x):
    return soft(x), lambda g: g * 3


def from_steps(table):
    """Functions of each row by itself, before the lookup."""
    return {
        "matmul": lambda: (table @ WEIGHT)[IDS],
        "einsum": lambda: jnp.einsum("vd,de->ve", table, WEIGHT)[IDS],
        "two_layers": lambda: (jnp.tanh(table @ WEIGHT) @ WEIGHT.T)[IDS],
        "relu": lambda: jax.nn.relu(table)[IDS],
        "softplus": lambda: jax.nn.softplus(table)[IDS],
        "silu": lambda: jax.nn.silu(table)[IDS],
        "gelu": lambda: jax.nn.gelu(table)[IDS],
        "selu": lambda: jax.nn.selu(table)[IDS],
        "logsumexp": lambda: jax.nn.logsumexp(table, axis=1)[IDS],
        "softmax": lambda: jax.nn.softmax(table)[IDS],
        "custom_jvp": lambda: soft(jnp.sin(table))[IDS],
        "custom_jvp_of_two": lambda: shrink(table, ROW[0])[0][IDS],
        "custom_vjp": lambda: straight_through(table * 2)[IDS],
        "custom_vjp_of_zeros": lambda: (with_backward(lambda x, g: 0 * g)(table) + table)[
            IDS
        ],
        "custom_vjp_of_no_gradient": lambda: (
            with_backward(lambda x, g: None)(table) * table
        )[IDS],
        "custom_vjp_with_a_number": lambda: reverse_gradient(table, 0.3)[IDS],
        "custom_made_alike": lambda: doubled(doubled(jnp.sin))(table)[IDS],
        "custom_gradient": lambda: threefold(threefold(table))[IDS],
        "custom_of_a_row": lambda: soft(table[0])[None] * table[IDS],
        "rfft": lambda: jnp.abs(jnp.fft.rfft(table)[IDS]),
        "mapped": lambda: lax.map(lambda row: jnp.sin(row) @ WEIGHT, table)[IDS],
        "mapped_with_others": lambda: lax.map(
            lambda x: x[0] * x[1], (jnp.sin(table), jnp.arange(V, dtype="f"))
        )[IDS],
        "scanned_backwards": lambda: lax.scan(
            lambda c, row: (c, c * jnp.tanh(row)), 2.0, table, reverse=True, unroll=2
        )[1][::-1][IDS],
        "sum_of_slices": lambda: (table[:-2] + table[1:-1] * table[2:])[IDS % 4],
    }


def from_single_rows(table):
    """One row by its number, beside a lookup."""
    return {
        "first": lambda: table[0][None] * table[IDS],
        "numpy": lambda: table[np.int64(2)][None] * table[IDS],
        "last": lambda: table[-1][None] * table[IDS],
        "of_arrays": lambda: (
            jnp.concatenate([table, jnp.ones((1, D))])[2][None] * table[IDS]
        ),
        "of_a_step": lambda: jnp.sin(table)[3][None] * table[IDS],
        "slice": lambda: table[2:3] * table[IDS],
        "twice": lambda: (table[0] + table[0])[None] * table[IDS],
    }


def from_stacked(tables):
    """Rows of tables in one array ``[F, V, D]``."""

    def loop(body, *xs, **options):
        return lax.scan(lambda c, x: (c, body(*x)), 0.0, xs, **options)[1]

    layers, halves = jnp.arange(F), tables.reshape(F, 2, 3, D)
    return {
        "one": lambda: tables[1][IDS],
        "one_cast": lambda: jnp.take(tables[-1] * 2, IDS, axis=0),
        "one_at_once": lambda: tables[2, IDS],
        "one_row": lambda: tables[IDS[0] % F, IDS[1]],
        "each": lambda: tables[layers[:, None], FIELD_IDS],
        "each_outer": lambda: tables[layers[None], IDS[:, None]],
        "computed": lambda: tables[IDS % F, IDS],
        "filled": lambda: tables.at[IDS % F, IDS + 3].get(mode="fill", fill_value=0.5),
        "clipped": lambda: tables.at[IDS, IDS + 3].get(mode="clip"),
        "all": lambda: tables[:, IDS],
        "padding_row_of_each": lambda: tables.at[:, 1].set(0.5)[layers, IDS[:F]],
        "row_of_each": lambda: jax.vmap(lambda t, i: t.at[i].set(ROW * i)[IDS])(
            tables, IDS[:F]
        ),
        "flat": lambda: tables.reshape(F * V, D)[V * (IDS % F) + IDS],
        "vmapped": lambda: jax.vmap(lambda t, i: t[i])(tables, FIELD_IDS),
        "vmapped_second": lambda: jax.vmap(lambda t, i: t[i], (1, 0))(
            tables, jnp.tile(IDS % F, (V, 1))
        ),
        "vmapped_alike": lambda: jax.vmap(lambda t: t[IDS])(tables),
        "vmapped_twice": lambda: jax.vmap(lambda i: jax.vmap(lambda t: t[i])(tables))(IDS),
        "scan_by_number": lambda: loop(lambda n: tables[n, IDS], layers),
        "scan_of_table": lambda: loop(
            lambda n: jnp.take(jnp.sin(tables[n]), IDS, axis=0), layers
        ),
        "scan_of_row": lambda: loop(lambda n: tables[n, IDS[0]], layers),
        "scanned": lambda: loop(lambda t: jnp.sin(t)[IDS], tables),
        "scanned_with_ids": lambda: loop(lambda t, i: t[i], tables, FIELD_IDS),
        "scanned_reversed": lambda: loop(
            jax.checkpoint(lambda t: t[IDS]), tables, reverse=True
        ),
        "scanned_twice": lambda: loop(lambda t: loop(lambda u: u[IDS % 3], t), halves),
        "scanned_second": lambda: loop(lambda t: t[IDS % F], jnp.moveaxis(tables, 0, 1)),
        "in_a_branch": lambda: lax.cond(
            IDS[0] > 2, lambda: tables[0][IDS], lambda: tables[1][IDS]
        ),
        "one_hots": lambda: jax.vmap(lambda t, i: one_hot(i, t) @ t)(tables, FIELD_IDS + 4),
        "one_hots_alike": lambda: jax.vmap(lambda t: one_hot(IDS + 3, t) @ t)(tables),
        "placed": lambda: jax.device_put(tables, jax.memory.Space.Device)[1, IDS],
        "with_metadata": lambda: set_xla_metadata(tables, about="rows")[1, IDS],
        "products": lambda: jax.vmap(lambda t: (t @ WEIGHT)[IDS])(tables),
        "products_of_one": lambda: (tables @ WEIGHT)[1, IDS],
        "scanned_products": lambda: loop(lambda t: t[IDS], jnp.sin(tables) @ WEIGHT),
        "one_hots_first": lambda: jnp.einsum(
            "kv,fvd->fkd", one_hot(IDS, tables[0]), tables
        ),
        "one_hots_last": lambda: jnp.einsum("fvd,kv->kdf", tables, one_hot(IDS, tables[0])),
        "scanned_one_hots": lambda: loop(lambda t, i: one_hot(i, t) @ t, tables, FIELD_IDS),
        "bcoo": lambda: jax.vmap(lambda t: BCOO @ t)(tables),
    }


def one_hot(ids, like, **how):
    return jax.nn.one_hot(ids, like.shape[0], **how)


def from_one_hots(table):
    """Products with a one-hot array; of ids out of range it holds zeros."""
    ids, bad, every = IDS.reshape(2, 2), IDS.reshape(2, 2) + 3, jnp.arange(V)
    bf16 = table.astype(jnp.bfloat16)
    pair = table.reshape(F, 2, D)
    return {
        "matmul": lambda: one_hot(ids, table) @ table,
        "beyond": lambda: one_hot(bad, table) @ table,
        "below": lambda: one_hot(ids - 3, table) @ table,
        "dot": lambda: jnp.dot(one_hot(bad, table), table, precision="highest"),
        "einsum": lambda: jnp.einsum("bsv,vd->dsb", one_hot(ids, table), table),
        "table_first": lambda: jnp.einsum("vd,bsv->dsb", table, one_hot(ids, table)),
        "transposed": lambda: table.T @ one_hot(IDS + 3, table, axis=0),
        "both_transposed": lambda: jnp.einsum("dv,bsv->bsd", table.T, one_hot(bad, table)),
        "moved_back": lambda: jnp.swapaxes(one_hot(IDS, table, axis=0), 0, 1) @ table,
        "tensordot": lambda: jnp.tensordot(one_hot(ids, table), table.reshape(V, 2, 2), 1),
        "compared": lambda: (
            (bad[..., None] == every[None, None]).astype(table.dtype) @ table
        ),
        "the_other_way": lambda: (every[None] == IDS[:, None]).astype(table.dtype) @ table,
        "of_lists": lambda: (
            (
                lax.broadcasted_iota(jnp.int8, (4, V), 1) == IDS.astype(jnp.int8)[:, None]
            ).astype(jnp.int8)
            @ table
        ),
        "an_id": lambda: one_hot(IDS[0], table) @ table,
        "as_bfloat16": lambda: one_hot(bad, table, dtype=jnp.bfloat16) @ bf16,
        "as_integers": lambda: (
            one_hot(bad, table, dtype=jnp.int8).astype(table.dtype) @ table
        ),
        "into_float32": lambda: jnp.matmul(
            one_hot(ids, table, dtype=jnp.bfloat16), bf16, preferred_element_type="float32"
        ),
        "flattened": lambda: one_hot(bad, table).reshape(-1, V) @ table,
        "elsewhere_too": lambda: one_hot(bad, table) @ table * one_hot(bad, table).sum(),
        "after_steps": lambda: one_hot(bad, table) @ jnp.sin(table * 2),
        "of_other_rows": lambda: one_hot(ids, table[::2]) @ table[::2],
        "column": lambda: one_hot(ids, table) @ table[:, 1],
        "vmapped": lambda: jax.vmap(jax.vmap(lambda i: one_hot(i, table) @ table))(bad),
        "each_field": lambda: jax.vmap(lambda t, i: one_hot(i, t) @ t)(pair, FIELD_IDS),
        "fields": lambda: jnp.einsum("flv,fvd->lfd", one_hot(FIELD_IDS, pair[0]), pair),
    }


def bcoo(matrix, nse=None):
    """``BCOO.fromdense``, of which each operation would be compiled by itself."""
    places = np.argwhere(matrix)
    empty = ((nse or len(places)) - len(places)) * [matrix.shape]
    numbers = np.append(matrix[tuple(places.T)], len(empty) * [0.0])
    places = np.concatenate([places, np.reshape(empty, (-1, matrix.ndim))])
    return sparse.BCOO((array(numbers), array(places, np.int32)), shape=matrix.shape)


def stack_of_bcoo(matrices):
    each = [bcoo(matrix, np.count_nonzero(matrices, (1, 2)).max()) for matrix in matrices]
    data, indices = array([m.data for m in each]), array([m.indices for m in each], "i4")
    return sparse.BCOO((data, indices), shape=matrices.shape)


def bcsr(matrix):
    """``BCSR`` of a BCOO in order."""
    rows, columns = np.moveaxis(np.asarray(matrix.indices), -1, 0)
    counts = [np.sum(rows == row, -1) for row in range(matrix.shape[-2])]
    starts = np.cumsum([np.zeros_like(counts[0]), *counts], axis=0).T
    parts = matrix.data, array(columns, np.int32), array(starts, np.int32)
    return sparse.BCSR(parts, shape=matrix.shape)


MATRICES = np.where(RNG.random((2, 3, V)) < 0.5, RNG.normal(size=(2, 3, V)), 0.0)
STACK_OF_BCOO = stack_of_bcoo(MATRICES)
STACK_OF_BCSR = bcsr(STACK_OF_BCOO)
THREE_AXES = bcoo(MATRICES)
PADDED_BCSR = bcsr(bcoo(MATRICES[0], nse=15))
VECTOR = bcoo(MATRICES[0, 0])
NARROW = stack_of_bcoo(MATRICES[..., :3])
NUMBERS = array(RNG.normal(size=8))
# Unsorted, with duplicates and padding: a row, a column or both out of range.
PLACES = [[2, 5], [0, 1], [2, 5], [1, V], [3, V], [3, 2], [0, 0], [-1, -2]]
BCOO = sparse.BCOO((NUMBERS, array(PLACES, np.int32)), shape=(3, V))


def from_sparse_matrices(table):
    over, pair = (((2,), (0,)), ((), ())), table.reshape(2, 3, D)
    return {
        "bcoo": lambda: BCOO @ table,
        "after_a_step": lambda: BCOO @ jnp.sin(table),
        "of_one_number": lambda: BCOO @ table[:, 1],
        "bcsr": lambda: PADDED_BCSR @ table,
        "bcsr_of_numbers": lambda: PADDED_BCSR @ table[:, 1],
        "table_first": lambda: table.T @ BCOO.T,
        "transposed": lambda: BCOO.T @ table[:3],
        "of_three_axes": lambda: THREE_AXES @ table,
        "batched": lambda: STACK_OF_BCOO @ table,
        "batched_bcsr": lambda: sparse.bcsr_dot_general(
            STACK_OF_BCSR, table, dimension_numbers=over
        ),
        "vmapped": lambda: jax.vmap(lambda m: m @ table)(STACK_OF_BCOO),
        "each_field": lambda: jax.vmap(lambda m, t: m @ t)(NARROW, pair),
        "vector": lambda: VECTOR @ table,
        "einsum": lambda: sparse.sparsify(lambda m, t: jnp.einsum("vd,bv->db", t, m))(
            BCOO, table
        ),
        "empty": lambda: sparse.empty((3, V)) @ table,
    }


def nested(table):
    """Some of all these forms inside loops, branches and checkpoints."""

    def one(i):
        columns = table[i, 1:]
        unpadded = jnp.pad(table, ((1, 0), (0, 0)))[i]
        rows = (
            columns.sum() * jax.nn.relu(table)[i].sum() + (table[0] * unpadded).sum() ** 2
        )
        weights = sparse.BCOO((NUMBERS[:2] * i, jnp.stack([i, i + 4])[:, None]), shape=(V,))
        products = one_hot(i, table) @ table * (weights @ jnp.tanh(table))
        return rows + products.sum()

    def in_a_branch(i):
        both = lambda: soft(table[::-1] * 2)[i] + one_hot(i, table) @ soft(table)  # noqa: E731
        return lax.cond(i > 0, both, lambda: ROW)

    return {
        "vmap": lambda: jax.vmap(one)(IDS),
        "scan": lambda: lax.scan(lambda c, i: (c * 0.5 + one(i), None), 0.0, IDS)[0],
        "cond": lambda: lax.cond(IDS[0] > 2, lambda: one(IDS[0]), lambda: 0.0),
        "checkpoint": lambda: jax.checkpoint(
            lambda t: one(IDS[1]) + t[IDS, ::-1].sum() + one_hot(IDS, t) @ t
        )(table),
        "fori_loop": lambda: lax.fori_loop(
            0, 3, lambda k, c: c + soft(table[::-1])[k, 0], 0.0
        ),
        "jit": lambda: jax.jit(
            lambda t, ids: t.at[0].set(0.0)[ids, :2].sum() + one_hot(ids, t) @ t
        )(table, IDS),
        "vmapped_cond": lambda: jax.vmap(in_a_branch)(IDS),
    }


ROWS = {
    f.__name__: (f, TABLE)
    for f in (
        *(from_columns, from_other_numbers, from_steps, from_single_rows),
        *(from_one_hots, from_sparse_matrices, nested),
    )
}
ROWS["from_stacked"] = from_stacked, STACKED
QUICK = "from_columns", "from_single_rows"


def losses(forms, table):
    """A loss for each form, of a function that returns them by name, to be called."""

    def make(name):
        return lambda table: (forms(table)[name]() ** 3).sum()

    return {name: make(name) for name in forms(table)}


@functools.cache
def by_jax(name):
    """JAX's value and gradient of each form; with them packed tables are compared, too."""
    forms, table = ROWS[name]
    theirs = {form: jax.value_and_grad(f) for form, f in losses(forms, table).items()}
    return all_at_once(theirs, table)


@pytest.fixture(
    scope="module", params=slow_unless(zip(ROWS), lambda case: case[0] in QUICK)
)
def rows(request):
    forms, table = ROWS[request.param]
    functions = losses(forms, table)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = all_at_once({n: js.value_and_grad(f) for n, f in functions.items()}, table)
    return ours, by_jax(request.param)


def test_forms_that_give_rows(rows):
    found, wanted = rows
    without = [name for name, (_, grad) in found.items() if not js.is_slices(grad)]
    assert not without
    assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    grads = {name: grad for name, (_, grad) in found.items()}
    assert all(len(grad.indices) <= 4 * F * V for grad in grads.values())
    if "scanned" in grads:
        assert {grad.row_axes for grad in grads.values()} == {2}
        assert len(grads["scan_by_number"].indices) == F * len(IDS)


# --- no rows, and a warning -------------------------------------------------------------


def with_backward(backward):
    """A function with ``backward(x, cotangent)`` for its derivative."""
    function = jax.custom_vjp(lambda x: x * 2)
    function.defvjp(lambda x: (x * 2, x), lambda x, g: (backward(x, g),))
    return function


# Linear, or wrong for rows: JAX gives the backward the sum of what comes from all lookups,
# zero for rows that are not looked up.
NOT_LINEAR = {
    "clipped": lambda x, g: jnp.clip(g, -0.1, 0.1),
    "clipped_norms": lambda x, g: g / jnp.maximum(jnp.linalg.norm(g, axis=-1)[:, None], 1),
    "integers": lambda x, g: (g * 4).astype(jnp.int32).astype(jnp.float32),
    "ones": lambda x, g: jnp.ones_like(x),
    "ones_of_a_call": lambda x, g: jax.jit(jnp.ones_like)(g),
    "of_the_input_alone": lambda x, g: jnp.sin(x),
    "plus_one": lambda x, g: g + 1,
    "one_where": lambda x, g: jnp.where(x > 0, g, 1.0),
}


def own(backward):
    return lambda t: with_backward(backward)(t)[IDS]


def solved(table):
    matvec = lambda x: x * jnp.exp(table[IDS]).sum()  # noqa: E731
    return jax.scipy.sparse.linalg.cg(matvec, jnp.ones(2), maxiter=2)[0]


def root(table):
    f = lambda x: x - table[IDS].sum()  # noqa: E731
    return lax.custom_root(f, 0.0, lambda f, x: x - f(x), lambda g, y: y / g(1.0))


WHOLE = "whole rows of a table [V, D]"
# Of small arrays none is warned of.
LARGE = array(np.tile(TABLE, (700, 1)))
FULL = array(np.broadcast_to(IDS, (D, 4)).T, np.int32)
M, WEIGHED = (
    array([[True], [False], [True], [False]], bool),
    "weights[..., None] * table[ids]",
)
# By name: what is looked up, how, and what the warning advises.
WARNS = {
    "scanned": (LARGE, lambda t: lax.map(lambda row: jnp.sin(row)[IDS % D], t), "outside"),
    "carried": (
        LARGE,
        lambda t: lax.scan(lambda sum, row: (sum + row, sum * row), t[0], t)[1][IDS],
        "outside",
    ),
    "elements": (LARGE, lambda t: t[IDS, jnp.array([0, 1, 1, 2])], "t[i * n + j]"),
    "columns": (LARGE, lambda t: t[:, IDS % D], WHOLE),
    "torch_gather": (LARGE, lambda t: jnp.take_along_axis(t, FULL, axis=0), WHOLE),
    "flat": (LARGE, lambda t: t.reshape(-1)[IDS], WHOLE),
    "scaled_row": (LARGE, lambda t: t.at[0].mul(0.0)[IDS], "before this step"),
    "mixed_rows": (LARGE, lambda t: jax.nn.softmax(t, axis=0)[IDS], "of each of them"),
    "cumulative": (LARGE, lambda t: jnp.cumsum(t, axis=0)[IDS], "of each of them"),
    "mutable": (LARGE, lambda t: jax.new_ref(t)[IDS], "table[ids]"),
    "beside_norms": (LARGE, lambda t: jax.nn.log_softmax(t)[IDS, IDS % D], WHOLE),
    **{n: (LARGE, own(backward), "their sum") for n, backward in NOT_LINEAR.items()},
    "weighted": (LARGE, lambda t: (one_hot(IDS, t) * 0.5) @ t, WEIGHED),
    "smoothed": (LARGE, lambda t: (one_hot(IDS, t) * 0.9 + 0.1) @ t, WEIGHED),
    "masked": (LARGE, lambda t: jnp.where(M, one_hot(IDS, t), 0.0) @ t, WEIGHED),
    "words": (LARGE, lambda t: one_hot(FIELD_IDS, t).sum(1) @ t, WEIGHED),
    "narrow_ids": (
        LARGE,
        lambda t: jax.nn.one_hot(IDS.astype("uint8"), len(t)) @ t,
        WEIGHED,
    ),
    "added_row": (LARGE, lambda t: t.at[IDS[0]].add(1.0)[IDS], "before this step"),
    "added_row_in_a_branch": (
        LARGE,
        lambda t: jax.vmap(
            lambda i: lax.cond(i > 1, lambda: t.at[1].add(1.0)[i].sum(), lambda: 0.0)
        )(IDS),
        "before this step",
    ),
    "in_a_solver": (LARGE, solved, "before the solver"),
    "in_a_root": (LARGE, root, "table[ids]"),
}


@pytest.fixture(scope="module")
def dense_lookups():
    def make(table, form):
        return lambda grad: grad(lambda table: (form(table) ** 3).sum())(table)

    losses = {name: make(table, form) for name, (table, form, _) in WARNS.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = all_at_once({n: lambda f=f: f(js.grad) for n, f in losses.items()})
    return (
        caught,
        ours,
        all_at_once({n: lambda f=f: f(jax.grad) for n, f in losses.items()}),
    )


@pytest.mark.parametrize("name", WARNS)
def test_forms_that_warn(name, dense_lookups):
    caught, found, wanted = dense_lookups
    _, form, advice = WARNS[name]
    lines = {form.__code__.co_firstlineno + i for i in range(3)}
    texts = [str(w.message) for w in caught if w.lineno in lines]
    assert any("is dense" in text and advice in text for text in texts)
    assert not js.is_slices(found[name])
    assert_close(found[name], wanted[name], rtol=1e-4)


@pytest.mark.filterwarnings("ignore::jslices.DensificationWarning")
def test_a_row_made_of_many_is_one_use_of_the_table():
    """Parallel prefix sums: the program grows with the logarithm of V, as JAX's does."""

    def sums(t):
        if len(t) == 1:
            return t
        odd = sums(t[::2] + t[1::2])
        even = jnp.concatenate([t[:1], odd[:-1] + t[2::2]])
        return jnp.stack([even, odd], 1).reshape(t.shape)

    loss = lambda t: (sums(t)[IDS] ** 3).sum()  # noqa: E731
    sizes = {}
    for height in (64, 1024):
        table = array(RNG.normal(size=(height, D)))
        sizes[height] = len(jax.make_jaxpr(js.grad(loss))(table).eqns)
    assert sizes[1024] < 2 * sizes[64]
    found = fast_jit(js.grad(loss))(table)
    assert not js.is_slices(found)
    assert_close(found, fast_jit(jax.grad(loss))(table), rtol=1e-4, atol=1e-5)


def test_functions_made_alike_are_told_apart():
    """The inner one mixes rows, and only the derivative of the outer one calls it."""
    centred = doubled(lambda x: x - x.mean(0, keepdims=True))
    loss = lambda t: (doubled(centred)(t)[IDS] ** 2).sum()  # noqa: E731
    with pytest.warns(js.DensificationWarning, match="is dense"):
        found = js.value_and_grad(loss)(LARGE)
    assert_close(found, jax.value_and_grad(loss)(LARGE))


def test_the_report_names_lookups_that_give_no_rows():
    report = js.explain(lambda t: (t[:, IDS % D] ** 2).sum())(TABLE)
    (leaf,) = report.leaves
    assert leaf.kind == "dense" and leaf.rows == 0 and not leaf.lookups
    assert [line.file for line in leaf.unread] == [__file__]
    assert "looked up, but no rows: " in str(report) and WHOLE in str(report)


def test_single_numbers_of_a_flat_parameter_are_rows():
    """What the warning advises for ``t[i, j]``."""
    i, j = IDS, np.array([0, 1, 1, 2])

    @fast_jit
    def both(table):
        wanted = jax.grad(lambda t: (t[i, j] ** 3).sum())(table)
        grad = js.grad(lambda t: (t[i * D + j] ** 3).sum())(table.reshape(-1))
        return grad, wanted.reshape(-1)

    grad, wanted = both(TABLE)
    assert js.is_slices(grad) and grad.values.shape == (4,)
    assert_close(grad, wanted)


def test_products_of_many_more_rows_than_the_table_has():
    """Types of tokens, of which there are few, or all edges of a graph: dense as ever."""
    kinds, wide = np.arange(8 * V) % V, np.tile(TABLE, (1, 1000))
    edges = np.stack([kinds // 3, kinds], axis=1)
    graph = sparse.BCOO((np.cos(kinds).astype(np.float32), edges), shape=(2, V))
    forms = {"tokens": lambda t: one_hot(kinds, t) @ t, "edges": lambda t: graph @ t}

    def every(grad):
        return {n: grad(lambda t, f=f: (f(t) ** 3).sum()) for n, f in forms.items()}

    wanted = all_at_once(every(jax.grad), wide)
    for rows in (None, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if rows else "error")
            found = all_at_once(every(functools.partial(js.grad, sparse=rows)), wide)
        assert all(js.is_slices(grad) == bool(rows) for grad in found.values())
        assert_close(found, wanted, rtol=1e-4)


# --- no lookup --------------------------------------------------------------------------


def sliced(w, x):
    return x @ w[:, 1:3], x[:, :2] @ w[:2], x @ w[:, 0], x @ w[::2].T, w[1:]


def one_row(w, x):
    return x @ w[0], w[-1], w[np.int64(1)], w[2:3]


def layers(w, x):
    for matrix in w.reshape(2, 2, D):
        x = x[:, :2] @ matrix
    return x


def scanned_layers(w, x):
    return lax.scan(lambda x, row: (x * row[None], None), x, w)[0]


def heads(w, x):
    q, k = jnp.split(w, 2, axis=1)
    a, b = jnp.split(w, 2)
    return x @ q, x @ k, x[:, :2] @ a, x @ w.reshape(D, 2, 2)[:, 1], x[:, :2] @ b


def norm(w, x):
    return jax.nn.relu(x * w[0][None] + w[1][None]), w / jnp.linalg.norm(
        w, axis=0, keepdims=True
    )


def features_first(w, x):
    """Like layers that multiply from the left, and the loss of a classifier."""
    scores = jax.vmap(lambda row: w @ row)(x)
    chosen = jax.nn.log_softmax(scores)[jnp.arange(len(x)), jnp.array([0, 2, 1])]
    return chosen, jnp.take_along_axis(scores, jnp.array([[1], [0], [3]]), axis=1)


def restored(w, x):
    """A mask token beside other tokens, and their order restored."""
    masks = jnp.broadcast_to(w.sum(0)[None], (3, D))
    return jnp.concatenate([x, masks])[jnp.array([0, 3, 1, 4, 2, 5])]


def knots(w, x):
    return jnp.cumsum(jax.nn.softplus(w), axis=0)[jnp.array([0, 2])]


def products(w, x):
    """One-hot arrays that pick no rows of a weight."""
    kinds = jnp.array([0, 2, 1])
    labels = jax.nn.one_hot(kinds, D)
    experts = jnp.einsum("te,td->ed", jax.nn.one_hot(kinds, 2), x)  # tokens by expert
    return (x @ w) * labels, labels * 0.9 + w[0][None], jnp.eye(D) @ w, experts @ w


def matrix(w, x):
    return jnp.diag(w), jnp.trace(w), jnp.tril(w), jnp.linalg.cholesky(w @ w.T + jnp.eye(D))


WEIGHTS = [
    *(sliced, one_row, layers, scanned_layers, heads, norm, features_first, restored),
    *(knots, products, matrix),
]


def test_an_ordinary_weight_stays_dense_and_silent():
    x = jnp.asarray(RNG.normal(size=(3, D)), jnp.float32)
    weight = jnp.asarray(RNG.normal(size=(D, D)), jnp.float32)

    def make(use):
        def loss(weight):
            return sum((jnp.sin(out) ** 2).sum() for out in jax.tree.leaves(use(weight, x)))

        return loss

    functions = {use.__name__: make(use) for use in WEIGHTS}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = all_at_once({n: js.grad(f) for n, f in functions.items()}, weight)
    assert not any(map(js.is_slices, found.values()))
    wanted = all_at_once({n: jax.grad(f) for n, f in functions.items()}, weight)
    assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_layer_is_named_as_what_needs_its_weight():
    def loss(weight, x):
        hidden = jnp.tanh(weight @ x)  # a view, as far as the rows of the weight go
        return (hidden - hidden.mean(axis=0, keepdims=True)).sum()

    (leaf,) = js.explain(loss)(WEIGHT, jnp.ones((3, 2))).leaves
    assert (leaf.kind, leaf.dense_use, leaf.lookups) == ("dense", "dot_general", ())
    assert leaf.dense_line.line == loss.__code__.co_firstlineno + 1


# --- anywhere in a program --------------------------------------------------------------


@jax.custom_jvp
def steep(x):
    return jnp.sin(x)


@steep.defjvp
def _steep(primals, tangents):
    """The output is computed here as well, so its derivative is that of the sine."""
    return jnp.sin(*primals), 3 * jnp.cos(*primals) * tangents[0]


def test_derivatives_of_derivatives_go_through_custom_ones():
    forms = {
        "relu": lambda t: jax.nn.relu(t)[IDS],
        "softplus": lambda t: jax.nn.softplus(t)[IDS],
        "custom_jvp": lambda t: soft(t)[IDS],
        "its own output": lambda t: steep(t)[IDS],
        "custom_vjp": lambda t: straight_through(t)[IDS],
    }

    def make(grad, form):
        inner = grad(lambda t: (form(t) ** 3).sum())
        return jax.grad(
            lambda t: sum((x**2).sum() for x in jax.tree.leaves(dense(inner(t))))
        )

    found = all_at_once({n: make(js.grad, f) for n, f in forms.items()}, TABLE)
    wanted = all_at_once({n: make(jax.grad, f) for n, f in forms.items()}, TABLE)
    assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_derivatives_of_values_that_get_no_gradient_go_through_custom_ones():
    """In a gradient JAX runs the forward rule, which another derivative then is that of."""
    stop = jax.lax.stop_gradient
    forms = {
        "compared": lambda z, t: jnp.where(jnp.isfinite(z[:2]), z[:2], 0),
        "compared at ids": lambda z, t: jnp.where(z[IDS] > 0, z[IDS], 0),
        "stopped": lambda z, t: stop(z[:2]) * z[:2],
        "stopped before it is read": lambda z, t: (stop(z) * t)[IDS],
        "rows that it tells": lambda z, t: t[jnp.argmax(z[:2, 0]) + IDS],
    }
    twice = jax.custom_vjp(jnp.sin)
    twice.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))
    functions = {"custom_vjp": twice, "custom_jvp": steep}
    cases = {(x, y): (functions[x], forms[y]) for x in functions for y in forms}

    def make(grad, function, form):
        def loss(t):
            z = function(t)
            return (form(z, t) ** 3).sum(), z[:2]

        def inner(t):
            slices, aux = grad(loss, has_aux=True)(t)
            return dense(slices), aux

        return lambda t: jax.jvp(inner, (t,), (jnp.cos(t),))

    found = all_at_once({n: make(js.grad, *x) for n, x in cases.items()}, TABLE)
    wanted = all_at_once({n: make(jax.grad, *x) for n, x in cases.items()}, TABLE)
    assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_padding_row_gets_no_gradient():
    grad = fast_jit(js.grad(lambda t: (t.at[0].set(1.0)[IDS] ** 2).sum()))(TABLE)
    np.testing.assert_array_equal(grad.indices, [4, 1, 4, V])


def test_a_row_that_replaces_another_is_differentiated():
    fun = lambda t, row: (t.at[IDS[1]].set(row)[IDS] ** 3).sum()  # noqa: E731
    grads, wanted = gradients(fun, TABLE, ROW, argnums=(0, 1))
    assert js.is_slices(grads[0]) and not js.is_slices(grads[1])
    assert_close(grads, wanted)


def test_the_weight_of_a_product_is_differentiated():
    fun = lambda t, w: (jnp.tanh(t @ w)[IDS] ** 3).sum()  # noqa: E731
    grads, wanted = gradients(fun, TABLE, WEIGHT, argnums=(0, 1))
    assert js.is_slices(grads[0]) and not js.is_slices(grads[1])
    assert_close(grads, wanted, rtol=1e-4)


def test_the_whole_table_is_not_computed():
    rows = 50_000
    forms = [
        *(lambda t: t[IDS, 1:], lambda t: t[IDS, ::-1], lambda t: t[::-1][IDS]),
        *(lambda t: jnp.pad(t, ((1, 0), (0, 0)))[IDS], lambda t: t.at[0].set(0.0)[IDS]),
        *(lambda t: jax.nn.softplus(t)[IDS], lambda t: straight_through(t)[IDS]),
        *(lambda t: (t @ WEIGHT)[IDS], lambda t: t.T[:, IDS], lambda t: t[-1]),
        lambda t: t.reshape(2, -1, D)[1][IDS],
        *(lambda t: one_hot(IDS, t) @ t, lambda t: jnp.sin(t).T @ one_hot(IDS, t, axis=0)),
        *(lambda t: BCOO @ t[:V], lambda t: PADDED_BCSR @ t[2 : V + 2]),
    ]
    grads = [js.grad(lambda t, f=f: (f(t) ** 3).sum() + t[IDS].sum()) for f in forms]
    table = jax.ShapeDtypeStruct((rows, D), jnp.float32)
    compiled = jax.jit(lambda table: [grad(table) for grad in grads]).lower(table).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < rows * D  # a byte an element
