"""Settings by which an optimizer is that of another library, beside its formula in NumPy.

For gradients of 1 to 1e-8, with duplicate ids; lazy, dense and exact; also rows that are
never touched, and such that miss many steps.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import examples
from helpers import fast_jit, slow_but_first, slow_unless
from hypothesis import given
from hypothesis import strategies as st

import jslices as js

V, D, K, STEPS = 12, 3, 4, 40
SCALES = [1.0, 1e-2, 1e-4, 1e-6, 1e-8]
COSINE = optax.cosine_decay_schedule(0.1, STEPS)
FALLING = optax.linear_schedule(0.5, 0.0, STEPS)


def value(x, t):
    return float(x(t)) if callable(x) else x


# Each steps some rows ``r`` with gradients ``g``, at step t (from 0): changes the table p
# and the arrays s, zeros at first.


def adagrad(eps, start=0.0):
    def step(r, g, p, s, t, lr):
        s["sum"][r] += g**2
        p[r] -= lr * g / (np.sqrt(s["sum"][r] + start) + eps)

    return step


def adam_by_row(nesterov=False, eps_hat=False, b1=0.9, b2=0.999, eps=1e-8):
    def step(r, g, p, s, t, lr):
        s["n"][r] += 1
        n = s["n"][r]
        s["m"][r] = b1 * s["m"][r] + (1 - b1) * g
        s["v"][r] = b2 * s["v"][r] + (1 - b2) * g**2
        mean, weight = s["m"][r] / (1 - b1**n), 1 - b2**n
        if nesterov:
            mean = b1 * s["m"][r] / (1 - b1 ** (n + 1)) + (1 - b1) * g / (1 - b1**n)
        root = np.sqrt(s["v"][r] / weight) + eps / (np.sqrt(weight) if eps_hat else 1)
        p[r] -= lr * mean / root

    return step


def sgd(decay, momentum=0.0, nesterov=False):
    """PyTorch's ``SGD``."""

    def step(r, g, p, s, t, lr):
        g = g + value(decay, t) * p[r]
        s["m"][r] = momentum * s["m"][r] + g
        p[r] -= lr * (g + momentum * s["m"][r] if nesterov else s["m"][r])

    return step


def rowwise_adagrad(decay):
    def step(r, g, p, s, t, lr):
        s["sum"][r] += (g**2).mean(1, keepdims=True)
        p[r] -= lr * (g / (np.sqrt(s["sum"][r]) + 1e-8) + value(decay, t) * p[r])

    return step


def partial_rowwise_adam(decay, b1=0.9, b2=0.999):
    def step(r, g, p, s, t, lr):
        s["m"][r] = b1 * s["m"][r] + (1 - b1) * g
        s["v"][r] = b2 * s["v"][r] + (1 - b2) * (g**2).mean(1, keepdims=True)
        root = np.sqrt(s["v"][r] / (1 - b2 ** (t + 1))) + 1e-8
        u = s["m"][r] / (1 - b1 ** (t + 1)) / root
        p[r] -= lr * (u + value(decay, t) * p[r])

    return step


def ftrl(beta, l1=0.0, l2=0.0, shrinkage=0.0, y=0.5, start=0.1):
    """Keras' ``Ftrl``."""

    def step(r, g, p, s, t, lr):
        old = s["n"][r] + start
        new = old + g**2
        s["z"][r] += g + 2 * shrinkage * p[r] - (new**y - old**y) / lr * p[r]
        quadratic = new**y / lr + 2 * (l2 + beta / (2 * lr))
        p[r] = (np.clip(s["z"][r], -l1, l1) - s["z"][r]) / quadratic
        s["n"][r] = new - start

    return step


