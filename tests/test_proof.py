"""Proofs from the compiled program: nothing of the table's size but the table itself.

Nothing here is run, and memory is assigned before machine code is made.
"""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import fast_jit, slow_unless
from optimizers import ALL, FIRST, label, make

import jslices as js
from jslices.testing import assert_in_place, assert_no_dense_temporary

pytestmark = pytest.mark.as_users
V, D = 200_000, 80
TABLE_BYTES = V * D * 4
FEW, MANY = 64, 5_000  # ids: stepped together, and in chunks
PARAMS = {
    "table": jax.ShapeDtypeStruct((V, D), jnp.float32),
    "w": jax.ShapeDtypeStruct((D,), jnp.float32),
}
# The first settings of each optimizer, and some with other state arrays.
OPTIMIZERS = [
    *FIRST,
    ("sgd", {"momentum": 0.9}),
    ("rmsprop", {"centered": True, "momentum": 0.9}),
    ("adafactor", {"min_dim_size_to_factor": 1}),
    ("adam", {"bias_correction": "row"}),
]
EXACT = [
    ("sgd", {"momentum": 0.9}),
    ("adam", {}),
    ("adamw", {}),
    ("amsgrad", {}),
    ("rmsprop", {"momentum": 0.9}),
    ("adadelta", {}),
    ("lion", {}),
    ("partial_rowwise_adam", {}),
    ("partial_rowwise_adam", {"weight_decay": 0.1}),
    ("rowwise_adagrad", {"weight_decay": 0.1}),
    ("sgd", {"weight_decay": 0.1}),
    ("proximal_adagrad", {}),
]


def loss(params, ids):
    return ((params["table"][ids] @ params["w"]) ** 2).mean()


# What adds the updates; None is ``tx.apply``.
ADDS = {"jslices": js.apply_updates, "optax": optax.apply_updates, "in_one_call": None}


def step_of(tx, adds="jslices", catch_up=False, value_and_grad=js.value_and_grad):
    """A training step."""
    apply_updates = ADDS[adds]

    @functools.partial(fast_jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        if catch_up:
            params, state = tx.catch_up(params, state, {"table": ids, "w": None})
        value, grads = value_and_grad(loss)(params, ids)
        if apply_updates is None:
            return *tx.apply(grads, state, params), value
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates), state, value

    return step


def arguments(tx, num_ids):
    ids = jax.ShapeDtypeStruct((num_ids,), jnp.int32)
    return PARAMS, jax.eval_shape(tx.init, PARAMS), ids


def prove(step, args):
    """In place, no dense temporary, and at most ten arrays of the gradient's size."""
    params, state, ids = args
    memory = assert_in_place(step, *args, min_bytes=V * 4)  # state arrays [V] as well
    assert assert_no_dense_temporary(step, *args) == memory
    # The table and each of its state arrays share the memory of the donated ones.
    tables = [x for x in jax.tree.leaves((params, state)) if x.shape == (V, D)]
    assert memory.alias_bytes >= len(tables) * TABLE_BYTES
    assert memory.output_bytes - memory.alias_bytes < 1024
    assert memory.temp_bytes < min(10 * ids.size * D * 4 + 4096, TABLE_BYTES / 4)


@pytest.mark.parametrize(
    "name, kwargs, num_ids, adds",
    slow_unless(
        [
            *((*case, MANY, "jslices") for case in OPTIMIZERS),
            *((*case, FEW, "in_one_call") for case in FIRST),
            ("adam", {}, MANY, "in_one_call"),
            ("adam", {}, FEW, "jslices"),
            ("adam", {}, FEW, "optax"),
            ("adamw", {}, MANY, "optax"),
        ],
        lambda case: case[0] == "adam",
    ),
    ids=label,
)
def test_step_is_in_place_and_without_dense_temporaries(name, kwargs, num_ids, adds):
    tx = make(js, name, 0.1, kwargs)
    prove(step_of(tx, adds), arguments(tx, num_ids))


@pytest.mark.parametrize(
    "name, kwargs, num_ids",
    slow_unless(
        [*((*case, MANY) for case in EXACT), (*EXACT[1], FEW)],
        (*EXACT[1], MANY).__eq__,
    ),
    ids=label,
)
def test_exact_step_is_in_place_too(name, kwargs, num_ids):
    tx = make(js, name, 0.1, {**kwargs, "untouched": "exact"})
    prove(step_of(tx, catch_up=True), arguments(tx, num_ids))


def test_every_optimizer_is_proved():
    assert {name for name, _ in OPTIMIZERS} == {name for name, _ in ALL}
    assert {name for name, _ in EXACT} == {case[0] for case in ALL if _catches_up(*case)}


def _catches_up(name, kwargs):
    """Whether rows catch up: for some exact is lazy, and some have no exact form."""
    kwargs = {key: value for key, value in kwargs.items() if key != "mask"}
    try:
        return make(js, name, 0.1, {**kwargs, "untouched": "exact"}).catches_up
    except (TypeError, ValueError):
        return False


