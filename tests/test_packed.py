"""Short rows stored several to a row: ``packed.reshape(V, D)[ids]`` reads them."""

import functools
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_lookup_forms
import test_programs
from helpers import all_at_once, assert_close, fast_jit, gradients, needs_device
from jax import lax

import jslices as js
import jslices.testing
from jslices._proof.cost import cost_of

V, D, PER = 6, 4, 3
RNG = np.random.default_rng(27)
PACKED = RNG.normal(size=(V // PER, PER * D)).astype(np.float32)
IDS = jnp.asarray(np.array([4, 1, 4, 0], np.int32))
ROW, REST = np.ones(D, np.float32), np.ones((4, D), np.float32)
S = jax.ShapeDtypeStruct


def check(forms, packed, rtol=1e-4, wanted=None):
    """Each form of a lookup has JAX's value and gradient, as rows of ``packed``."""

    def make(form):
        return lambda packed: (form(packed) ** 3).sum().astype(jnp.float32)

    losses = {name: make(form) for name, form in forms.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = {name: js.value_and_grad(loss) for name, loss in losses.items()}
        found = all_at_once(ours, packed)
    if wanted is None:
        theirs = {name: jax.value_and_grad(loss) for name, loss in losses.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", js.DensificationWarning)
            wanted = all_at_once(theirs, packed)
    assert not [name for name, (_, grad) in found.items() if not js.is_slices(grad)]
    assert_close(found, wanted, rtol=rtol, atol=1e-5)
    return {name: grad for name, (_, grad) in found.items()}


def check_as_unpacked(forms, table, by_jax):
    """The same, by what JAX gives for the table ``[V, D]`` with a row to a row."""
    packed = table.reshape(V // PER, PER * D)
    check(
        {n: lambda t, form=form: form(t.reshape(V, D)) for n, form in forms.items()},
        packed,
        wanted={
            name: (np.float32(by_jax[name][0]), by_jax[name][1].reshape(packed.shape))
            for name in forms
        },
    )


# --- lookups ----------------------------------------------------------------------------


def test_values_are_zero_outside_the_row_that_was_read():
    weights = np.arange(1, 6 * D + 1, dtype=np.float32).reshape(6, D)
    ids = np.array([4, 1, 4, 0, V, V + 7])  # and two that are out of range

    def loss(packed):
        return (jnp.take(packed.reshape(V, D), ids, axis=0, fill_value=0) * weights).sum()

    grad = fast_jit(js.grad(loss))(PACKED)
    np.testing.assert_array_equal(grad.indices, [1, 0, 1, 0, 2, 2])
    values = np.zeros((6, PER, D), np.float32)
    values[range(4), np.array(IDS) % PER] = weights[:4]
    np.testing.assert_array_equal(grad.values, values.reshape(6, PER * D))


# Products of sparse matrices read eight times as many rows as this small table has packed.
OF_ONE_TABLE = {*test_lookup_forms.ROWS} - {"from_stacked", "from_sparse_matrices"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OF_ONE_TABLE))
def test_forms_that_give_rows(name):
    of, table = test_lookup_forms.ROWS[name]
    some = [*of(table)][::2]  # all would trace the same walk twice as long
    forms = {form: lambda t, form=form: of(t)[form]() for form in some}
    check_as_unpacked(forms, table, test_lookup_forms.by_jax(name))


def test_forms_of_ids():
    forms = {
        name: lambda t, form=form: form(t, IDS)
        for name, form in test_programs.ID_FORMS.items()
        if name != "vmapped_slices"  # is dense of any table
    }
    by_jax = {name: test_programs.by_jax()[str((name, False))] for name in forms}
    check_as_unpacked(forms, test_programs.TABLE, by_jax)


def test_lookups_of_ours():
    bags = jnp.array([[0, 4], [1, -1], [V, V + 1]])

    def lookup(packed, ids, mode="fill"):
        return js.embedding_lookup(packed.reshape(V, D), ids, mode=mode)

    grads = check(
        {
            "good": lambda t: lookup(t, IDS),
            "bad": lambda t: lookup(t, jnp.array([4, -1, V, 1, -V, V + 9])),
            "clip": lambda t: lookup(t, jnp.array([4, -1, V, 1]), "clip"),
            "max_norm": lambda t: js.embedding_lookup(t.reshape(V, D), IDS, max_norm=0.5),
            "padding": lambda t: js.embedding_lookup(t.reshape(V, D), IDS, padding_id=4),
            "shards": lambda t: js.embedding_lookup([t.reshape(V, D), t[:, :D]], IDS),
            "bags": lambda t: js.safe_embedding_lookup_sparse(t.reshape(V, D), bags),
            "vmap": lambda t: jax.vmap(lambda i: lookup(t, i))(IDS),
            "scan": lambda t: lax.scan(lambda c, i: (c + lookup(t, i), c), ROW, IDS)[0],
            "cond": lambda t: lax.cond(IDS[0] > 2, lambda: lookup(t, IDS), lambda: REST),
            "checkpoint": lambda t: jax.checkpoint(lambda t: lookup(t, IDS))(t),
        },
        PACKED,
    )
    good = [0 <= i < V // PER for i in grads["bad"].indices]
    assert good == [True, False, False, True, False, False]


def test_views_of_every_kind():
    """Steps before and after, neighbours that are not finite, rows of several axes."""
    dtype = jnp.bfloat16
    packed = jnp.asarray(RNG.normal(size=(4, 2, 6)), dtype)
    check(
        {
            "two axes": lambda t: t.reshape(8, 6)[IDS],
            "the first axis": lambda t: t.reshape(8, 2, 3)[IDS],
            "a whole row's parts": lambda t: t.reshape(16, 3)[IDS + 9],
            "single numbers": lambda t: t.reshape(48, 1)[7 * IDS],
            "fields": lambda t: t.reshape(2, 6, 4)[IDS % 2, IDS],
            "below one another": lambda t: jnp.concatenate(
                [t.reshape(8, 6), jnp.ones((1, 6), dtype), t[:, 0]]
            )[3 * IDS],
            "of some rows": lambda t: t[1:3].reshape(-1, 3)[IDS],
            "steps": lambda t: (jnp.sin(t).reshape(8, 6) * 2)[IDS],
            "not finite": lambda t: t.at[2].set(jnp.nan).reshape(8, 6)[jnp.array([3, 7])],
            "a mask": lambda t: jnp.where(
                (t > 0).reshape(8, 6)[IDS], t.reshape(8, 6)[IDS], 0
            ),
            "integers": lambda t: (
                (t * 5).astype(jnp.int8).reshape(8, 6)[IDS] * t.reshape(8, 6)[IDS]
            ),
            "no ids": lambda t: js.embedding_lookup(t.reshape(8, 6), IDS[:0]),
        },
        packed,
        rtol=2e-2,
    )


@pytest.mark.parametrize("shape", [(20, 1040), (1, 20000)], ids=str)
def test_rows_that_are_too_wide_and_single_ones_stay_dense(shape):
    loss = lambda table: (table.reshape(-1, 20)[IDS % 2] ** 2).sum()  # noqa: E731
    wanted = r"is dense.* at least two rows, of at most 1024 numbers each"
    with pytest.warns(js.DensificationWarning, match=wanted):
        assert_close(*gradients(loss, np.ones(shape, np.float32)))


# --- steps ------------------------------------------------------------------------------


def trained(tx, table, batches, exact=False):
    """``table``, packed or not, as ``[V, D]`` after a step for each batch of ids."""

    @fast_jit
    def step(table, state, ids):
        if exact:
            table, state = tx.catch_up(table, state, ids * len(table) // V)
        grad = js.grad(lambda t: (jnp.sin(t.reshape(V, D)[ids]) ** 3).sum())(table)
        return tx.apply(grad, state, table)

    state = tx.init(table)
    for ids in batches:
        table, state = step(table, state, jnp.array(ids))
    table, _ = tx.flush(table, state) if exact else (table, state)
    return table.reshape(V, D)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_steps_are_those_of_the_unpacked_table(name):
    tx = getattr(js, name)(0.5)
    for batches, tolerance in ([[0, 1, 5], [3, 1, 2]], 0), ([[4, 1, 4, 4, 3, 4]] * 3, 1e-6):
        packed = trained(tx, PACKED, batches)
        unpacked = trained(tx, PACKED.reshape(V, D), batches)
        assert_close(packed, unpacked, rtol=tolerance, atol=0)


@pytest.mark.slow
def test_exact_steps_are_those_of_the_unpacked_table():
    tx, batches = js.adam(0.5, untouched="exact"), [[0, 1], [5, 4], [5, 5], [0, 2]]
    packed = trained(tx, PACKED, batches, exact=True)
    assert_close(packed, trained(tx, PACKED.reshape(V, D), batches, exact=True))


def test_lazy_steps_are_dense_for_the_whole_row_that_holds_an_id():
    batches = [[0, 5], [1, 5], [4, 1], [2, 4]]  # each has an id in both rows

    @fast_jit
    def step(table, state, ids):
        grad = jax.grad(lambda t: (jnp.sin(t[ids]) ** 3).sum())(table)
        updates, state = dense.update(grad, state, table)
        return optax.apply_updates(table, updates), state

    dense, table = optax.adam(0.5), PACKED.reshape(V, D)
    state = dense.init(table)
    for ids in batches:
        table, state = step(table, state, jnp.array(ids))
    assert_close(trained(js.adam(0.5), PACKED, batches), table)
    state = js.rowwise_adagrad(0.5).init(PACKED)
    assert V // PER in {x.size for x in jax.tree.leaves(state)}  # a number a packed row


# --- what is compiled -------------------------------------------------------------------


def adam_step(table, state, ids):
    """A step for rows of 16 numbers, wherever they are."""
    loss = lambda t: ((t.reshape(-1, 16)[ids] @ jnp.ones(16) - 1) ** 2).mean()  # noqa: E731
    value, grad = js.value_and_grad(loss)(table)
    return *js.adam(0.1).apply(grad, state, table), value


def arguments(shape, count):
    table = S(shape, jnp.float32)
    state = jax.eval_shape(js.adam(0.1).init, table)
    return table, state, S((count,), jnp.int32)


def test_no_array_is_as_large_as_the_table():
    args = arguments((50_000, 128), 64)
    js.testing.assert_in_place(adam_step, *args, donate_argnums=(0, 1))
    memory = js.testing.assert_no_dense_temporary(adam_step, *args, donate_argnums=(0, 1))
    assert memory.temp_bytes < 10 * 64 * 128 * 4


@pytest.mark.devices
@pytest.mark.parametrize("device", ["v5e", pytest.param("h100", marks=pytest.mark.slow)])
def test_on_a_device_a_packed_table_is_not_padded(device):
    needs_device(device)
    rows, count = 500_000, 2_000  # v5e moves tables below 100 MB into its fast memory
    args, size = arguments((rows, 128), count), rows * 128 * 4
    js.testing.assert_in_place(adam_step, *args, donate_argnums=(0, 1), device=device)
    memory = js.testing.assert_no_dense_temporary(
        adam_step, *args, donate_argnums=(0, 1), device=device
    )
    assert memory.argument_bytes < 3 * size + 10 * count
    assert memory.temp_bytes < 5 * count * 128 * 4


@pytest.mark.devices
def test_on_a_tpu_a_value_without_its_gradient_reads_rows():
    """As the docs say: what jslices.value_and_grad reads is not unpacked."""
    needs_device("v5e")
    (device,) = js.testing.devices("v5e")

    def accessed(f):
        place = jax.sharding.SingleDeviceSharding(device)
        structs = S((500_000, 128), jnp.float32), S((10_000,), jnp.int32)
        return cost_of(jax.jit(f, in_shardings=place).lower(*structs).compile())

    def loss(table, ids):
        return (table.reshape(-1, 16)[ids] ** 2).sum()

    rows = accessed(lambda *args: js.value_and_grad(loss)(*args)[0])
    assert rows.accessed_bytes < 15 * 10_000 * 128 * 4 < 500_000 * 128 * 4
    assert accessed(loss).temp_bytes > 500_000 * 128 * 4  # so that the test can fail


# --- docs -------------------------------------------------------------------------------


def test_the_recipe_of_the_docs_runs():
    page = (pathlib.Path(__file__).parent.parent / "docs" / "packed_tables.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    names = {"functools": functools, "jax": jax, "jnp": jnp, "js": js}
    exec(code, names)
    np.testing.assert_array_equal(np.unique(np.nonzero(names["table"])[0]), [3, 999])
