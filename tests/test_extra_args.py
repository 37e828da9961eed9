"""Extra arguments of `update`, strict dtypes, and exact steps that do not catch up."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import fast_jit
from optimizers import FIRST, SCHEDULE, D, V, label, make

import jslices as js

PARAMS = {"table": np.ones((V, D), np.float32), "w": np.ones(4, np.float32)}
PARAMS = jax.device_put(PARAMS)
ROWS = js.IndexedSlices(np.ones((3, D), np.float32), [5, 2, 5], (V, D))
GRADS = {"table": ROWS, "w": PARAMS["w"]}
#: Which halves the rate where the value does not fall, and fails without ``value=``.
PLATEAU = optax.contrib.reduce_on_plateau(0.5, patience=1, cooldown=0)
SLOWER = js.from_optax(optax.chain(optax.sgd(0.5), PLATEAU))
LABELS = {"table": "rows", "w": "dense"}


@pytest.mark.parametrize(
    "tx",
    [
        SLOWER,
        js.optim.chain(js.optim.clip(9.0), js.sgd(0.5), js.from_optax(PLATEAU)),
        js.optim.partition({"rows": SLOWER, "dense": optax.sgd(0.5)}, "rows"),
        js.optim.partition({"rows": js.sgd(0.5), "dense": SLOWER}, LABELS),
        js.optim.masked(SLOWER, {"table": False, "w": True}),
        js.optim.multi_steps(SLOWER, 1, GRADS),
        js.optim.freeze_rows(SLOWER, {"table": lambda rows: rows < 1, "w": None}),
        js.optim.with_state_dtype(SLOWER, "float32"),
    ],
    ids=[
        "from_optax",
        "chain",
        "prefix",
        "partition",
        "masked",
        "multi",
        "freeze",
        "dtype",
    ],
)
def test_the_value_of_the_loss_arrives(tx):
    @fast_jit
    def step(params, state, value):
        return tx.apply(GRADS, state, params, value=value, other=None)

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(4):
        params, state = step(params, state, 1.0)
    # Halved at each step.
    assert np.asarray(params["w"])[0] == 1 - 0.5 - 0.25 - 0.125 - 0.0625
    with_value = functools.partial(tx.update, value=1.0, other=None)
    updates, _ = jax.eval_shape(with_value, GRADS, state, params)
    assert js.is_slices(updates["table"])
    with pytest.raises(TypeError, match="required keyword-only argument: 'value'"):
        tx.update(GRADS, state, params)


@pytest.mark.parametrize("tx", [js.optim.chain(optax.scale_by_polyak(1.0)), SLOWER])
def test_combinators_of_optax_hand_the_loss_over(tx):
    combined = optax.chain(optax.named_chain(("inner", tx)))
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    outer, inner = combined.init(PARAMS), tx.init(PARAMS)
    for value in (3.0, 4.0, 5.0):
        got, outer = combined.update(grads, outer, PARAMS, value=value)
        wanted, inner = tx.update(grads, inner, PARAMS, value=value)
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert isinstance(tx, js.GradientTransformation)


def test_extra_arguments_outside_of_jit():
    for name, kwargs in [("sgd", {}), ("adam", {"untouched": "exact"}), ("lamb", {})]:
        for rate in (0.1, SCHEDULE):
            tx = make(js, name, rate, kwargs) if kwargs or rate == 0.1 else js.sgd(rate)
            updates, _ = tx.update(
                ROWS, tx.init(PARAMS["table"]), PARAMS["table"], value=1.0
            )
            assert js.is_slices(updates)


def test_exact_steps_hand_the_loss_over():
    tx = js.optim.chain(js.from_optax(PLATEAU), js.adam(0.1, untouched="exact"))
    step = fast_jit(js.train_step(lambda params, ids: params[ids].sum(), tx))
    _, state, value = step(PARAMS["table"], tx.init(PARAMS["table"]), np.array([1, 1]))
    assert state[0].best_value == value == 6.0


def test_extra_arguments_that_mirror_parameters_are_divided():
    seen = {}

    def update(grads, state, params=None, *, like, other):
        seen.update(like=jax.tree.leaves(like), other=other)
        return grads, state

    link = js.GradientTransformation(lambda params: (), update)
    for mask, count in ((True, 1), (False, 2)):
        tx = js.optim.masked(
            link, {"table": False, "w": True}, mask_compatible_extra_args=mask
        )
        for call in (tx.update, tx.apply):
            call(GRADS, tx.init(PARAMS), PARAMS, like=PARAMS, other=7, more=0)
            assert len(seen["like"]) == count and seen["other"] == 7


@pytest.mark.parametrize("name, kwargs", FIRST, ids=label)
def test_strict_promotion(name, kwargs):
    """As Optax's own arithmetic is not: optax.adam fails."""
    # An exact one does what a lazy one does, and more.
    untouched = "lazy" if name in ("ftrl", "lamb", "adafactor") else "exact"
    tx = make(js, name, 0.1, {**kwargs, "untouched": untouched})

    def step(params, state, grads):
        params, state = tx.catch_up(params, state, {"table": jnp.arange(2), "w": None})
        return tx.flush(*tx.apply(grads, state, params))

    # Of 16 bits, beside float32: where all is float32, nothing is promoted.
    params, grads = js.tree.map(lambda x: x.astype("bfloat16"), (PARAMS, GRADS))
    with jax.numpy_dtype_promotion("strict"):
        new, _ = jax.eval_shape(lambda: step(params, tx.init(params), grads))
        assert new["table"].dtype == "bfloat16"


