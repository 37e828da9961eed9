"""Proofs from the compiled program: nothing of the table's size but the table itself."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from optimizers import ALL, label, make

import jslices as js
from jslices._grad import api, reread
from jslices._proof import program
from jslices.optim import in_place, large, leaf
from jslices.optim import step as choice
from jslices.testing import assert_in_place, assert_no_dense_temporary

V, D, K = 200_000, 16, 64
TABLE_BYTES = V * D * 4
SIX = 6 * D * 4  # bytes of six arrays of the gradient's size, for each id
MANY = 5_000  # that is where chunks begin, unless rows are short
# How many ids, and what adds the updates.
REGIMES = {
    "at_once": (K, js.apply_updates),
    "many_at_once": (MANY, js.apply_updates),
    "in_chunks": (MANY, optax.apply_updates),
    "in_the_gradient": (MANY, js.apply_updates),
}
OTHER_WAY_ROUND = {
    "at_once": (K, optax.apply_updates),
    "in_chunks": (MANY, js.apply_updates),
    "in_the_gradient": (MANY, optax.apply_updates),
}
PARAMS = {
    "table": jax.ShapeDtypeStruct((V, D), jnp.float32),
    "w": jax.ShapeDtypeStruct((D,), jnp.float32),
}
# (name, settings, arrays of the table's size, the table counted)
OPTIMIZERS = [
    ("sgd", {}, 1),
    ("sgd", {"momentum": 0.9}, 2),
    ("adagrad", {}, 2),
    ("rowwise_adagrad", {}, 1),
    ("adam", {}, 3),
    ("adamw", {}, 3),
    ("partial_rowwise_adam", {}, 2),
    ("amsgrad", {}, 4),
    ("rmsprop", {}, 2),
    ("rmsprop", {"centered": True, "momentum": 0.9}, 4),
    ("adadelta", {}, 3),
    ("ftrl", {}, 3),
    ("proximal_adagrad", {}, 2),
    ("lion", {}, 2),
    ("lamb", {}, 3),
    ("adafactor", {"min_dim_size_to_factor": 1}, 1),
    ("adafactor", {"momentum": 0.9, "weight_decay_rate": 0.1, "factored": False}, 3),
    ("adam", {"nesterov": True}, 3),
    ("adamw", {"nesterov": True}, 3),
    ("lamb", {"weight_decay": 0.1}, 3),
]
# Adafactor has a way of its own.
BY_RULE = [case for case in OPTIMIZERS if case[0] != "adafactor"]
EXACT = [
    ("sgd", {"momentum": 0.9}, 2),
    ("adam", {}, 3),
    ("adamw", {}, 3),
    ("amsgrad", {}, 4),
    ("rmsprop", {"momentum": 0.9}, 3),
    ("adadelta", {}, 3),
    ("lion", {}, 2),
    ("partial_rowwise_adam", {}, 2),
    ("proximal_adagrad", {}, 2),
]


def case_label(case):
    return "-".join(label(part) for part in case[:2])


def loss(params, ids):
    return ((params["table"][ids] @ params["w"]) ** 2).mean()


# Nothing here is run, and memory is given out before machine code is made: that code need
# not be good.
unoptimized = {"xla_backend_optimization_level": 0}


def ordinary_step(value_and_grad, tx, apply_updates, catch_up=False):
    @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=unoptimized)
    def step(params, state, ids):
        if catch_up:
            params, state = tx.catch_up(params, state, {"table": ids, "w": None})
        value, grads = value_and_grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates), state, value

    return step


def arguments(tx, num_ids):
    ids = jax.ShapeDtypeStruct((num_ids,), jnp.int32)
    return PARAMS, jax.eval_shape(tx.init, PARAMS), ids


def prove(step, args, tables, temp_bytes):
    memory = assert_in_place(step, *args, min_bytes=V * 4)  # slots [V] as well
    assert assert_no_dense_temporary(step, *args) == memory
    # The table and each of its state arrays share the memory of the donated ones.
    assert memory.alias_bytes >= tables * TABLE_BYTES
    assert memory.output_bytes - memory.alias_bytes < 1024
    assert memory.temp_bytes < min(temp_bytes, TABLE_BYTES / 4)


@pytest.fixture(autouse=True)
def _compile_once(monkeypatch):
    """Both proofs of a step read one program."""
    compiled, known = program.compiled, {}

    def once(step, *rest):
        if step not in known:
            known[step] = compiled(step, *rest)
        return known[step]

    monkeypatch.setattr(program, "compiled", once)


def calls_of(monkeypatch, name):
    """The calls of a way of large gradients."""
    calls, run = [], getattr(large, name)

    def spy(*args):
        calls.append(args)
        return run(*args)

    monkeypatch.setattr(large, name, spy)
    return calls


@pytest.fixture
def folded(monkeypatch):
    """The calls of what works in the gradient's memory."""
    return calls_of(monkeypatch, "step_folded")