STRENGTHS = {
    "l1_regularization_strength": 0.01,
    "l2_regularization_strength": 0.02,
    "l2_shrinkage_regularization_strength": 0.03,
}
OUTSIDE = {"initial_accumulator_value": 0.0, "eps_in_sqrt": False}
BY_ROW = {"bias_correction": "row"}
# Optimizer, settings, learning rate, the same in NumPy, largest error in movements.
PEERS = {
    "FBGEMM's EXACT_ADAGRAD": ("adagrad", {**OUTSIDE, "eps": 1e-8}, 0.1, adagrad(1e-8)),
    "PyTorch's Adagrad": ("adagrad", {**OUTSIDE, "eps": 1e-10}, COSINE, adagrad(1e-10)),
    "one that starts": (
        "adagrad",
        {"initial_accumulator_value": 0.1, "eps_in_sqrt": False, "eps": 1e-3},
        0.1,
        adagrad(1e-3, 0.1),
    ),
    "PyTorch's SGD": ("sgd", {"weight_decay": 0.1}, 0.1, sgd(0.1)),
    "its schedules of both": ("sgd", {"weight_decay": FALLING}, COSINE, sgd(FALLING)),
    "its momentum": (
        "sgd",
        {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True},
        0.1,
        sgd(0.1, 0.9, nesterov=True),
    ),
    "DGL's SparseAdam": ("adam", BY_ROW, 0.1, adam_by_row()),
    "its look ahead": (
        "adam",
        {**BY_ROW, "nesterov": True},
        COSINE,
        adam_by_row(nesterov=True),
    ),
    "its epsilon hat": (
        "adam",
        {**BY_ROW, "eps_hat": True},
        0.1,
        adam_by_row(eps_hat=True),
    ),
    "FBGEMM's DECOUPLE": (
        "rowwise_adagrad",
        {"weight_decay": 0.1},
        0.1,
        rowwise_adagrad(0.1),
    ),
    "schedules of both": (
        "rowwise_adagrad",
        {"weight_decay": FALLING},
        COSINE,
        rowwise_adagrad(FALLING),
    ),
    "FBGEMM's PARTIAL_ROWWISE_ADAM": (
        "partial_rowwise_adam",
        {"weight_decay": 0.1},
        0.1,
        partial_rowwise_adam(0.1),
    ),
    "its schedules": (
        "partial_rowwise_adam",
        {"weight_decay": FALLING},
        COSINE,
        partial_rowwise_adam(FALLING),
    ),
    "Keras' Ftrl": ("ftrl", {"beta": 0.7}, 0.1, ftrl(0.7)),
    "its strengths": (
        "ftrl",
        {"beta": 0.3, **STRENGTHS},
        COSINE,
        ftrl(0.3, 0.01, 0.02, 0.03),
    ),
}
#: Adam's corrections, ``1 - 0.999**t`` in float32, are right to four digits.
TOLERANCES = {"adam": 2e-5, "partial_rowwise_adam": 2e-5}
NOT_EXACT = ("adam", "ftrl")


def inputs(seed, scale):
    """The table, ids ``[STEPS, K]``, their gradients; the last rows are never touched."""
    rng = np.random.default_rng(seed)
    often = 1 / np.arange(1, V - 1) ** 1.5
    ids = rng.choice(V - 2, (STEPS, K), p=often / often.sum()).astype(np.int32)
    rows = (scale * rng.normal(size=(STEPS, K, D))).astype(np.float32)
    return rng.normal(size=(V, D)).astype(np.float32), ids, rows


def in_numpy(step, rate, how, table, ids, rows):
    p = table.astype(float)
    s = {name: np.zeros_like(p) for name in ("sum", "n", "m", "v", "z")}
    for t in range(len(ids)):
        g = np.zeros_like(p)
        np.add.at(g, ids[t], rows[t].astype(float))
        r = np.unique(ids[t]) if how == "lazy" else np.arange(V)
        step(r, g[r], p, s, t, value(rate, t))
    return p