def test_strict_promotion_around_an_optimizer():
    table, adam = PARAMS["table"], js.adam(0.1)
    with jax.numpy_dtype_promotion("strict"):
        for link in (
            js.optim.clip(1.0),
            js.optim.clip_by_global_norm(1.0),
            js.optim.clip_rows_by_norm(1.0),
            js.optim.clip_by_block_rms(1.0),
            js.optim.combine_duplicates("sqrtn"),
            js.optim.scale(lambda rows: jnp.where(rows < 2, 0.1, 1.0)),
        ):
            for grads in (ROWS, table):
                jax.eval_shape(lambda g, tx=link: tx.update(g, ()), grads)
        for tx in (
            js.optim.multi_steps(adam, 2, ROWS),
            js.optim.freeze_rows(adam, lambda rows: rows < 2),
            js.optim.with_state_dtype(adam, "bfloat16"),
            js.optim.partition({"rows": adam}, "rows"),
            js.from_optax(optax.rmsprop(0.1)),
        ):
            jax.eval_shape(lambda t, tx=tx: tx.apply(ROWS, tx.init(t), t), table)
        jax.eval_shape(lambda: js.accumulate_gradients(lambda i: ROWS, jnp.arange(3)))
        js.sgd(0.1).apply(ROWS, js.sgd(0.1).init(table), table)  # without jit


# --- Steps of rows that did not catch up ------------------------------------------------

IDS = np.array([0, 1])


def loss(params, ids):
    return ((params["table"][ids] @ params["mix"]) ** 2).sum()


