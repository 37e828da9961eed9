"""What does not belong together is refused by name, before anything is computed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import slow_unless
from optimizers import FIRST, OTHER_STATE, D, V, label, make, rng_tree, slices_of

import jslices as js

RNG = np.random.default_rng(0)
PARAMS = rng_tree(RNG)
GRADS = {"table": slices_of(RNG, [1, 1, 4]), "w": PARAMS["w"]}
# Gradients of another array, for each leaf, and what is said of them.
OF_OTHERS = {
    "wider rows": ("table", slices_of(RNG, [1, 1], (V, D + 1))),
    "more rows": ("table", slices_of(RNG, [1, 1], (V + 1, D))),
    "wider rows, V unknown": ("table", js.IndexedSlices(np.ones((2, D + 1)), [1, 1])),
    "dense and wider": ("table", jnp.ones((V, D + 1))),
    "dense and longer": ("w", jnp.ones(5)),
    "dense and broadcast": ("w", jnp.ones(1)),
}
EXACT = [
    ("sgd", {"momentum": 0.9, "untouched": "exact"}),
    ("adam", {"untouched": "exact"}),
    ("adamw", {"weight_decay_mode": "all"}),
]


WRAPPED = {
    "from_optax": js.from_optax(optax.adam(0.1)),
    "chain": js.optim.chain(js.optim.clip(9.0), js.adam(0.1)),
    "partition": js.optim.partition({"a": js.adam(0.1)}, "a"),
    "masked": js.optim.masked(js.adam(0.1), True),
    "multi_steps": js.optim.multi_steps(js.adam(0.1), 1, GRADS),
}


def refused(call):
    """Calls it where no array may be computed: shapes must be enough."""
    with pytest.raises((TypeError, ValueError)) as caught:
        jax.eval_shape(call)
    return str(caught.value)


@pytest.mark.parametrize(
    "name, kwargs",
    slow_unless([*FIRST, *EXACT, *OTHER_STATE], [*FIRST, *EXACT].__contains__),
    ids=label,
)
def test_gradients_of_another_array(name, kwargs):
    tx = make(js, name, 0.1, kwargs)
    state = tx.init(PARAMS)
    for leaf, wrong in OF_OTHERS.values():
        grads = {**GRADS, leaf: wrong}
        text = refused(lambda grads=grads: tx.update(grads, state, PARAMS))
        assert f"the gradient at ['{leaf}'] belongs to an array of shape" in text
        assert f"the parameter has shape {PARAMS[leaf].shape}" in text


@pytest.mark.parametrize(
    "name, kwargs", slow_unless([*FIRST, *OTHER_STATE], FIRST.__contains__), ids=label
)
def test_gradients_of_another_array_than_the_state(name, kwargs):
    """Without parameters. One number for each row goes with rows of any width."""
    tx = make(js, name, 0.1, kwargs)
    state = tx.init(PARAMS)
    arrays = {k: v for k, v in state._asdict().items() if v is not None and k != "count"}
    for kind, (leaf, wrong) in OF_OTHERS.items():
        grads = {**GRADS, leaf: wrong}
        if not any(x[leaf].ndim == PARAMS[leaf].ndim for x in arrays.values()):
            if not arrays or "wider" in kind:
                continue
        text = refused(lambda grads=grads: tx.update(grads, state))
        needs = (
            rf"an array of shape .* at \['{leaf}'\] needs \w+ of shape .*, got .*tx\.init"
        )
        assert re.search(needs, text) or "needs the parameters as well" in text


@pytest.mark.parametrize("wrap", WRAPPED)
def test_gradients_of_another_array_inside_and_lifted(wrap):
    tx = WRAPPED[wrap]
    state = tx.init(PARAMS)
    leaf, wrong = OF_OTHERS["wider rows"]
    text = refused(lambda: tx.update({**GRADS, leaf: wrong}, state, PARAMS))
    assert "at ['table']" in text


@pytest.mark.parametrize("name, kwargs", [*FIRST, *EXACT], ids=label)
def test_the_state_of_another_optimizer_or_of_other_parameters(name, kwargs):
    tx = make(js, name, 0.1, kwargs)
    other = js.sgd(0.1) if name != "sgd" else js.adagrad(0.1)
    wrong = [
        (
            other.init(PARAMS),
            r"its state in \w+State\(.*, got a \w+State\(.*; pass the state",
        ),
        (tx.init({**PARAMS, "table": jnp.zeros((V + 1, D))}), r"at \['table'\] needs \w+"),
        (tx.init({**PARAMS, "more": jnp.zeros(2)}), "has another structure than"),
    ]
    if len(jax.tree.leaves(tx.init(PARAMS))) == 1:  # there is a count, and that is all
        wrong = wrong[:1]
    ids = {"table": jnp.arange(2), "w": None}
    for state, message in wrong:
        steps = [lambda: tx.update(GRADS, state, PARAMS)]  # noqa: B023
        if tx.catches_up:
            steps.append(lambda: tx.flush(PARAMS, state))  # noqa: B023
            steps.append(lambda: tx.catch_up(PARAMS, state, ids))  # noqa: B023
        for step in steps:
            assert re.search(message, refused(step))


@pytest.mark.parametrize(
    "tx, other, message",
    [
        (js.adam(0.1), js.adam(0.1, untouched="exact"), "keeps mu, nu in its AdamState"),
        (
            js.adam(0.1, untouched="exact"),
            js.adam(0.1),
            "keeps mu, nu, clock in its AdamState, got one with mu, nu: it was made",
        ),
        (
            js.sgd(0.1),
            js.sgd(0.1, 0.9),
            "keeps nothing in its SgdState, got one with trace",
        ),
    ],
)
def test_the_state_of_other_settings(tx, other, message):
    assert message in refused(lambda: tx.update(GRADS, other.init(PARAMS), PARAMS))


@pytest.mark.parametrize("wrap", WRAPPED)
def test_the_state_of_another_transformation(wrap):
    tx, wrong = WRAPPED[wrap], js.adagrad(0.1).init(PARAMS)
    text = refused(lambda: tx.update(GRADS, wrong, PARAMS))
    assert "got a AdagradState(count, sum_of_squares); pass the state that its own" in text


def test_updates_of_another_array():
    for update in (jnp.ones((1, 3)), jnp.ones((V, D + 1)), OF_OTHERS["wider rows"][1]):
        text = refused(lambda u=update: js.apply_updates(PARAMS, {"table": u, "w": None}))
        assert "to a parameter of shape (9, 3) at ['table']; the shapes must be" in text


def test_keys_are_no_parameters():
    with pytest.raises(
        TypeError, match=r"at \['key'\]: wanted an array of numbers, got key"
    ):
        js.adam(0.1).init({"key": jax.random.key(0)})