@functools.cache
def compiled(name, how):
    optimizer, kwargs, rate, _ = PEERS[name]
    untouched = {"untouched": "exact"} if how == "exact" else {}
    tx = getattr(js, optimizer)(rate, **kwargs, **untouched)

    @fast_jit
    def run(table, ids, rows):
        def step(carry, batch):
            params, state = carry
            grads = js.IndexedSlices(batch[1], batch[0], (V, D))
            if how == "dense":
                grads = grads.to_dense()
            params, state = tx.catch_up(params, state, batch[0])
            return tx.apply(grads, state, params), None

        return tx.flush(*jax.lax.scan(step, (table, tx.init(table)), (ids, rows))[0])[0]

    return run


def error(got, wanted, start):
    return np.abs(got - wanted).max() / np.abs(wanted - start).max()


@pytest.mark.parametrize(
    "name, how",
    slow_unless(
        itertools.product(PEERS, ["lazy", "dense", "exact"]),
        lambda case: case[1] != "exact" or case[0] == "its schedules",
    ),
)
def test_is_the_formula_of_its_peer(name, how):
    optimizer, _, rate, step = PEERS[name]
    if how == "exact" and (optimizer in NOT_EXACT or name == "its momentum"):
        with pytest.raises(ValueError, match="exact"):
            compiled(name, how)
        return
    for scale in SCALES:
        table, *batches = inputs(3, scale)
        if optimizer in ("adagrad", "adam"):  # so that small movements are not rounded off
            table = np.zeros_like(table)
        got = compiled(name, how)(table, *batches)
        wanted = in_numpy(step, rate, how, table, *batches)
        assert error(got, wanted, table) < TOLERANCES.get(optimizer, 1e-6), scale
        never = np.asarray(got)[-2:] == table[-2:]
        decays = ("rowwise" in optimizer or optimizer == "sgd") and how != "lazy"
        assert never.all() != (decays or (how, optimizer) == ("dense", "ftrl"))