def warned(tx, step):
    """Of a step that is traced twice: the files of the warnings, one for each line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            traced(tx, step)
    assert all("train_step(loss, tx)" in str(w.message) for w in caught)
    return [w.filename for w in caught]


def traced(tx, step):
    jax.eval_shape(functools.partial(step, tx), *started(tx), IDS)


def started(tx):
    params = {"table": np.ones((6, 2), np.float32), "mix": np.ones(2, np.float32)}
    return params, tx.init(params)


def by_rows(tx, params, state, ids):
    return tx.apply(js.grad(loss)(params, ids), state, params)


def by_arrays(tx, params, state, ids):
    return tx.apply(jax.grad(loss)(params, ids), state, params)


def catching_up(tx, params, state, ids):
    return tx.catch_up(params, state, {"table": ids, "mix": None})


def by_hand(tx, params, state, ids):
    return by_rows(tx, *catching_up(tx, params, state, ids), ids)


def by_exact_step(tx, params, state, ids):
    return js.train_step(loss, tx)(params, state, ids)


def flushing(tx, params, state, ids):
    return by_rows(tx, *tx.flush(params, state), ids)


def test_steps_that_do_not_catch_up_are_warned_of():
    for tx, step in (
        (js.sgd(0.1, momentum=0.9, untouched="exact"), by_arrays),
        (js.rmsprop(0.1, untouched="exact"), by_hand),
        (js.lion(0.1, untouched="exact"), by_exact_step),
        (js.amsgrad(0.1, untouched="exact"), flushing),
    ):
        assert warned(tx, step) == []
    # Another one that has caught up says nothing of these.
    other = js.sgd(0.0123, momentum=0.9, untouched="exact")
    for tx in (
        js.optim.chain(js.optim.clip(1.0), js.lion(0.0123, untouched="exact")),
        js.optim.partition(
            {"table": other, "mix": js.sgd(0.1)}, {"table": "table", "mix": "mix"}
        ),
        js.amsgrad(0.0123, untouched="exact"),
    ):
        assert warned(tx, by_rows) == [__file__]


def in_a_branch(tx, params, state, ids):
    params, state = catching_up(tx, params, state, ids)
    grads = js.grad(loss)(params, ids)
    step = lambda now: tx.apply(grads, *now[::-1])  # noqa: E731
    return jax.lax.cond(js.all_finite(grads), step, lambda now: now, (params, state))


def in_a_loop(tx, params, state, ids):
    body = lambda now, ids: (by_hand(tx, *now, ids), None)  # noqa: E731
    return jax.lax.scan(body, (params, state), ids[None])[0]


def several(tx, params, state, ids):
    for _ in range(2):
        params, state = by_hand(tx, params, state, ids)
    return params, state


def in_wrappers(tx, params, state, ids):
    parts = js.optim.partition({0: tx, 1: js.sgd(0.1)}, {"table": 0, "mix": 1})
    first = {"table": lambda rows: rows < 1, "mix": None}
    tx = js.optim.chain(js.optim.clip(1.0), js.optim.freeze_rows(parts, first))
    return by_exact_step(tx, params, tx.init(params), ids)


COUNT = itertools.count()


def makes_its_own():
    """A function that makes equal optimizers, which are none of another test."""
    return functools.partial(js.sgd, 1e-3 + 1e-6 * next(COUNT), 0.9, untouched="exact")


@pytest.mark.parametrize(
    "step", [by_exact_step, by_hand, flushing, in_a_branch, in_a_loop, several, in_wrappers]
)
def test_a_program_that_catches_up_does_not_silence_another_one(step):
    make = makes_its_own()
    assert warned(make(), step) == []
    assert warned(make(), by_rows) == [__file__]
    assert warned(make(), step) == []


@pytest.mark.slow
def test_steps_outside_of_jit_silence_no_program_nor_does_saving():
    make = makes_its_own()
    tx = make()
    params, state, _ = by_exact_step(tx, *started(tx), IDS)
    tx.flush(params, state)
    assert warned(make(), by_rows) == [__file__]


@pytest.mark.parametrize("outside", ["eager", "in a program of its own"])
def test_rows_may_catch_up_outside_of_the_program_that_steps(outside):
    tx = makes_its_own()()
    if outside == "eager":
        catching_up(tx, *started(tx), IDS)
    else:
        traced(tx, catching_up)
    assert warned(tx, by_rows) == []


def test_a_gradient_at_rows_as_they_are_now_needs_no_other_catch_up():
    def reading(as_now, tx, params, state, ids):
        of_now = lambda params, ids: loss(tx.now(params, state), ids)  # noqa: E731
        grads = js.grad(of_now if as_now else loss)(params, ids)
        return tx.apply(grads, state, params)

    tx = makes_its_own()()
    assert warned(tx, functools.partial(reading, True)) == []
    assert warned(tx, functools.partial(reading, False)) == [__file__]
