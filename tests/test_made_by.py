"""An optimizer knows how it was made, and is made again with another learning rate."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_close
from optimizers import FIRST, label, make

import jslices as js


@pytest.fixture
def rates():
    """What Keras does with learning rates, where it is there."""
    pytest.importorskip("keras")
    from jslices.keras import description

    return description


PARAMS = {"table": jnp.ones((6, 2)), "w": jnp.ones(2)}
GRADS = {
    "table": js.IndexedSlices(jnp.ones((3, 2)), jnp.array([4, 1, 4]), (6, 2)),
    "w": jnp.ones(2),
}


@pytest.mark.parametrize("name, kwargs", FIRST, ids=label)
def test_every_optimizer(name, kwargs):
    tx = make(js, name, 0.1, kwargs)
    assert tx.made_by.function is getattr(js, name)
    again = tx.made_by()
    wanted = tx.apply(GRADS, tx.init(PARAMS), PARAMS)
    assert_close(again.apply(GRADS, again.init(PARAMS), PARAMS), wanted, rtol=0, atol=0)


def test_another_learning_rate_reaches_what_stands_inside(rates):
    def of(rate):
        return js.optim.chain(
            js.optim.clip_global_norm(1.0),
            js.optim.partition(
                {
                    "a": js.sgd(rate),
                    "b": js.optim.masked(js.adam(learning_rate=rate), True),
                },
                {"table": "a", "w": "b"},
            ),
        )

    tx, wanted = of(0.1), of(0.5)
    assert rates.learning_rates(tx) == [0.1, 0.1] and not rates.learning_rates(
        js.optim.clip(1.0)
    )

    @jax.jit
    def step(rate):
        changed = rates.with_learning_rate(tx, rate)
        return changed.apply(GRADS, changed.init(PARAMS), PARAMS)[0]

    assert_close(step(0.5), wanted.apply(GRADS, wanted.init(PARAMS), PARAMS)[0])


def test_what_was_put_together_from_functions_has_none():
    assert js.GradientTransformation(*js.sgd(0.1)).made_by is None


def test_what_knows_no_learning_rate_stays(rates):
    tx = js.GradientTransformation(*js.sgd(0.1))
    assert rates.with_learning_rate(tx, 1.0) is tx
    assert not rates.learning_rates(js.from_optax(optax.sgd(0.1)))


def test_what_stands_around_an_optimizer_hands_its_learning_rate_on(rates):
    for tx in (
        js.optim.freeze_rows(js.sgd(0.1), None),
        js.optim.multi_steps(js.sgd(0.1), 2, GRADS),
        js.optim.with_state_dtype(js.sgd(0.1), "float32"),
    ):
        assert rates.learning_rates(tx) == [0.1]
        assert rates.learning_rates(rates.with_learning_rate(tx, 0.5)) == [0.5]
