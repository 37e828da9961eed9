"""Arrays whose rows several axes number: a table for each layer, in one array [L, V, D]."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, dense, slow_unless
from jax import lax
from optimizers import FIRST, make

import jslices as js
import jslices.testing
import jslices.tf1 as tf

L, V, D, K = 3, 7, 4, 5
RNG = np.random.default_rng(5)
TABLE = RNG.normal(size=(L, V, D)).astype(np.float32)
IDS = RNG.integers(0, V, (4, L, K)).astype(np.int32)


def scanned(tables, ids):
    """Layers in a loop, each with its own table."""

    def layer(x, of_layer):
        table, ids = of_layer
        return x + jnp.sin(table[ids] * 2).sum(), None

    return lax.scan(layer, 0.0, (tables, ids))[0]


def blocks(tables, ids):
    """Whole tables [V, D] of some layers."""
    return jnp.sin(tables[ids[0, :1] % L] * 2).sum()


# --- slices -----------------------------------------------------------------------------

VALUES = RNG.normal(size=(4, D)).astype(np.float32)
SLICES = js.IndexedSlices(VALUES, np.array([1, 13, 1, 99]), (L, V, D), row_axes=2)
DENSE = np.zeros((L * V, D), np.float32)
np.add.at(DENSE, [1, 13, 1], VALUES[:3])
DENSE = DENSE.reshape(L, V, D)


def test_slices_of_such_an_array():
    assert (SLICES.shape, SLICES.ndim, SLICES.num_rows) == ((L, V, D), 3, L * V)
    factors = RNG.normal(size=(L, V, 1)).astype(np.float32)
    axes = None, 0, 1, 2, (0, 1), (0, 2), (1, 2), -1, (0, 1, 2)

    @jax.jit
    def ours(slices):
        ones = jnp.ones((L, V, D))
        batch = jax.vmap(lambda x: slices * x)(jnp.arange(2.0))
        return {
            "to_dense": slices,
            "coalesce": slices.coalesce(),
            "sum": slices + slices,
            "array": ones + slices,
            "factors": slices * factors,
            "flat": slices.flat,
            "batch": batch,
            "example": batch[1],
            "clip": js.clip_by_global_norm(slices, 0.5)[0],
            "mask": js.mask_rows(slices, above(1)[..., 0]),
            "sparse_mask": js.sparse_mask(slices, [1]),
            "limits": js.clip_by_value(slices, -0.5, jnp.full((1, 1, D), 0.5)),
            "tf1": tf1_scatter_add(ones, slices),
            "apply": js.apply_slices(ones, slices, "add"),
            "mapped": jax.tree.map(lambda x: x, slices),
            **{f"sum over {axis}": slices.sum(axis) for axis in axes},
            **{f"mean over {axis}": slices.mean(axis) for axis in axes},
        }

    expected = {
        **dict.fromkeys(("to_dense", "coalesce", "example", "mapped"), DENSE),
        **dict.fromkeys(("array", "tf1", "apply"), 1 + DENSE),
        **dict.fromkeys(("mask", "sparse_mask"), DENSE * above(1)),
        "sum": 2 * DENSE,
        "factors": DENSE * factors,
        "flat": DENSE.reshape(L * V, D),
        "batch": np.stack([0 * DENSE, DENSE]),
        "clip": DENSE * 0.5 / norm(DENSE),
        "limits": np.clip(DENSE, -0.5, 0.5),
        **{f"sum over {axis}": DENSE.sum(axis) for axis in axes},
        **{f"mean over {axis}": DENSE.mean(axis) for axis in axes},
    }
    assert_close(jax.jit(dense)(ours(SLICES)), expected)
    assert_close(SLICES.to_dense(), DENSE)
    assert_close(1 + (SLICES + SLICES).to_dense(), 1 + 2 * DENSE)


def tf1_scatter_add(value, slices):
    model = tf.transform(lambda: tf.Variable(value, name="table").scatter_add(slices))
    return model.apply(model.init(jax.random.key(0)))[0]


def norm(x):
    return np.sqrt((x**2).sum())


def above(number):
    return (np.arange(L * V) > number).reshape(L, V, 1)


@pytest.mark.parametrize(
    "shape, row_axes, message",
    [
        ((L, V, D), 1, "if 2 axes number the rows, type row_axes=2"),
        ((V, D + 1), 1, "did you mean dense_shape="),
        ((L, V, D), 0, "at least 1, got 0"),
        ((D,), 2, "2 axes of rows"),
        (None, 2, "row_axes=2 wants dense_shape, whose first 2 axes"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(shape, row_axes, message):
    with pytest.raises(ValueError, match=message):
        js.IndexedSlices(jnp.ones((2, D)), jnp.array([1, 2]), shape, row_axes)


def test_limits_of_rows_are_refused():
    with pytest.raises(ValueError, match="rows cannot have limits of their own"):
        js.clip_by_value(SLICES, -0.5, jnp.full((L, V, 1), 0.5))


def test_slices_of_different_rows_are_not_added():
    coarse = js.IndexedSlices(jnp.ones((1, V, D)), jnp.array([1]), (L, V, D))
    with pytest.raises(ValueError, match=r"numbered by|different shapes"):
        SLICES + coarse


# --- which axes -------------------------------------------------------------------------


def test_the_rows_of_the_fewest_bytes_are_chosen():
    def some(table):
        return jnp.sin(table[jnp.array([1])]).sum()

    def both(table):
        return some(table) + jnp.sin(table[0, IDS[0, 0]]).sum()

    table = jnp.ones((40, V, D))
    grads = jax.jit(lambda t: (js.grad(some)(t), js.grad(both)(t)))(table)
    assert [g.row_axes for g in grads] == [1, 2]
    assert [g.indices.size for g in grads] == [1, V + K]
    assert_close(grads[1].to_dense(), jax.grad(both)(table), rtol=1e-6)


def test_an_ordinary_stacked_weight_stays_dense():
    def layers(weights):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), jnp.ones((2, D)), weights)[
            0
        ].sum()

    assert not js.is_slices(js.grad(layers)(jnp.ones((L, D, D))))


def test_the_report_tells_which_axes_number_rows():
    report = str(js.explain(scanned)(TABLE, IDS[0]))
    assert f"rows [{D}], numbered by the first 2 axes" in report


def test_tables_that_are_used_as_wholes_too_are_dense_and_warn():
    def tied(tables):
        """By layer, which alone would be rows of whole tables, twice."""

        def layer(x, number):
            hidden = tables[number][IDS[0, 0]]
            return x + jax.nn.logsumexp(hidden @ tables[number].T), None

        return lax.scan(layer, 0.0, jnp.arange(L))[0]

    with pytest.warns(js.DensificationWarning, match="used whole .dot_general."):
        grad = js.grad(tied)(TABLE)
    assert_close(grad, jax.grad(tied)(TABLE), rtol=1e-5)


def of_numbers_apart(tables, layers, ids):
    return (tables[layers, ids] ** 2).sum()


def of_a_layer_each(tables, layers, ids):
    return (lax.map(lambda layer: tables[layer][ids], layers) ** 2).sum()


def of_the_first(tables, layers, ids):
    return (tables[0, ids] ** 2).sum()


def of_one_layer(tables, layers, ids):
    return (tables[layers[0], ids] ** 2).sum()


@pytest.mark.filterwarnings("ignore:.*2..31 rows or more by jax_enable_x64")
@pytest.mark.parametrize(
    ("loss", "count", "coarse"),
    [
        (of_numbers_apart, 8, 0),
        (of_a_layer_each, 8, 8),
        (of_a_layer_each, 100, 0),  # more bytes than the array has
        (of_one_layer, 8, 1),
        (of_the_first, 8, 0),
    ],
)
def test_rows_that_32_bits_cannot_number_are_coarser_or_dense(loss, count, coarse):
    """JAX takes the program, and so does jslices."""
    tables = jax.ShapeDtypeStruct((64, 40_000_000, 4), jnp.float32)
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    grad = jax.jit(js.grad(loss)).trace(tables, ids, ids).out_info
    (leaf,) = js.explain(loss)(tables, ids, ids).leaves
    assert leaf.kind == ("sparse" if coarse else "dense")
    if coarse:
        assert (grad.row_axes, grad.indices.shape) == (1, (coarse,))
        assert grad.indices.dtype == jnp.int32
    else:
        assert (grad.shape, grad.dtype) == (tables.shape, tables.dtype)
    with jax.enable_x64(True):
        wide = jax.eval_shape(js.grad(loss), tables, ids, ids)
        assert wide.row_axes == 2 and wide.indices.dtype == jnp.int64
        assert jax.eval_shape(jax.grad(loss), tables, ids, ids).shape == tables.shape


def test_rows_that_32_bits_cannot_number_are_refused_where_they_are_insisted_on():
    table = jax.ShapeDtypeStruct((2**31, 4), jnp.float32)
    first = lambda table: (table[3] ** 2).sum()  # noqa: E731
    assert jax.eval_shape(js.grad(first), table).shape == table.shape
    with pytest.raises(
        js.DenseUseError, match=r"of table.*2\*\*31 or more by jax_enable_x64"
    ):
        jax.eval_shape(js.grad(first, sparse=True), table)
    with jax.enable_x64(True):
        assert jax.eval_shape(js.grad(first), table).indices.dtype == jnp.int64


def test_row_numbers_that_need_64_bits():
    shape = (2**8, 2**24, 2)
    ids, layers = jnp.array([5, 7]), jnp.array([200, 255])
    body = lambda table: lambda n: table[n][ids]  # noqa: E731
    forms = {
        "by both": (lambda t: t[layers, ids], [(200, 5), (255, 7)]),
        "in a loop": (lambda t: lax.map(body(t), layers[1:]), [(255, 5), (255, 7)]),
        "of one": (lambda t: t[255][ids], [(255, 5), (255, 7)]),
        "second axis": (lambda t: jnp.moveaxis(t, 0, 1)[ids, layers], [(200, 5), (255, 7)]),
        "scanned": (
            lambda t: lax.map(lambda u: u[ids[:1]], t),
            [(n, 5) for n in range(256)],
        ),
    }
    with jax.enable_x64(True):
        table = jax.ShapeDtypeStruct(shape, jnp.float32)
        for form, rows in forms.values():
            numbers = js.lookup_ids(lambda t, form=form: form(t).sum())(table).indices
            assert numbers.tolist() == [layer * shape[1] + row for layer, row in rows]


# --- steps ------------------------------------------------------------------------------


def steps(tx, loss, table, batches=IDS):
    """Some steps; the table and the state after them."""
    state = tx.init(table)
    for ids in batches:
        updates, state = tx.update(js.grad(loss)(table, ids), state, table)
        table = js.apply_updates(table, updates)
    return table, state


@pytest.mark.slow
def test_a_step_is_that_of_rows_numbered_by_one_axis():
    optimizers = {name: make(js, name, 0.1, kwargs) for name, kwargs in FIRST}

    @jax.jit
    def step(arrays, states, ids):
        grads = js.grad(scanned)(TABLE, ids)
        results = {}
        for name, tx in optimizers.items():
            stacked, flat = arrays[name]
            together, state = tx.apply(grads, states[name][0], stacked)
            by_one_axis, flat_state = tx.apply(grads.flat, states[name][1], flat)
            results[name] = (together, by_one_axis), (state, flat_state)
        arrays = {name: result[0] for name, result in results.items()}
        return arrays, {name: result[1] for name, result in results.items()}

    pair = TABLE, TABLE.reshape(L * V, D)
    arrays = dict.fromkeys(optimizers, pair)
    states = {name: tuple(map(tx.init, pair)) for name, tx in optimizers.items()}
    for ids in IDS[:2]:
        arrays, states = step(arrays, states, ids)
    for name, (stacked, flat) in arrays.items():
        assert_close(stacked.reshape(L * V, D), flat, rtol=1e-6)
        shapes = {x.shape for x in jax.tree.leaves(states[name][0]) if x.size > 1}
        assert shapes <= {(L, V, D), (L, V)}, name


EXACT = {
    "adam": (js.adam(0.1, untouched="exact"), optax.adam(0.1)),
    "momentum": (
        js.sgd(0.1, momentum=0.9, untouched="exact"),
        optax.sgd(0.1, momentum=0.9),
    ),
    "adamw": (
        js.adamw(0.1, weight_decay=0.1, untouched="exact"),
        optax.adamw(0.1, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize(
    "name, loss",
    slow_unless(
        [("adam", scanned), ("momentum", scanned), ("adamw", blocks)],
        lambda case: case[0] == "momentum",
    ),
    ids=["rows", "rows of sgd", "coarser rows"],
)
def test_exact_steps_are_those_of_optax(name, loss):
    """Of coarser rows, too, than those for which the clock has a number each."""
    tx, dense = EXACT[name]

    def with_catch_up(table, state, ids):
        table, state = tx.catch_up(table, state, js.lookup_ids(loss)(table, ids))
        updates, state = tx.update(js.grad(loss)(table, ids), state, table)
        return js.apply_updates(table, updates), state

    def densely(table, state, ids):
        updates, state = dense.update(jax.grad(loss)(table, ids), state, table)
        return optax.apply_updates(table, updates), state

    def in_turn(step, table, state):
        step_of = lambda carry, ids: (step(*carry, ids)[:2], None)  # noqa: E731
        return lax.scan(step_of, (table, state), IDS[:3])[0]

    @jax.jit
    def run(table):
        once = in_turn(js.train_step(loss, tx), table, tx.init(table))
        whole, _ = in_turn(densely, table, dense.init(table))
        return (
            tx.flush(*in_turn(with_catch_up, table, tx.init(table))),
            tx.flush(*once),
            whole,
        )

    (by_hand, state), (once, _), whole = run(TABLE)
    assert_close(by_hand, whole, rtol=1e-4, atol=2e-6)
    assert_close(once, whole, rtol=1e-4, atol=2e-6)
    assert state.clock.last.shape == (L, V)


def test_what_adafactor_does_not_factor():
    tx = js.adafactor(0.1, min_dim_size_to_factor=1)
    with pytest.raises(ValueError, match=r"type factored=False; or keep .* \[21, 4\]"):
        tx.apply(SLICES, tx.init(TABLE), TABLE)


def test_a_row_that_is_behind_is_named():
    tx = EXACT["adam"][0]
    table, state = steps(tx, scanned, TABLE, IDS[:1])
    ids = (IDS[0, :, :1] + 1) % V
    with pytest.raises(ValueError, match="did its last step at"):
        for _ in range(2):
            _, state = tx.update(js.grad(scanned)(table, ids), state, table)
            ids = (ids + 1) % V


@pytest.mark.slow
def test_what_stands_around_a_step():
    grads = [js.grad(scanned)(TABLE, ids) for ids in IDS]
    frozen = np.arange(L * V).reshape(L, V) % 3 == 0
    wholes = [np.asarray(g.to_dense()) for g in grads]

    mean = js.accumulate_gradients(lambda ids: js.grad(scanned)(TABLE, ids), IDS)
    assert_close(mean.to_dense(), sum(wholes) / len(IDS), rtol=1e-5)
    limited = js.clip_rows_by_norm(grads[0], 0.5).to_dense()
    norms = np.linalg.norm(wholes[0], axis=-1, keepdims=True)
    assert_close(
        limited, wholes[0] * np.minimum(1, 0.5 / np.maximum(norms, 1e-9)), rtol=1e-5
    )
    assert_close(js.global_norm(grads[0]), norm(wholes[0]), rtol=1e-6)

    def after(tx, gradients):
        table, state, step = TABLE, tx.init(TABLE), jax.jit(tx.apply)
        for g in gradients:
            table, state = step(g, state, table)
        return table

    lifted = js.from_optax(optax.adagrad(0.1))
    assert_close(after(lifted, grads), after(js.adagrad(0.1), grads), rtol=1e-5)
    pairs = js.optim.multi_steps(js.adagrad(0.1), 2, grads[0])
    means = [(a + b) / 2 for a, b in zip(wholes[::2], wholes[1::2], strict=True)]
    assert_close(after(pairs, grads), after(js.adagrad(0.1), means), rtol=1e-5, atol=1e-6)
    for tx in (js.adam(0.1), js.rowwise_adagrad(0.1)):
        kept = after(js.optim.freeze_rows(tx, frozen), grads)
        expected = np.where(frozen[..., None], TABLE, after(tx, grads))
        assert_close(kept, expected, rtol=1e-6)
    inside = js.project_rows(TABLE, grads[0], 0.5)
    touched = norms > 0
    assert (np.linalg.norm(inside, axis=-1)[touched[..., 0]] < 0.5001).all()
    assert_close(np.where(touched, 0, inside), np.where(touched, 0, TABLE))


def test_a_step_of_16_bits_is_rounded_stochastically():
    table = jnp.ones((L, V, D), jnp.bfloat16)
    tx = js.sgd(1e-3)
    grads = js.grad(lambda t: scanned(t.astype(jnp.float32), IDS[0]))(table)
    new, _ = tx.apply(grads, tx.init(table), table, key=jax.random.key(0))
    flat, _ = tx.apply(
        grads.flat, tx.init(table), table.reshape(L * V, D), key=jax.random.key(0)
    )
    assert (new.reshape(L * V, D) == flat).all()
    assert (new != 1).any()


# --- the compiled program ---------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True], ids=["lazy", "exact"])
def test_no_array_of_the_size_of_the_tables_is_made(exact):
    table = jnp.ones((4, 20_000, 8))
    tx = js.adam(0.1, untouched="exact" if exact else "lazy")
    step = js.train_step(scanned, tx)

    def lazily(table, state, ids):
        value, grads = js.value_and_grad(scanned)(table, ids)
        return *tx.apply(grads, state, table), value

    run = jax.jit(step if exact else lazily, donate_argnums=(0, 1))
    args = table, tx.init(table), jnp.ones((4, K), jnp.int32)
    js.testing.assert_in_place(run, *args)
    js.testing.assert_no_dense_temporary(run, *args, min_bytes=table.nbytes // 4)