@pytest.mark.parametrize("in_one_call", [True, False])
def test_what_is_returned_besides_is_read_before_the_update(in_one_call):
    tx = js.adagrad(0.1)

    def loss(params, ids):
        rows = params["table"][ids]
        metrics = {"mean": rows.mean(), "max": rows.max()}
        return (rows**2).mean() + (params["w"] ** 2).sum(), metrics

    @functools.partial(fast_jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        (value, aux), grads = js.value_and_grad(loss, has_aux=True)(params, ids)
        if in_one_call:
            return *tx.apply(grads, state, params), value, aux
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state, value, aux

    prove(step, arguments(tx, MANY))


def test_the_proof_can_fail():
    tx = optax.adam(0.1)
    step = step_of(tx, "optax", value_and_grad=jax.value_and_grad)
    args = arguments(tx, FEW)
    assert assert_in_place(step, *args).temp_bytes >= TABLE_BYTES
    with pytest.raises(
        AssertionError,
        match=r"(?s)f32\[200000,80\] \(64.0 MB\) by .*this is a dense gradient",
    ):
        assert_no_dense_temporary(step, *args)


def compiled(tx, grad, shape, num_ids, in_one=False):
    """An ordinary step of one table, in one call or in two; it is not run."""

    @functools.partial(fast_jit, donate_argnums=(0, 1))
    def train(table, state, ids):
        grads = grad(lambda p: jnp.sum(p[ids] ** 2))(table)
        if in_one:
            return tx.apply(grads, state, table)
        updates, state = tx.update(grads, state, table)
        return js.apply_updates(table, updates), state

    table = jax.ShapeDtypeStruct(shape, jnp.float32)
    ids = jax.ShapeDtypeStruct((num_ids,), jnp.int32)
    return train.lower(table, jax.eval_shape(tx.init, table), ids).compile()


@pytest.mark.parametrize(
    "name, num_ids, length",
    slow_unless(
        [
            *(("adam", 500, 8), ("adam", 4_096, 64), ("adam", 23_000, 16)),
            *(("adam", 26_000, 8), ("adam", 60_000, 64)),
            *(("ftrl", 4_096, 64), ("ftrl", 23_000, 16)),
        ],
        lambda case: case[0] == "adam" and case[1] in (4_096, 26_000),
    ),
)
def test_temporaries_are_at_most_ten_arrays_of_the_gradient(name, num_ids, length):
    """With few rows and many, long ones and short ones."""
    program = compiled(make(js, name, 0.5, {}), js.grad, (100_000, length), num_ids)
    temporaries = program.memory_analysis().temp_size_in_bytes
    assert temporaries <= 10 * num_ids * length * 4


@pytest.mark.parametrize("name", ["adam", "amsgrad", "ftrl", "lamb"])
def test_temporaries_of_a_pass_over_all_rows(name):
    """The sums, what the arithmetic holds, and a copy of each state array."""
    tx, shape = make(js, name, 0.5, {}), (100_000, 8)
    memory = compiled(tx, js.grad, shape, 27_000).memory_analysis()
    state = jax.tree.leaves(jax.eval_shape(tx.init, jnp.zeros((2, 8))))
    arrays = sum(x.shape == (2, 8) for x in state)
    assert memory.temp_size_in_bytes < (arrays + 3.2) * 100_000 * 8 * 4
    assert memory.alias_size_in_bytes >= (arrays + 1) * 100_000 * 8 * 4


@pytest.mark.parametrize(
    "name, length",
    [*(("adagrad", n) for n in (1, 8, 16)), ("rmsprop", 8), ("adam", 8), ("lion", 8)],
)
def test_a_pass_over_all_rows_computes_what_a_dense_step_does(name, length):
    """As often over the table, so that no array is computed twice."""
    tx = make(js, name, 0.5, {})

    def passes(grad):
        program = compiled(tx, grad, (3000, length), 2000, in_one=True).as_text()
        main = program.partition("ENTRY")[2]
        arrays = re.findall(rf"= f32\[3000,{length}\]\S* (\w+)", main)
        return sorted(x for x in arrays if x not in ("parameter", "copy", "get"))

    assert passes(js.grad) == passes(jax.grad) != []


def test_gradient_alone_is_as_small_as_the_rows():
    ids = jax.ShapeDtypeStruct((FEW,), jnp.int32)
    memory = jax.jit(js.grad(loss)).lower(PARAMS, ids).compile().memory_analysis()
    # Rows and their numbers, the gradient of w, and the table of pointers to them.
    assert memory.output_size_in_bytes <= FEW * (D + 1) * 4 + D * 4 + 64
    assert memory.temp_size_in_bytes < 10 * FEW * D * 4


def test_a_table_of_four_billion_elements_only_lowers():
    table = jax.ShapeDtypeStruct((250_000_000, 16), jnp.float32)
    lowered = jax.jit(js.grad(lambda t, i: (t[i] ** 2).sum())).lower(
        table, jax.ShapeDtypeStruct((FEW,), jnp.int32)
    )
    values, indices = jax.tree.leaves(lowered.out_info)
    assert values.shape == (FEW, 16) and indices.shape == (FEW,)
