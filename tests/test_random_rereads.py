"""Random losses that are made of looked-up rows, many of which a CPU reads again."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PROGRAMS, assert_close
from hypothesis import given, note, settings
from hypothesis import strategies as st

import jslices as js
from jslices._grad.reread import slot_gradient, values_again

pytestmark = pytest.mark.usefixtures("rows_are_large")

V, D = 7, 3
RNG = np.random.default_rng(0)
PARAMS = {"table": jnp.asarray(RNG.normal(size=(V, D)), jnp.float32)}
IDS = jnp.array([4, 1, 4, 0, 6, 6], jnp.int32)
WEIGHTS = jnp.asarray(RNG.normal(size=(len(IDS), 1)), jnp.float32)

LOOKUPS = [
    "P['table'][IDS]",
    "P['table'][IDS[::-1]]",
    "P['table'].at[IDS + 1].get(mode='fill', fill_value=0.5)",
    "jnp.take(P['table'], IDS.reshape(3, 2), axis=0, mode='clip').reshape(6, D)",
    "js.embedding_lookup(P['table'], (IDS * 3) % V)",
]
UNARY = [
    "jnp.sin({})",
    "jnp.tanh({})",
    "jnp.abs({})",
    "jax.nn.relu({})",
    "jnp.where({0} > 0.2, {0}, -0.3 * {0})",
    "({} * WEIGHTS)",
    "({0} - {0}.sum(-1, keepdims=True))",
    "jax.jit(jnp.cos)({})",
    "jax.checkpoint(lambda x: jnp.exp(-x * x))({})",
]
BINARY = ["({} + {})", "({} - {})", "({} * {})", "jnp.maximum({}, {})"]
LOSSES = [
    "jnp.mean({} ** 2)",
    "jnp.sum(jnp.square(jnp.cos({}).sum(-1)))",
    "jnp.sum(jnp.abs({} * WEIGHTS).sum(0) ** 2)",
    "jnp.sum(jnp.square({}.sum(-1)) + 1) + 0.1 * jnp.mean({} ** 2)",
    "jnp.sum({0}.reshape(3, 2, D).sum(1) ** 2 - ({0}.reshape(3, 2, D) ** 2).sum(1))",
]

rows = st.recursive(
    st.sampled_from(LOOKUPS),
    lambda some: st.one_of(
        st.builds(str.format, st.sampled_from(UNARY), some),
        st.builds(str.format, st.sampled_from(BINARY), some, some),
    ),
    max_leaves=4,
)
one_lookup = st.recursive(
    st.sampled_from([LOOKUPS[0], LOOKUPS[2], LOOKUPS[4]]),
    lambda some: st.builds(str.format, st.sampled_from(UNARY), some),
    max_leaves=3,
)
losses = st.one_of(
    st.builds(str.format, st.sampled_from(LOSSES), rows, rows),
    st.builds(str.format, st.sampled_from(LOSSES[:3]), one_lookup),
)


def loss_of(code):
    namespace = {"jax": jax, "jnp": jnp, "js": js, "IDS": IDS, "WEIGHTS": WEIGHTS}
    return eval(f"lambda P: {code}", namespace | {"V": V, "D": D})


def check(code):
    """Compares with JAX's; returns whether rows are read again, and by slot."""
    loss = loss_of(code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", js.DensificationWarning)
        wanted, dense = jax.value_and_grad(loss)(PARAMS)
    value, grads = js.value_and_grad(loss)(PARAMS)
    again = values_again(grads["table"])
    slices = js.IndexedSlices(again, grads["table"].indices, (V, D))
    for got in (grads["table"], slices):
        assert_close((value, got), (wanted, dense["table"]), rtol=2e-3, atol=2e-4)
    some = slot_gradient(grads["table"])
    if some is not None:
        slots = jnp.array([5, 0, 2, 2])
        read = some.table[jnp.clip(grads["table"].indices[slots], 0, V - 1)]
        present = (grads["table"].indices[slots] < V)[:, None]
        got, wanted = some.values(slots, read), grads["table"].values[slots]
        assert_close(got * present, wanted * present, rtol=2e-3, atol=2e-4)
    return again is not grads["table"].values, some is not None


@pytest.mark.fuzz
def test_random_losses():
    read_again = []

    @settings(max_examples=PROGRAMS)
    @given(losses)
    def check_one(code):
        note(code)
        read_again.append(check(code))

    check_one()
    again, by_slot = np.mean(read_again, axis=0)
    assert again > 0.4 and by_slot > 0.05


def test_the_fuzz_can_fail(monkeypatch):
    """Other rows than those of the loss are noticed."""
    monkeypatch.setattr("jslices._grad.reread.after", lambda ids, loss: ids * 0)
    with pytest.raises(AssertionError):
        check(f"jnp.mean({LOOKUPS[0]} ** 2)")