@pytest.fixture
def rows_are_large(monkeypatch):
    for module, name, value in (
        (choice, "is_large", lambda *shape: True),
        (leaf, "is_mapped", lambda num_bytes: True),
        (reread, "LARGE", 0),
        (reread, "is_large", lambda *shape: True),
        (api, "LARGE", 0),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def rows_are_not_short(monkeypatch):
    monkeypatch.setattr(in_place, "FEW_BYTES", 0)


def prove_regime(regime, num_ids, apply_updates, case, request, folded):
    name, settings, tables = case
    is_large = regime == "in_the_gradient"
    if is_large:
        request.getfixturevalue("rows_are_large")
    elif regime == "in_chunks":
        request.getfixturevalue("rows_are_not_short")
    tx = make(js, name, 0.1, settings)
    step = ordinary_step(js.value_and_grad, tx, apply_updates)
    prove(step, arguments(tx, num_ids), tables, SIX * num_ids + 4096)
    # Plain SGD has neither sums nor state, and Adafactor has a way of its own.
    other = name == "adafactor" or (name, settings) == ("sgd", {})
    assert bool(folded) == (is_large and not other)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("case", OPTIMIZERS, ids=case_label)
def test_step_is_in_place_and_without_dense_temporaries(case, regime, request, folded):
    prove_regime(regime, *REGIMES[regime], case, request, folded)


@pytest.mark.parametrize("regime", OTHER_WAY_ROUND)
@pytest.mark.parametrize("case", [OPTIMIZERS[i] for i in (1, 5, 15)], ids=case_label)
def test_both_apply_updates_in_every_regime(case, regime, request, folded):
    prove_regime(regime, *OTHER_WAY_ROUND[regime], case, request, folded)


def squares(params, ids):
    """Whose gradient is computed slot by slot."""
    return (params["table"][ids] ** 2).mean() + (params["w"] ** 2).sum()


@pytest.mark.usefixtures("rows_are_large")
@pytest.mark.parametrize("case", BY_RULE, ids=case_label)
def test_one_call_is_in_place_and_holds_no_gradient(case, monkeypatch):
    name, settings, tables = case
    tx, streamed = make(js, name, 0.1, settings), calls_of(monkeypatch, "step_streamed")

    @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=unoptimized)
    def step(params, state, ids):
        value, grads = js.value_and_grad(squares)(params, ids)
        return *tx.apply(grads, state, params), value

    num_ids = 40_000
    prove(step, arguments(tx, num_ids), tables, num_ids * D * 4)
    assert streamed


def with_metrics(params, ids):
    rows = params["table"][ids]
    return (rows**2).mean() + (params["w"] ** 2).sum(), {"mean": rows.mean()}


def with_a_metric_of_its_own(params, ids):
    rows = params["table"][ids]
    return (rows**2).mean() + (params["w"] ** 2).sum(), rows.max()


@pytest.mark.usefixtures("rows_are_large")
@pytest.mark.parametrize("loss", [with_metrics, with_a_metric_of_its_own])
@pytest.mark.parametrize("in_one_call", [True, False])
def test_what_is_returned_besides_is_read_before_the_update(loss, in_one_call):
    tx = js.adagrad(0.1)

    @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=unoptimized)
    def step(params, state, ids):
        (value, aux), grads = js.value_and_grad(loss, has_aux=True)(params, ids)
        if in_one_call:
            return *tx.apply(grads, state, params), value, aux
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state, value, aux

    prove(step, arguments(tx, MANY), 2, 4 * MANY * (D + 1) * 4 + 2**20)


@pytest.mark.parametrize(
    "case, num_ids",
    [*((case, MANY) for case in EXACT), *((case, K) for case in EXACT[:2])],
    ids=lambda x: case_label(x) if isinstance(x, tuple) else str(x),
)
@pytest.mark.usefixtures("rows_are_not_short")
def test_exact_step_is_in_place_too(case, num_ids):
    name, settings, tables = case
    tx = make(js, name, 0.1, {**settings, "untouched": "exact"})
    step = ordinary_step(js.value_and_grad, tx, js.apply_updates, catch_up=True)
    prove(step, arguments(tx, num_ids), tables, SIX * num_ids + 4096)


def test_every_optimizer_is_proved():
    assert {name for name, _, _ in OPTIMIZERS} == {name for name, _ in ALL}
    exact = {name for name, settings in ALL if _catches_up(name, settings)}
    assert {name for name, _, _ in EXACT} == exact


def _catches_up(name, settings):
    """Whether rows catch up: for some exact is lazy, and some have no exact form."""
    settings = {key: value for key, value in settings.items() if key != "mask"}
    try:
        tx = make(js, name, 0.1, {**settings, "untouched": "exact"})
    except (TypeError, ValueError):
        return False
    return getattr(tx.init(jnp.ones((3, 2))), "clock", None) is not None


def test_the_proof_can_fail():
    tx = optax.adam(0.1)
    step = ordinary_step(jax.value_and_grad, tx, optax.apply_updates)
    args = arguments(tx, K)
    assert assert_in_place(step, *args).temp_bytes >= TABLE_BYTES
    with pytest.raises(
        AssertionError,
        match=r"(?s)f32\[200000,16\] \(12.2 MB\) by .*this is a dense gradient",
    ):
        assert_no_dense_temporary(step, *args)


def test_gradient_alone_is_as_small_as_the_rows():
    ids = jax.ShapeDtypeStruct((K,), jnp.int32)
    memory = jax.jit(js.grad(loss)).lower(PARAMS, ids).compile().memory_analysis()
    # Rows and their numbers, the gradient of w, and the table of pointers to them.
    assert memory.output_size_in_bytes <= K * (D + 1) * 4 + D * 4 + 64
    assert memory.temp_size_in_bytes < 10 * K * D * 4


def test_a_table_of_four_billion_elements_only_lowers():
    table = jax.ShapeDtypeStruct((250_000_000, 16), jnp.float32)
    lowered = jax.jit(js.grad(lambda t, i: (t[i] ** 2).sum())).lower(
        table, jax.ShapeDtypeStruct((K,), jnp.int32)
    )
    values, indices = jax.tree.leaves(lowered.out_info)
    assert values.shape == (K, 16) and indices.shape == (K,)
