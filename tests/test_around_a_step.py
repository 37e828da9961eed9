"""What stands around a step: whatever a loss returns or reads, no table is copied.

Each way to read (in the loss, behind ``stop_gradient``, for an auxiliary result) with
several optimizers, by ``train_step`` and by hand; values are those of dense Optax.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit, slow_unless

import jslices as js

V, D, K = 3000, 4, 8
RNG = np.random.default_rng(0)
PARAMS = {
    "t": RNG.normal(size=(V, D)).astype(np.float32),
    "u": RNG.normal(size=(V, D)).astype(np.float32),
    "w": RNG.normal(size=D).astype(np.float32),
}
IDS, OTHERS = (RNG.integers(0, V, size=(4, K)).astype(np.int32) for _ in range(2))
stop = jax.lax.stop_gradient


def squares(p, ids):
    return jnp.mean((p["t"][ids] @ p["w"] - 1.0) ** 2)


#: ``(value, aux)`` of parameters, ids and other ids.
LOSSES = {
    "the loss alone": lambda p, i, o: (squares(p, i), None),
    "the greatest of the same rows": lambda p, i, o: (
        squares(p, i),
        jnp.abs(p["t"][i]).max(),
    ),
    "the same rows": lambda p, i, o: (squares(p, i), p["t"][i]),
    "other rows": lambda p, i, o: (squares(p, i), p["t"][o].mean()),
    "rows with fixed numbers": lambda p, i, o: (
        squares(p, i),
        {"name": "x", "rows": p["t"][:2], "row": p["t"][-1], "key": jax.random.key(0)},
    ),
    "one row by its number": lambda p, i, o: (
        squares(p, i),
        [p["t"][o[0]], p["u"][o[1], 2]],
    ),
    "comparisons": lambda p, i, o: (squares(p, i), (p["t"][i] > p["t"][o]).mean()),
    "a linear loss": lambda p, i, o: (
        (p["t"][i] * p["u"][:2].sum(0, keepdims=True)).sum(),
        None,
    ),
    "a linear loss, and rows": lambda p, i, o: (p["t"][i].sum() * p["w"][0], p["t"][i]),
    "dots of two tables": lambda p, i, o: ((p["t"][i] * p["u"][o]).sum(), None),
    "hinge": lambda p, i, o: (
        jnp.maximum(0, 1 - (p["t"][i] * p["t"][o]).sum(1)).sum(),
        None,
    ),
    "targets behind stop_gradient": lambda p, i, o: (
        ((p["t"][i] - stop(p["t"][o])) ** 2).sum(),
        None,
    ),
    "a stopped table": lambda p, i, o: (squares(p, i) * (stop(p["t"])[o]).sum(), None),
    "branches and loops": lambda p, i, o: (
        squares(p, i),
        jax.lax.cond(
            o[0] > 5,
            lambda: jax.lax.scan(lambda c, k: (c + p["t"][k], p["t"][k, 0]), p["w"], o),
            lambda: (p["u"][3], p["u"][i, 0]),
        ),
    ),
}
SCHEDULE = optax.cosine_decay_schedule(0.05, 10)
OPTIMIZERS = {
    "sgd": (js.sgd(0.1), optax.sgd(0.1)),
    "adagrad": (js.adagrad(0.1), optax.adagrad(0.1)),
    "adam": (js.adam(0.1), None),
    "rowwise_adagrad": (js.rowwise_adagrad(0.1), None),
    "exact momentum": (
        js.sgd(0.05, momentum=0.9, untouched="exact"),
        optax.sgd(0.05, momentum=0.9),
    ),
    "exact adam": (js.adam(0.05, untouched="exact"), optax.adam(0.05)),
    "exact adamw": (
        js.adamw(SCHEDULE, weight_decay=0.1, untouched="exact"),
        optax.adamw(SCHEDULE, weight_decay=0.1),
    ),
}


def by_train_step(loss, tx):
    return js.train_step(loss, tx, has_aux=True)


def by_hand(loss, tx):
    def step(params, state, *ids):
        if tx.catches_up:
            rows = js.lookup_ids(loss, has_aux=True)(params, *ids)
            params, state = tx.catch_up(params, state, rows)
        (value, aux), grads = js.value_and_grad(loss, has_aux=True)(params, *ids)
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state, value, aux

    return step


def only_arrays(step):
    """With the arrays of the auxiliary result alone, as ``jax.jit`` wants it."""

    def run(*args):
        params, state, value, aux = step(*args)
        return (
            params,
            state,
            value,
            [x for x in jax.tree.leaves(aux) if hasattr(x, "dtype")],
        )

    return run


WAYS = by_train_step, by_hand


@pytest.mark.parametrize(
    ["name", "way", "loss"],
    slow_unless(
        [
            (n, way, x)
            for n in OPTIMIZERS
            for way in (by_train_step, by_hand)
            for x in LOSSES
            if way is by_train_step or n in ("sgd", "exact adamw")
        ],
        lambda case: case[:2] == ("sgd", by_hand),
    ),
)
def test_no_table_is_copied(name, way, loss):
    tx, dense = OPTIMIZERS[name]
    step = only_arrays(way(LOSSES[loss], tx))
    args = PARAMS, tx.init(PARAMS), IDS[0], OTHERS[0]
    js.testing.assert_in_place(step, *args, donate_argnums=(0, 1), min_bytes=4 * V)
    if dense is None or way is by_hand:
        return

    def dense_step(params, state, *ids):
        of = jax.value_and_grad(LOSSES[loss], has_aux=True)
        (value, aux), grads = of(params, *ids)
        updates, state = dense.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, aux

    def values(step, tx, params):
        state, results = tx.init(params), []
        for ids in zip(IDS, OTHERS, strict=True):
            params, state, *rest = step(params, state, *ids)
            results.append([x for x in jax.tree.leaves(rest) if is_number(x)])
        return results

    both = fast_jit(lambda p: (values(step, tx, p), values(dense_step, dense, p)))
    assert_close(*both(PARAMS), rtol=1e-4, atol=1e-5)


def is_number(x):
    return hasattr(x, "dtype") and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def test_a_use_of_the_whole_hints_at_its_line():
    """Of more than 16 MB, where no gradient comes in; rows alone need no hint."""
    tx = js.sgd(0.1, momentum=0.9, untouched="exact")
    params = {"t": jax.ShapeDtypeStruct((10**6, 8), jnp.float32)}
    state, ids = jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((9,), jnp.int32)

    def traced(aux):
        loss = lambda p, ids: ((p["t"][ids] ** 2).sum(), aux(p["t"], ids))  # noqa: E731
        jax.eval_shape(js.train_step(loss, tx, has_aux=True), params, state, ids)

    traced(lambda table, ids: table[ids[::-1]].max())
    with pytest.warns(js.PerformanceHint, match=r"whole.*test_around.*table\.mean"):
        traced(lambda table, ids: table.mean())


def test_explain_lists_reads_without_gradient():
    def loss(p, ids, others):
        rows = p["t"][ids] - stop(p["t"])[others]
        return (rows**2).sum(), p["u"].sum()

    report = js.explain(loss, has_aux=True)(PARAMS, IDS[0], OTHERS[0])
    table, other = (leaf for leaf in report.leaves if leaf.path in ("p['t']", "p['u']"))
    assert [(x.rows, "stop(" in x.line.text) for x in table.reads] == [(K, True)]
    assert (table.rows, table.whole_line) == (K, None)
    assert other.kind == "unused" and "sum(), p[" in other.whole_line.text
    assert "read without gradient, 8 rows: " in str(report)
    assert "used whole without gradient: " in str(report)


def test_donated_arguments_in_another_order_are_named():
    tx = js.adam(0.1)

    def step(state, params, ids):
        value, grads = js.value_and_grad(squares)(params, ids)
        params, state = tx.apply(grads, state, params)
        return params, state, value

    wanted = r"result\[0\]\['t'\] is written into its memory.*def step\(params, state"
    with pytest.raises(AssertionError, match=f"(?s){wanted}"):
        js.testing.assert_in_place(
            step, tx.init(PARAMS), PARAMS, IDS[0], donate_argnums=(0, 1), min_bytes=V
        )
