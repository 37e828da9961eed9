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
from helpers import all_at_once, assert_close
from jax import lax

import jslices as js

V, D, F = 6, 4, 3
RNG = np.random.default_rng(11)
TABLE = jnp.asarray(RNG.normal(size=(V, D)), jnp.float32)
STACKED = jnp.asarray(RNG.normal(size=(F, V, D)), jnp.float32)
WEIGHT = jnp.asarray(RNG.normal(size=(D, 3)), jnp.float32)
IDS = jnp.array([4, 1, 4, 0])
FIELD_IDS = jnp.array([[4, 1], [0, 0], [5, 2]])
ROW = jnp.linspace(0.5, 1.0, D)


def from_columns(table):
    """Of rows, some columns, and in another order."""
    return {
        "some": table[IDS, :2],
        "but_one": table[IDS, 1:],
        "one": table[IDS, 2],
        "last": table[IDS, -1],
        "reversed": table[IDS, ::-1],
        "every_other": table[IDS, ::2],
        "outer": table[IDS[:, None], jnp.array([0, 2])],
        "traced": table[IDS, IDS[1]],
        "of_two_axes": table[IDS.reshape(2, 2), 1:3],
        "of_one_row": table[IDS[0], 1:],
        "element": table[IDS[0], 2],
        "beyond": table[IDS + 3, 1:],
        "below": table[IDS - V - 1, 0],
        "filled": table.at[IDS + 3, 1:].get(mode="fill", fill_value=0.5),
        "clipped": table.at[IDS + 3, :3].get(mode="clip"),
        "vmapped": jax.vmap(lambda i: table[i, :2])(IDS),
        "vmapped_element": jax.vmap(lambda i: table[i, 3])(IDS),
    }


def from_other_numbers(table):
    """Rows that have other numbers where they are looked up."""
    return {
        "padding_above": jnp.pad(table, ((1, 0), (0, 0)))[IDS],
        "padding_below": jnp.pad(table, ((0, 3), (0, 0)), constant_values=2.0)[IDS + 3],
        "reversed": table[::-1][IDS],
        "flipped": jnp.flip(table)[IDS],
        "every_other": table[::2][IDS % 3],
        "backwards": table[4:0:-2][IDS % 2],
        "columns_too": table[1::2, ::2][IDS % 3],
        "rolled": jnp.roll(table, 2, axis=0)[IDS],
        "new_axis": table[None][0][IDS],
        "new_axes": table[None, :, None][0, :, 0][IDS],
        "split": jnp.split(table, 2)[1][IDS % 3],
        "split_unevenly": jnp.array_split(table, 4)[0][IDS % 2],
        "fields": table.reshape(F, 2, D)[1][IDS % 2],
        "field_and_id": table.reshape(F, 2, D)[IDS % F, IDS % 2],
        "each_field": table.reshape(F, 2, D)[jnp.arange(F), jnp.array([0, 1, 1])],
        "vmapped_fields": jax.vmap(lambda t, i: t[i])(
            table.reshape(F, 2, D), FIELD_IDS % 2
        ),
        "fields_share_ids": jax.vmap(lambda t: t[IDS % 2])(table.reshape(F, 2, D)),
        "padding_row": table.at[0].set(0.0)[IDS],
        "last_row": table.at[-1].set(ROW)[IDS + 2],
        "row_of_an_id": table.at[IDS[1]].set(ROW)[IDS],
        "no_row": table.at[V + 2].set(ROW)[IDS],
    }


def from_steps(table):
    """Functions of each row by itself, before the lookup."""
    return {
        "matmul": (table @ WEIGHT)[IDS],
        "einsum": jnp.einsum("vd,de->ve", table, WEIGHT)[IDS],
        "two_layers": (jnp.tanh(table @ WEIGHT) @ WEIGHT.T)[IDS],
        "rfft": jnp.abs(jnp.fft.rfft(table)[IDS]),
    }


def from_single_rows(table):
    """One row by its number, beside a lookup."""
    return {
        "first": table[0][None] * table[IDS],
        "numpy": table[np.int64(2)][None] * table[IDS],
        "last": table[-1][None] * table[IDS],
        "of_a_step": jnp.sin(table)[3][None] * table[IDS],
        "slice": table[2:3] * table[IDS],
        "twice": (table[0] + table[0])[None] * table[IDS],
    }


ROWS = {
    f.__name__: f for f in (from_columns, from_other_numbers, from_steps, from_single_rows)
}


def losses(forms, table):
    """A loss for each form of a function that returns them by name."""

    def make(name):
        return lambda table: (forms(table)[name] ** 3).sum()

    return {name: make(name) for name in jax.eval_shape(forms, table)}


@pytest.fixture(scope="module", params=ROWS)
def rows(request):
    functions = losses(ROWS[request.param], TABLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = all_at_once({n: js.value_and_grad(f) for n, f in functions.items()}, TABLE)
    theirs = {name: jax.value_and_grad(f) for name, f in functions.items()}
    return ours, all_at_once(theirs, TABLE)


def test_forms_that_give_rows(rows):
    found, wanted = rows
    dense = [name for name, (_, grad) in found.items() if not js.is_slices(grad)]
    assert not dense
    assert_close(found, wanted, rtol=1e-4, atol=1e-5)
