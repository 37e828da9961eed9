"""jslices.testing: what the assertions say of steps that are not in place, or dense."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import as_users, slow_but_first
from jax import lax

import jslices as js
import jslices.testing
from jslices.testing import assert_in_place, assert_no_dense_temporary

V, D, K = 20_000, 16, 64
S = jax.ShapeDtypeStruct
TABLE = S((V, D), jnp.float32)
PARAMS = {"table": TABLE, "w": S((D,), jnp.float32)}
IDS = S((K,), jnp.int32)
TX = js.adagrad(0.1)
STATE = jax.eval_shape(TX.init, PARAMS)
TABLE_NAME = "args[0]['table'] float32[20000,16] (1.3 MB)"


def loss(params, ids):
    return ((params["table"][ids] @ params["w"]) ** 2).mean()


def step(params, state, ids):
    value, grads = js.value_and_grad(loss)(params, ids)
    updates, state = TX.update(grads, state, params)
    return js.apply_updates(params, updates), state, value


def returns_old(params, state, ids):
    new, state, value = step(params, state, ids)
    return new, state, value, {"old": params}


def reads_old(params, state, ids):
    new, state, value = step(params, state, ids)
    return new, state, value + loss(new, ids) + loss(params, ids + 1)  # both of them


def subtracts_old(params, state, ids):
    new, state, _ = step(params, state, ids)
    return new, state, ((new["table"] - params["table"]) ** 2).sum()


def casts(params, state, ids):
    new, state, value = step(params, state, ids)
    return {**new, "table": new["table"].astype(jnp.bfloat16)}, state, value


def loses(params, state, ids):
    new, state, value = step(params, state, ids)
    return loss(new, ids), state, value


def writes_twice(params, state, ids):
    new, state, _ = step(params, state, ids)
    return new, state, params["table"].at[ids].set(1.0)


def chooses_arrays(params, state, ids):
    new, new_state, value = step(params, state, ids)
    keep = lambda new, old: jnp.where(jnp.isfinite(value), new, old)  # noqa: E731
    return jax.tree.map(keep, (new, new_state), (params, state))


def chooses_branches(params, state, ids):
    return lax.cond(
        jnp.isfinite(loss(params, ids)),
        lambda: step(params, state, ids)[:2],
        lambda: (params, state),
    )


def loops(params, state, ids):
    def body(carry, ids):
        *carry, value = step(*carry, ids)
        return tuple(carry), value

    return lax.scan(body, (params, state), ids.reshape(4, -1))


def loops_and_reads_old(params, state, ids):
    def body(carry, ids):
        *new, value = step(*carry, ids)
        return tuple(new), value + loss(carry[0], ids + 1)  # the old of this turn

    return lax.scan(body, (params, state), ids.reshape(4, -1))


def ignores(params, state, ids):
    return params, jax.tree.map(jnp.ones_like, state)


def donated(step):
    return as_users(step, donate_argnums=(0, 1))


def problems_of(proof, title, step, *args, **options):
    with pytest.raises(AssertionError) as caught:
        proof(step, *args, **options)
    first, *problems = str(caught.value).split("\n- ")
    assert first == f"{step.__name__} {title}:"
    return problems


fails = functools.partial(problems_of, assert_in_place, "does not work in place")
fails_dense = functools.partial(
    problems_of, assert_no_dense_temporary, "makes arrays as large as a table"
)


@pytest.mark.parametrize("good", slow_but_first(loops, step, chooses_branches))
def test_good_steps_pass(good):
    memory = assert_in_place(donated(good), PARAMS, STATE, IDS)
    dense = assert_no_dense_temporary(donated(good), PARAMS, STATE, IDS)
    assert memory == dense
    assert memory.alias_bytes >= 2 * V * D * 4 and memory.temp_bytes < V * D
    assert str(memory).startswith("arguments 2.6 MB, outputs 2.6 MB, of these in place")


def test_arguments_in_another_order_than_results_are_copied():
    grads = jax.eval_shape(js.grad(loss), PARAMS, IDS)
    apply = jax.jit(TX.apply, donate_argnums=(1, 2))
    problem = fails(apply, grads, STATE, PARAMS)[0]
    assert "['table'] is written into its memory, as JAX pairs" in problem
    assert "donated arguments come in the order of the results" in problem
    turned = lambda params, state, grads: TX.apply(grads, state, params)  # noqa: E731
    assert_in_place(donated(turned), PARAMS, STATE, grads)


def test_takes_a_jitted_step_and_runs_nothing():
    params = {"table": jnp.zeros((V, D)), "w": jnp.ones(D)}
    state, ids = TX.init(params), jnp.arange(K)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    memory = assert_in_place(jitted, params, state, ids)
    assert memory == assert_in_place(step, PARAMS, STATE, IDS, donate_argnums=(0, 1))
    np.testing.assert_array_equal(params["table"][:2], 0)  # not donated, not deleted
    with pytest.raises(ValueError, match="is jitted already"):
        assert_in_place(jitted, params, state, ids, donate_argnums=(0, 1))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_without_donation(wrap):
    table, sums = fails(wrap(step), PARAMS, STATE, IDS)
    assert table == (
        f"{TABLE_NAME} is not donated, and result[0]['table'], which is like it, is new "
        "memory. Donate it: jax.jit(step, donate_argnums=0)"
    )
    assert sums.startswith("args[1].sum_of_squares['table'] float32") and "=1)" in sums
    # Nothing that is large is returned.
    (problem,) = fails(loss, PARAMS, IDS)
    assert "no array of at least 1.0 MB is donated" in problem


def test_parameters_donated_but_not_the_state():
    (problem,) = fails(step, PARAMS, STATE, IDS, donate_argnums=0)
    assert problem.startswith("args[1].sum_of_squares['table'] ")


def test_small_arrays_are_no_concern():
    small = {"w": S((D,), jnp.float32), "table": S((V // 2, D), jnp.float32)}
    state = jax.eval_shape(TX.init, small)
    assert "no array" in fails(donated(returns_old), small, state, IDS)[0]
    (problem,) = fails(donated(returns_old), small, state, IDS, min_bytes=1 << 19)
    assert problem.startswith("args[0]['table'] float32[10000,16] (640.0 KB) is copied")


def line_of(function, text):
    lines = inspect.getsource(function).splitlines()
    number = next(n for n, line in enumerate(lines) if text in line)
    return f"{__file__}:{function.__code__.co_firstlineno + number}"


COPIES = {
    returns_old: ("its old value is returned as well, as result[3]['old']['table']", None),
    reads_old: ("its old value is still read by", (loss, "params[")),
    subtracts_old: ("its old value is still read by", (subtracts_old, "** 2).sum()")),
    loops_and_reads_old: ("its old value is still read by", (loss, "params[")),
    writes_twice: ("it is updated twice from the same", (writes_twice, ".set(1.0)")),
}


@pytest.mark.parametrize("bad", slow_but_first(*COPIES))
def test_a_copied_table(bad):
    words, place = COPIES[bad]
    (problem,) = fails(donated(bad), PARAMS, STATE, IDS)
    assert problem.startswith(f"{TABLE_NAME} is copied, ") and words in problem
    assert place is None or line_of(*place) in problem


@pytest.mark.slow
def test_what_is_said_of_old_values_helps():
    (problem,) = fails(donated(subtracts_old), PARAMS, STATE, IDS)
    assert "Return what you need of the old one from the loss" in problem
    assert problem.endswith("before rows are written; or read the new value")

    def norm(params):
        return (params["table"] ** 2).sum()

    def reads_new(params, state, ids):
        new, state, _ = step(params, state, ids)
        return new, state, norm(new)

    def returns_old(params, state, ids):
        of_loss = lambda params, ids: (loss(params, ids), norm(params))  # noqa: E731
        (_, before), grads = js.value_and_grad(of_loss, has_aux=True)(params, ids)
        new, state = TX.apply(grads, state, params)
        return new, state, norm(new) - before

    assert_in_place(donated(reads_new), PARAMS, STATE, IDS)
    assert_in_place(donated(returns_old), PARAMS, STATE, IDS)


def test_state_of_one_number_a_row_counts_as_its_table_does():
    tx = js.rowwise_adagrad(0.1)
    state = jax.eval_shape(tx.init, TABLE)

    def step(table, state, ids):
        return tx.apply(js.grad(lambda t: (t[ids] ** 2).sum())(table), state, table)

    def reads_old(table, state, ids):
        table, new = step(table, state, ids)
        pairs = zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True)
        return table, new, sum(((x - y) ** 2).sum() for x, y in pairs if x.shape == (V,))

    assert_in_place(donated(step), TABLE, state, IDS)
    (problem,) = fails(donated(reads_old), TABLE, state, IDS)
    assert problem.startswith("args[1]") and "float32[20000] (80.0 KB) is copied" in problem
    assert_in_place(donated(reads_old), TABLE, state, IDS, min_bytes=10**6)


def test_choosing_between_whole_arrays():
    problems = fails(donated(chooses_arrays), PARAMS, STATE, IDS)
    assert len(problems) == 2  # the table and its sums
    for problem in problems:
        assert line_of(chooses_arrays, "jnp.where(") in problem
        assert "Choose between old and new by jax.lax.cond" in problem


def test_a_result_of_another_dtype():
    (problem,) = fails(donated(casts), PARAMS, STATE, IDS)
    assert problem == (
        f"{TABLE_NAME} is donated, but no result is written into its memory: the dtype has "
        "changed, result[0]['table'] is bfloat16. Cast it back before it is returned: "
        ".astype(float32)"
    )


def test_an_array_that_is_not_returned():
    (problem,) = fails(donated(loses), PARAMS, STATE, IDS)
    assert problem.startswith(TABLE_NAME) and "fewer arrays like it" in problem
    (problem,) = fails(loss, PARAMS, IDS, donate_argnums=0)
    assert "there is no result of its shape and dtype" in problem


def test_an_array_that_is_not_read():
    (problem,) = fails(donated(ignores), PARAMS, STATE, IDS)
    assert problem.startswith("args[1].sum_of_squares['table']")
    assert "the step does not read it" in problem
    (problem,) = fails(lambda x, y: y, TABLE, S((3,), jnp.float32), donate_argnums=0)
    assert "the step does not use it" in problem


# --- dense temporaries -------------------------------------------------------------


def dense_step(params, state, ids):
    value, grads = jax.value_and_grad(loss)(params, ids)
    updates, state = TX.update(grads, state, params)
    return js.apply_updates(params, updates), state, value


def penalised_loss(params, ids):
    penalty = (params["table"] ** 2).sum()  # needs all of it
    return loss(params, ids) + penalty


def penalised_step(params, state, ids):
    value, grads = js.value_and_grad(penalised_loss)(params, ids)
    updates, state = TX.update(grads, state, params)
    return js.apply_updates(params, updates), state, value


def test_a_dense_gradient():
    # The optimizer is in place all the same.
    assert_in_place(donated(dense_step), PARAMS, STATE, IDS)
    made, advice = fails_dense(donated(dense_step), PARAMS, STATE, IDS)
    assert made.startswith("f32[20000,16] (1.3 MB) by ")
    assert "transpose(" in made and line_of(loss, "params[") in made
    assert "write jslices.value_and_grad" in advice and "jslices.explain(loss)" in advice


def test_a_gradient_that_jslices_made_dense():
    problems = fails_dense(donated(penalised_step), PARAMS, STATE, IDS)
    made = [line for line in problems if line.startswith("f32")]
    advice = problems[len(made)]
    assert any(line.startswith("f32[20000,16] (1.3 MB)") for line in made)
    assert advice.startswith("jslices made a gradient dense: ")
    assert (
        line_of(penalised_loss, "penalty =") in advice and "jslices.explain(loss)" in advice
    )


def trained_by(tx, loss=loss):
    def train(params, state, ids):
        grads = js.grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state

    return donated(train), jax.eval_shape(tx.init, PARAMS)


@pytest.mark.parametrize(
    "tx",
    [
        js.adagrad(0.1),
        js.adam(optax.cosine_decay_schedule(0.1, 9)),
        optax.chain(js.optim.clip(1.0), js.adagrad(0.1)),
        js.adafactor(0.1),
    ],
    ids=["adagrad", "a schedule of optax", "in a chain of optax", "adafactor"],
)
def test_a_step_of_the_whole_table(tx):
    """On purpose: the advice says so, and does not send to the optimizer that is in use."""
    train, state = trained_by(tx)
    problems = fails_dense(train, PARAMS, state, S((V,), jnp.int32))
    advice = [line for line in problems if not line.startswith("f32[")]
    assert advice[0].startswith("the gradient has so many rows that jslices steps all rows")
    assert "nothing to mend" in advice[0]
    assert all("assert_in_place" in line for line in advice[1:])


@pytest.mark.parametrize("tx", [js.sgd(0.1), js.from_optax(optax.sgd(0.1, 0.9))])
def test_a_gradient_with_as_many_rows_as_the_table(tx):
    train, state = trained_by(tx)
    problems = fails_dense(train, PARAMS, state, S((V,), jnp.int32))
    advice, *rest = [line for line in problems if not line.startswith("f32[")]
    assert all("assert_in_place" in line for line in rest)
    assert advice.startswith("args[0]['table'] has 20,000 rows, and 20,000 are looked up")


@pytest.mark.slow
def test_a_small_table_may_be_stepped_as_a_whole():
    """Beside a large one, of which no dense array is made."""
    params = {**PARAMS, "large": S((300_000, D), jnp.float32)}
    state = jax.eval_shape(TX.init, params)

    def both(params, ids):
        large = params["large"][ids[:K]]
        return loss(params, ids) + (large**2).sum()

    def penalised(params, ids):
        return both(params, ids) + (params["large"] ** 2).sum()

    ids = S((V,), jnp.int32)
    assert_no_dense_temporary(trained_by(TX, both)[0], params, state, ids)
    problems = fails_dense(trained_by(TX, penalised)[0], params, state, ids)
    assert all("300000" in line for line in problems if line.startswith("f32["))


def test_what_counts_as_a_table():
    with pytest.raises(ValueError, match="looks up rows of no argument with at least two"):
        assert_no_dense_temporary(lambda x: x @ x.T, TABLE)
    with pytest.raises(ValueError, match="table_bytes"):
        assert_no_dense_temporary(step, PARAMS, STATE, IDS, min_bytes=V * D * 5)

    def one_hot(table, ids):
        return (jax.nn.one_hot(ids, V).T * 2.0) @ (ids[:, None] * table[ids]) * table

    # [V, K], which is no table but larger than it.
    assert fails_dense(one_hot, TABLE, IDS)
    found = fails_dense(step, PARAMS, STATE, IDS, table_bytes=K * D * 4)
    assert any("(4.1 KB)" in line for line in found)
    assert_no_dense_temporary(dense_step, PARAMS, STATE, IDS, table_bytes=V * D * 5)


def test_a_narrower_copy_of_the_table_counts_too():
    def cast_first(table, ids):
        return jnp.sort(table.astype(jnp.int16), axis=0)[ids].sum()

    made = fails_dense(cast_first, TABLE, IDS)
    assert any(line.startswith("s16[20000,16] (640.0 KB)") for line in made)


def test_a_dense_weight_is_no_table():
    def layers(params, ids):
        return jnp.tanh(params["table"][ids] @ params["v"]).sum()

    def train(params, ids):
        grads = js.grad(layers)(params, ids)
        return js.apply_updates(params, js.tree.map(lambda g: -g, grads))

    params = {"table": S((V, 1024), jnp.float32), "v": S((1024, 1024), jnp.float32)}
    memory = assert_in_place(train, params, IDS, donate_argnums=0)
    assert memory == assert_no_dense_temporary(train, params, IDS, donate_argnums=0)


def test_other_warnings_still_come():
    def warns(table, ids):
        warnings.warn("mind the step", stacklevel=1)
        return table.at[ids].add(1.0)

    with pytest.warns(UserWarning, match="mind the step"):
        assert_in_place(warns, TABLE, IDS, donate_argnums=0)


def test_optax_is_named():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))

    def train(params, state, ids):
        value, grads = jax.value_and_grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        size = jnp.sort(updates["table"], axis=0)[0].sum()  # so that they are somewhere
        return optax.apply_updates(params, updates), state, value + size

    state = jax.eval_shape(tx.init, PARAMS)
    problems = fails_dense(donated(train), PARAMS, state, IDS)
    assert any("this is a dense gradient" in line for line in problems)
    assert any(line.startswith("Optax works on whole arrays") for line in problems)


def test_is_a_module_of_the_package():
    assert jslices.testing is js.testing
