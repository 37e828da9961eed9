"""``tx.apply``: what it refuses, what it leaves alone, and what a chain makes of it.

That it steps as ``update`` and ``apply_updates`` do is in test_step.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit
from optimizers import ALL, D, V, make, rng_tree, slices_of

import jslices as js

FIRST = {name: kwargs for name, kwargs in reversed(ALL)}
TABLE, ONE = jnp.zeros((V, D)), jnp.array([1])


@pytest.mark.parametrize("name", FIRST)
def test_parameters_are_needed(name):
    tx = make(js, name, 0.1, FIRST[name])
    grads = js.IndexedSlices(jnp.ones((1, D)), ONE, (V, D))
    with pytest.raises(ValueError, match=r"params, state = tx.apply\(grads, state, params"):
        tx.apply(grads, tx.init(TABLE), None)


@pytest.mark.parametrize(
    "grads",
    [
        js.IndexedSlices(jnp.ones((1, D)), ONE, (V + 1, D)),
        js.IndexedSlices(jnp.ones((1, 1)), ONE, (V, 1)),
        js.IndexedSlices(jnp.ones((1, D + 1)), ONE),
        js.IndexedSlices(jnp.ones((1, 1)), ONE),
        js.IndexedSlices(jnp.ones((1, D, 1)), ONE),
    ],
    ids=lambda grads: f"{grads.values.shape} of {grads.dense_shape}",
)
@pytest.mark.parametrize("name", FIRST)
def test_slices_of_another_shape_are_refused(name, grads):
    tx = make(js, name, 0.1, FIRST[name])
    with pytest.raises(ValueError, match="shape"):
        tx.apply(grads, tx.init(TABLE), TABLE)


@pytest.mark.parametrize("name", [name for name in FIRST if name != "sgd"])
@pytest.mark.parametrize("shape", [(V, D), None])
def test_state_of_another_table_is_refused(name, shape):
    tx = make(js, name, 0.1, FIRST[name])
    grads = js.IndexedSlices(jnp.ones((1, D)), ONE, shape)
    with pytest.raises(ValueError, match=r"was the state made with tx.init"):
        tx.apply(grads, tx.init(TABLE[1:]), TABLE)


def test_what_has_no_gradient_or_is_none_stays():
    tx, table = js.adam(0.1), np.zeros((V, D), np.float32)
    rows = js.IndexedSlices(jnp.ones((1, D)), ONE)
    params = {"table": table, "other": table, "none": None}
    grads = {"table": rows, "other": None, "none": None}
    new, state = tx.apply(grads, tx.init(params), params)
    assert new["none"] is None and not new["other"].any()
    np.testing.assert_allclose(new["table"][:3, 0], [0, -0.1, 0], rtol=1e-5)
    assert int(state.count) == 1 and not table.any()
    new, _ = js.sgd(0.1).apply({"a": rows}, js.sgd(0.1).init({}), {"a": None})
    assert new == {"a": None}


LAST = {"adam": js.adam(0.1), "clip": js.optim.clip(0.5), "optax": optax.trace(0.9)}


@pytest.mark.parametrize("last", LAST)
def test_a_chain_applies_what_its_links_update(last):
    clips = js.optim.clip_by_global_norm(0.3), js.optim.clip(0.1)
    tx, rng = js.optim.chain(*clips, LAST[last]), np.random.default_rng(2)
    params = rng_tree(rng)
    grads = {"table": slices_of(rng, [1, 1, 4]), "w": jnp.ones_like(params["w"])}
    if last == "optax":
        grads["table"] = grads["table"].to_dense()
    state = tx.init(params)
    updates, wanted = fast_jit(tx.update)(grads, state, params)
    got, new = fast_jit(tx.apply)(grads, state, params)
    assert_close(got, js.apply_updates(params, updates), rtol=1e-6, atol=1e-7)
    assert_close(new, wanted, rtol=1e-6, atol=1e-7)


def test_a_chain_hands_its_last_links_own_apply_on():
    def apply(grads, state, params):
        return jax.tree.map(lambda g: g + 7, grads), state

    last = js.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, s), apply=apply)
    tx = js.optim.chain(js.optim.clip(0.5), last)
    assert tx.apply(jnp.ones(2), tx.init(TABLE), jnp.zeros(2))[0].tolist() == [7.5, 7.5]
    assert js.optim.chain().apply(jnp.ones(2), (), jnp.zeros(2))[0].tolist() == [1, 1]


def test_parameters_that_are_not_needed_may_have_any_structure():
    grads = {"table": js.IndexedSlices(jnp.ones((1, D)), ONE, (V, D))}
    params, others = {"table": TABLE}, {"another": (TABLE, TABLE)}
    for name in ("adam", "adamw"):
        tx = getattr(js, name)(0.1)
        wanted, _ = tx.update(grads, tx.init(params), params)
        if name == "adamw":
            with pytest.raises(ValueError):
                tx.update(grads, tx.init(params), others)
        else:
            assert_close(tx.update(grads, tx.init(params), others)[0], wanted)


def test_the_plan_of_each_gradient():
    grads = {
        "table": js.IndexedSlices(jnp.ones((1, D)), ONE, (V, D)),
        "w": jnp.ones(()),
        "b": None,
    }
    params = {"table": TABLE, "w": jnp.ones(()), "b": TABLE}
    adam = js.adam(0.1)
    labels = {"table": "rows", "w": "rest", "b": "rest"}
    for tx in (
        adam,
        js.optim.chain(js.optim.clip(1.0), adam),
        js.optim.chain(adam, js.optim.scale(0.5)),
        js.optim.partition({"rows": adam, "rest": optax.sgd(0.1)}, labels),
        js.optim.masked(adam, True),
        js.optim.multi_steps(adam, 1, grads),
        js.optim.freeze_rows(adam, {"table": lambda rows: rows < 2, "w": None, "b": None}),
        js.optim.with_state_dtype(adam, "float32"),
        js.from_optax(optax.adam(0.1)),
        js.optim.freeze_rows(
            js.optim.multi_steps(js.optim.masked(adam, True), 1, grads), None
        ),
    ):
        plans = tx.plan(grads, params)
        assert (plans["table"].way, plans["w"], plans["b"]) == ("together", None, None)
        assert "1 entries are stepped all together" in str(plans["table"])


def test_the_plan_of_several_gradients():
    """That of the step, which the rows of all of them take."""
    rows = js.IndexedSlices(jnp.ones((2, D)), jnp.array([1, 2]), (V, D))
    tx = js.optim.multi_steps(js.adam(0.1), 3, rows)
    assert tx.plan(rows, TABLE).entries == min(6, V)


def test_the_plan_of_factors_is_that_of_their_summed_rows():
    table, ids = jax.ShapeDtypeStruct((1000, 200), jnp.float32), jnp.zeros(5000, jnp.int32)
    grads = jax.eval_shape(js.grad(lambda t, ids: t[ids].sum()), table, ids)
    factored = js.adafactor(0.1).plan(grads, table)
    assert (factored.way, factored.entries, factored.sums) == ("together", 1000, False)
    assert js.adafactor(0.1, factored=False).plan(grads, table).way == "all rows"