@pytest.mark.parametrize(
    "name", ["schedules of both", "its schedules", "its schedules of both"]
)
@examples(15)
@given(ids=st.lists(st.integers(-1, V), min_size=K, max_size=K), seed=st.integers(0, 99))
def test_decay_is_exact_whatever_rows_wait(name, ids, seed):
    """The same ids in the last steps, some of them of no row: others wait long."""
    optimizer, _, rate, step = PEERS[name]
    table, all_ids, rows = inputs(seed, 1.0)
    all_ids[STEPS // 4 :] = ids
    got = compiled(name, "exact")(table, all_ids, rows)
    all_ids[(all_ids < 0) | (all_ids >= V)] = V  # a row of rubbish
    rubbish = np.vstack([table, table[:1]])
    g = np.zeros((STEPS, V + 1, D))
    np.add.at(g, (np.arange(STEPS)[:, None], all_ids), rows)
    g[:, V] = 0
    every = np.tile(np.arange(V, dtype=np.int32), (STEPS, 1))
    wanted = in_numpy(step, rate, "exact", rubbish[:V], every, g[:, :V])
    assert error(got, wanted, table) < TOLERANCES.get(optimizer, 2e-6)


@pytest.mark.parametrize(
    "name, kwargs, scale, least",
    [
        ("FBGEMM's EXACT_ADAGRAD", {"eps_in_sqrt": True, "eps": 1e-7}, 1e-4, 0.2),
        ("DGL's SparseAdam", {"bias_correction": "step"}, 1.0, 0.02),
        ("FBGEMM's DECOUPLE", {"weight_decay": 0.0}, 1.0, 0.02),
        ("FBGEMM's PARTIAL_ROWWISE_ADAM", {"weight_decay": 0.0}, 1.0, 0.02),
        ("Keras' Ftrl", {"beta": 0.0}, 1.0, 0.1),
    ],
)
def test_other_settings_are_another_optimizer(name, kwargs, scale, least):
    """So that the tests above can fail."""
    optimizer, given, rate, step = PEERS[name]
    table, *batches = inputs(3, scale)
    tx = getattr(js, optimizer)(rate, **{**given, **kwargs})
    params, state, one = table, tx.init(table), fast_jit(tx.apply)
    for ids, rows in zip(*batches, strict=True):
        params, state = one(js.IndexedSlices(rows, ids, (V, D)), state, params)
    wanted = in_numpy(step, rate, "lazy", table, *batches)
    assert error(params, wanted, table) > least


def test_the_steps_of_a_row():
    """Their shape, and that a state without them is as it was."""
    table = jnp.ones((2, 5, 3))
    assert js.adam(0.1).init(table).row_counts is None
    tx = js.adam(0.1, bias_correction="row")
    state = tx.init({"table": table, "w": jnp.ones(4), "b": jnp.ones(())})
    shapes = {name: x.shape for name, x in state.row_counts.items()}
    assert shapes == {"table": (2, 5), "w": (4,), "b": ()}
    ids = jnp.array([4, 4, 5 + 2])  # numbered l * V + v
    grads = js.IndexedSlices(jnp.ones((3, 3)), ids, (2, 5, 3), row_axes=2)
    params = {"table": table, "w": jnp.ones(4), "b": jnp.ones(())}
    grads = {"table": grads, "w": jnp.ones(4), "b": None}
    for _ in range(2):
        params, state = tx.apply(grads, state, params)
    counts = state.row_counts
    np.testing.assert_array_equal(counts["table"], 2 * np.eye(5)[[4, 2]])
    assert (counts["w"] == 2).all() and counts["b"] == 0
    with pytest.raises(ValueError, match=r'bias_correction="row", as .* take every step'):
        js.adam(0.1, bias_correction="row", untouched="exact")


def test_a_late_row_begins_with_a_step_of_the_learning_rate():
    """As the docstring says, and by how much others differ."""
    first = {}
    for kind in ("row", "step"):
        tx, table = js.adam(0.1, bias_correction=kind), jnp.zeros((2, 1))
        late, step = tx.init(table)._replace(count=jnp.int32(20_000)), fast_jit(tx.apply)
        grads = js.IndexedSlices(jnp.ones((1, 1)), jnp.array([1]), (2, 1))
        first[kind] = float(-step(grads, late, table)[0][1, 0])
    assert first["row"] == pytest.approx(0.1, 1e-4)
    assert first["step"] == pytest.approx(0.32, 0.02)


@pytest.mark.parametrize("name", slow_but_first("partial_rowwise_adam", "rowwise_adagrad"))
def test_decay_by_mask(name):
    """Leaves that it leaves out do not decay, lazy and exact; decay wants parameters."""
    mask, kwargs = {"a": True, "b": False}, {"weight_decay": 0.5}
    params = {key: jnp.ones((4, 2)) for key in mask}
    for untouched in ("lazy", "exact"):
        tx = getattr(js, name)(0.1, **kwargs, mask=mask, untouched=untouched)
        rows = js.IndexedSlices(jnp.zeros((1, 2)), jnp.array([1]), (4, 2))
        grads, state = dict.fromkeys(mask, rows), tx.init(params)
        new, state = tx.flush(*tx.apply(grads, state, params))
        left = [1.0, 0.95, 1.0, 1.0] if untouched == "lazy" else [0.95] * 4
        np.testing.assert_allclose(new["a"][:, 0], left, rtol=1e-6)
        np.testing.assert_array_equal(new["b"], params["b"])
        tx = getattr(js, name)(0.1, **kwargs, untouched=untouched)
        with pytest.raises(ValueError, match=r"needs the parameters as well"):
            tx.update(grads, tx.init(params))
    tx = getattr(js, name)(0.1)
    tx.update(grads, tx.init(params))


def test_without_decay_nothing_catches_up():
    table = jnp.ones((4, 2))
    tx = js.rowwise_adagrad(0.1, untouched="exact")
    assert not tx.catches_up and tx.init(table).clock is None
    tx = js.rowwise_adagrad(0.1, weight_decay=0.1, untouched="exact")
    assert tx.catches_up and tx.init(table).clock.last.shape == (4,)
