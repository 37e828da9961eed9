"""Every wrapper in every wrapper, jitted through ``train_step``: as the optimizer alone.

Wrappers are set so that they change nothing. Some steps leave a table out, and some ids are
out of range.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import examples
from helpers import assert_close, fast_jit
from hypothesis import given
from hypothesis import strategies as st

import jslices as js

# Rows behind in a step that is traced alone.
pytestmark = pytest.mark.filterwarnings("ignore")
V, D = 7, 2
RNG = np.random.default_rng(0)
SHAPES = {"a": (V, D), "b": (V, D), "w": (D,)}
PARAMS = {k: RNG.normal(size=shape).astype(np.float32) for k, shape in SHAPES.items()}
GROUPS = {"a": "x", "b": "y", "w": "y"}
NEVER = {"a": lambda rows: rows > V, "b": np.zeros(V, bool), "w": None}
ALL = dict.fromkeys(PARAMS, True)


def of_both(params, ids):
    return ((params["a"][ids] * params["b"][ids[::-1]]) @ params["w"]).sum()


def of_one(params, ids):
    return (params["a"][ids] @ params["w"] - 1.0).sum() ** 2


EXAMPLE = jax.eval_shape(js.grad(of_both), PARAMS, np.zeros(3, np.int32))

optim = js.optim
WRAPPERS = {
    "chain": lambda tx: optim.chain(tx),
    "clip": lambda tx: optim.chain(optim.clip(1e9), tx),
    "clip_by_global_norm": lambda tx: optim.chain(optim.clip_by_global_norm(1e9), tx),
    "combine_duplicates": lambda tx: optim.chain(optim.combine_duplicates("sum"), tx),
    "scale": lambda tx: optim.chain(optim.scale(1.0), tx),
    "snapshot of Optax": lambda tx: optim.chain(optax.snapshot("n", js.global_norm), tx),
    "masked identity of Optax": lambda tx: optim.chain(
        optim.masked(optax.identity(), {"a": True, "b": False, "w": True}), tx
    ),
    "masked": lambda tx: optim.masked(tx, ALL),
    "partition": lambda tx: optim.partition({"x": tx, "y": tx}, GROUPS),
    "freeze_rows": lambda tx: optim.freeze_rows(tx, NEVER),
    "frozen beside free": lambda tx: optim.partition(
        {"x": optim.freeze_rows(tx, NEVER), "y": tx}, GROUPS
    ),
    "multi_steps": lambda tx: optim.multi_steps(tx, 1, EXAMPLE),
    "put together": lambda tx: js.GradientTransformation(
        tx.init,
        tx.update,
        tx.catch_up if tx.catches_up else None,
        tx.flush if tx.catches_up else None,
        apply=tx.apply,
    ),
}
SCHEDULE = optax.linear_schedule(0.1, 0.02, 3)
MIXED = {"x": js.sgd(0.05, momentum=0.9), "y": js.adam(0.05, untouched="exact")}
ALONE = {
    "exact": js.adamw(SCHEDULE, weight_decay=0.1, untouched="exact"),
    "lazy": js.adam(0.05),
    "mixed": optim.partition(MIXED, GROUPS),
    "all rows decay": js.adamw(0.05, weight_decay_mode="all"),
}


def train(tx, params):
    values, state = [], tx.init(params)
    for n, loss in enumerate([of_both, of_one, of_one, of_both]):
        ids = jnp.array([2 * n, 1, n - 9], jnp.int32)
        params, state, value = js.train_step(loss, tx)(params, state, ids)
        values.append(value)
    evaluate = js.eval_step(lambda p, ids: (p["a"][ids], of_both(p, ids)), tx)
    values.append(evaluate(params, state, jnp.arange(4)))
    return tx.flush(params, state)[0], values, tx.now(params, state)


@functools.cache
def alone(kind):
    return fast_jit(functools.partial(train, ALONE[kind]))(PARAMS)


def check(outer, inner, kind):
    tx = WRAPPERS[outer](WRAPPERS[inner](ALONE[kind]))
    found = fast_jit(functools.partial(train, tx))(PARAMS)
    assert_close(found, alone(kind), rtol=1e-4, atol=1e-5)


PAIRS = st.tuples(*[st.sampled_from(list(WRAPPERS))] * 2, st.sampled_from(list(ALONE)))


@pytest.mark.fuzz
@pytest.mark.slow
@examples(40)
@given(PAIRS)
def test_nested_wrappers(pair):
    check(*pair)
