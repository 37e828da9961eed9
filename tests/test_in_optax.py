"""Our optimizers inside Optax's combinators: the same numbers, or a clear refusal."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, dense, fast_jit, slow_unless
from optimizers import FIRST, make

import jslices as js

V, D = 9, 3
RNG = np.random.default_rng(0)
PARAMS = {
    "table": jnp.asarray(RNG.normal(size=(V, D)), jnp.float32),
    "w": jnp.asarray(RNG.normal(size=4), jnp.float32),
}
LABELS = {"table": "rows", "w": "rest"}


def grads_of(seed):
    rng = np.random.default_rng(seed)
    rows = jnp.asarray(rng.normal(size=(4, D)), jnp.float32)
    return {
        "table": js.IndexedSlices(rows, jnp.array([1, 7, 1, V]), (V, D)),
        "w": jnp.asarray(rng.normal(size=4), jnp.float32),
    }


def train(tx, steps=3):
    @fast_jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for k in range(steps):
        params, state = step(params, state, grads_of(k))
    return params


train_alone = functools.cache(train)


ADAM = js.adam(0.1)
RATE = optax.exponential_decay(0.1, 1, 0.5)
# A combination, and what it must be equal to.
COMBINATIONS = {
    "chain": (optax.chain(js.optim.clip(9.0), ADAM), ADAM),
    "named_chain": (optax.named_chain(("adam", ADAM)), ADAM),
    "partition": (optax.partition({"rows": ADAM, "rest": ADAM}, LABELS), ADAM),
    "multi_transform": (
        optax.multi_transform({"rows": ADAM, "rest": optax.adam(0.1)}, LABELS),
        ADAM,
    ),
    "inject_hyperparams": (optax.inject_hyperparams(js.adam)(learning_rate=0.1), ADAM),
    "inject_into_adafactor": (
        optax.inject_hyperparams(js.adafactor, static_args="min_dim_size_to_factor")(0.1),
        js.adafactor(0.1),
    ),
    "inject_a_schedule": (
        optax.inject_hyperparams(js.sgd)(learning_rate=RATE, momentum=0.9),
        js.sgd(RATE, momentum=0.9),
    ),
    "apply_if_finite": (optax.apply_if_finite(ADAM, 3), ADAM),
    "masked": (
        optax.chain(
            optax.masked(ADAM, {"table": True, "w": False}),
            optax.masked(optax.adam(0.1), {"table": False, "w": True}),
        ),
        ADAM,
    ),
    "with_extra_args": (optax.with_extra_args_support(ADAM), ADAM),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_equal_to_the_optimizer_alone(name):
    combined, alone = COMBINATIONS[name]
    # Injected hyperparameters are float32 numbers, and 1 - 0.999 is then another one.
    assert_close(train(combined), train_alone(alone), rtol=1e-4, atol=1e-5)


def test_apply_if_finite_leaves_a_bad_step_out():
    tx = optax.apply_if_finite(ADAM, 3)
    bad = grads_of(0)
    bad["table"] = js.IndexedSlices(bad["table"].values * jnp.nan, [1, 7, 1, 2], (V, D))
    state = tx.init(PARAMS)
    updates, after = fast_jit(tx.update)(bad, state, PARAMS)
    assert not js.is_slices(updates["table"]) or not updates["table"].values.any()
    jax.tree.map(np.testing.assert_array_equal, after.inner_state, state.inner_state)


#: More entries than rows, summed first or in a pass over all rows; a pass over more rows.
MANY = {"weekdays": (7, 3, 20), "many": (7, 3, 600), "shops": (1000, 16, 600)}


def many(name, seed):
    rows, dim, count = MANY[name]
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, rows + 1, count).astype(np.int32)
    return js.IndexedSlices(
        rng.normal(size=(count, dim)).astype(np.float32), ids, (rows, dim)
    )


@pytest.mark.parametrize(
    "tx, name",
    slow_unless(
        [
            (ADAM, "weekdays"),
            (js.optim.chain(js.optim.clip(0.5), ADAM, js.optim.scale(2.0)), "many"),
            (js.from_optax(optax.adam(0.1)), "weekdays"),
            (js.sgd(0.1, momentum=0.9), "shops"),
        ],
        lambda case: case[0] is ADAM or case[1] == "shops",
    ),
    ids=["weekdays", "chain", "from_optax", "shops"],
)
def test_apply_if_finite_of_small_tables(tx, name):
    """Its ``lax.cond`` wants an update of as many entries as the gradient."""
    guarded = optax.apply_if_finite(tx, 3)
    good, bad, more = (many(name, seed) for seed in range(3))
    bad = bad.with_values(bad.values + np.float32(np.nan))
    table = np.ones(good.dense_shape, np.float32)

    @fast_jit
    def step(table, state, grads):
        updates, state = guarded.update(grads, state, table)
        return js.apply_updates(table, updates), state

    @fast_jit
    def alone(table, *grads):
        state = tx.init(table)
        for each in grads:
            table, state = tx.apply(each, state, table)
        return table

    state, after = guarded.init(table), table
    for grads in (good, bad, more):
        after, state = step(after, state, grads)
    assert state.total_notfinite == 1
    assert_close(after, alone(table, good, more), rtol=1e-5, atol=1e-6)


def guarded(tx):
    """A transformation of one's own, which passes extra arguments on."""

    def update(grads, state, params=None, **extra_args):
        zeros = lambda: (jax.tree.map(jnp.zeros_like, grads), state)  # noqa: E731
        step = lambda: tx.update(grads, state, params, **extra_args)  # noqa: E731
        return jax.lax.cond(js.all_finite(grads), step, zeros)

    return js.optim.GradientTransformation(tx.init, update)


GUARD = optax.apply_if_finite(js.optim.chain(js.optim.clip(9.0), ADAM), 3)


@pytest.mark.parametrize(
    "tx",
    [
        js.optim.chain(js.optim.clip(9.0), GUARD, js.optim.scale(1.0)),
        js.optim.partition({0: guarded(ADAM)}, 0),
        js.optim.masked(js.optim.freeze_rows(GUARD, False), True),
        js.optim.chain(optax.chain(guarded(js.optim.chain(ADAM, js.optim.scale(1.0))))),
    ],
    ids=["chain", "partition", "masked", "chains"],
)
def test_a_cond_inside_of_what_is_made_of_several(tx):
    grads = many("weekdays", 0)
    table = jax.ShapeDtypeStruct(grads.dense_shape, jnp.float32)
    state = jax.eval_shape(tx.init, table)
    updates, _ = jax.eval_shape(tx.update, grads, state, table)
    assert updates.values.shape == grads.values.shape
    assert jax.eval_shape(tx.apply, grads, state, table)[0].shape == table.shape


def test_apply_if_finite_of_a_small_table_on_a_mesh():
    kind = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    rows = jax.sharding.NamedSharding(mesh, jax.P("x"))
    table, tx = np.ones((8, D), np.float32), optax.apply_if_finite(js.sgd(0.1), 3)
    ids = np.random.default_rng(0).integers(0, 8, 64)

    def step(table, state, ids, exchange=None):
        loss = lambda table: (table[ids] ** 2).mean()  # noqa: E731
        updates, state = tx.update(js.grad(loss, exchange=exchange)(table), state, table)
        return js.apply_updates(table, updates)

    wanted = fast_jit(step)(table, tx.init(table), ids)
    split, ids = jax.device_put((table, ids), rows)
    exchange = js.Exchange("x", "all_to_all", 4.0)
    on_mesh = fast_jit(functools.partial(step, exchange=exchange))
    with jax.set_mesh(mesh):
        assert_close(on_mesh(split, tx.init(split), ids), wanted)


@pytest.mark.parametrize("name", MANY)
def test_an_update_of_a_program_has_as_many_entries_as_its_gradient(name):
    grads = many(name, 0)
    table = jax.ShapeDtypeStruct(grads.dense_shape, jnp.float32)
    links = [js.optim.clip_rows_by_norm(1.0), js.optim.combine_duplicates("mean")]
    for tx in [*(make(js, name, 0.1, kwargs) for name, kwargs in FIRST), *links]:
        state = jax.eval_shape(tx.init, table)
        updates, _ = jax.eval_shape(tx.update, grads, state, table)
        assert jax.tree.structure(updates) == jax.tree.structure(grads)
        assert updates.values.shape == grads.values.shape


def added(program):
    """How many rows each scatter adds that knows each row to be there once."""
    for eqn in program.eqns:
        if eqn.primitive.name == "scatter-add" and eqn.params["unique_indices"]:
            yield eqn.invars[2].aval.shape[0]
        leaves = jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns"))
        for x in leaves:
            if hasattr(x, "eqns") or hasattr(x, "jaxpr"):
                yield from added(getattr(x, "jaxpr", x))


@pytest.mark.parametrize("name", ["weekdays", "many"])
def test_no_more_entries_are_added_than_there_are_rows(name):
    grads = many(name, 0)
    table = jax.ShapeDtypeStruct(grads.dense_shape, jnp.float32)

    def step(grads, state, table):
        updates, _ = ADAM.update(grads, state, table)
        return js.apply_updates(table, updates)

    program = jax.make_jaxpr(step)(grads, jax.eval_shape(ADAM.init, table), table)
    assert [*added(program.jaxpr)][-1] == table.shape[0]


def test_exact_with_injected_numbers_keeps_the_log_of_the_inner_optimizer():
    """Each of its numbers is an array, and a log of another form is read wrongly."""
    alone = jax.eval_shape(js.adam(0.1, untouched="exact").init, PARAMS)
    tx = optax.inject_hyperparams(js.adam)(learning_rate=0.1, untouched="exact")
    state = tx.init(PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(state.inner_state, alone)
    tx = optax.inject_hyperparams(js.adam, static_args="b1")(0.1, untouched="exact")
    with pytest.raises(TypeError, match=r"b2 and eps_root as.*\('b2', 'eps_root'\)"):
        jax.eval_shape(tx.update, grads_of(0), tx.init(PARAMS), PARAMS)


@pytest.mark.slow
def test_exact_with_an_injected_learning_rate():
    """The number may change between steps; the missed ones use the newest."""
    make = optax.inject_hyperparams(js.adam, static_args=("b1", "b2", "eps_root"))
    tx, alone = make(learning_rate=0.1, untouched="exact"), js.adam(0.1, untouched="exact")
    grads = grads_of(0)
    updates, state = fast_jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
    wanted, wanted_state = fast_jit(alone.update)(grads, alone.init(PARAMS), PARAMS)
    assert_close(updates, wanted, rtol=1e-5)
    # The inner state is the optimizer's own: it catches up as usual.
    ids = {"table": jnp.arange(V), "w": None}
    catch_up = fast_jit(alone.catch_up)
    got, _ = catch_up(PARAMS, state.inner_state, ids)
    assert_close(got, catch_up(PARAMS, wanted_state, ids)[0], rtol=1e-5)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip(0.5), ADAM),
        optax.chain(optax.scale(2.0), ADAM),
        optax.chain(ADAM, optax.scale(0.5)),
    ],
    ids=["clip", "scale", "scale after"],
)
def test_what_changes_the_indices_is_refused(tx):
    with pytest.raises(TypeError, match=r"row numbers.*type jslices\.(optim|sgd)"):
        tx.update(grads_of(0), tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("name", ["multi_steps", "freeze_rows"])
def test_tree_map_params(name):
    tx = {
        "multi_steps": js.optim.multi_steps(ADAM, 2, grads_of(0)),
        "freeze_rows": js.optim.freeze_rows(ADAM, {"table": np.arange(V) < 2, "w": None}),
    }[name]
    _, state = tx.update(grads_of(0), tx.init(PARAMS), PARAMS)
    double = functools.partial(optax.tree_utils.tree_map_params, tx, lambda x: 2 * x)
    doubled = double(state, is_leaf=js.is_slices)
    for part in "mu", "acc_grads":
        old, new = (optax.tree_utils.tree_get(x, part) for x in (state, doubled))
        if old is not None:
            old = js.tree.map(lambda x: 2 * x, old)
            assert_close(js.tree.to_dense(new), js.tree.to_dense(old))


def test_multi_steps_takes_dense_gradients_only():
    """It maps over its dense sums before it asks our optimizer."""
    tx = optax.MultiSteps(ADAM, 2)
    state = tx.init(PARAMS)
    message = (
        r"different types at key path \['table'\]: IndexedSlices, where another tree has "
        r"an array.*jslices.optim.multi_steps for optax.MultiSteps"
    )
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=message):
            update(grads_of(0), state, PARAMS)
    ours = train_dense(tx, state)
    theirs = train_dense(optax.MultiSteps(optax.adam(0.1), 2))
    assert_close(ours, theirs)


def train_dense(tx, state=None, steps=4):
    state = tx.init(PARAMS) if state is None else state

    @fast_jit
    def step(params, state, grads):
        updates, state = tx.update(dense(grads), state, params)
        return optax.apply_updates(params, updates), state

    params = PARAMS
    for k in range(steps):
        params, state = step(params, state, grads_of(k))
    return params


MAPS = "jslices.adam for optax.adam (and so on), jslices.apply_updates for eqx.apply_"
FOREIGN = {
    "eqx.apply_updates": (lambda g: equinox().apply_updates(PARAMS, g), MAPS),
    "optax.partition": (
        lambda g: step(optax.partition({"a": ADAM}, labels("a")), g),
        "jslices.optim.partition for optax.partition",
    ),
    "optax.partition in a chain": (
        lambda g: step(js.optim.chain(optax.partition({"a": ADAM}, labels("a"))), g),
        "jslices.optim.partition for optax.partition",
    ),
    "optax.masked": (
        lambda g: step(optax.masked(ADAM, labels(True)), g),
        "jslices.optim.masked for optax.masked",
    ),
    "an optimizer": (
        lambda g: step(optax.adam(0.1), g),
        "jslices.adam for optax.adam, jslices.adamw(rate, b1, b2, weight_decay=w, mask=",
    ),
    "AdamW by links": (
        lambda g: step(js.optim.chain(optax.scale_by_adam(), optax.scale(-0.1)), g),
        "jslices.adam for optax.adam, jslices.adamw(rate, b1, b2, weight_decay=w, mask=",
    ),
    "another": (
        lambda g: step(optax.rmsprop(0.1), g),
        "jslices.rmsprop for optax.scale_by",
    ),
    "a transformation": (
        lambda g: step(optax.ema(0.1), g),
        "jslices.from_optax(optax.ema(...))",
    ),
    "jax.tree.map": (lambda g: jax.tree.map(lambda g, p: g, g, PARAMS), MAPS),
    "jax.tree_util.tree_map": (
        lambda g: jax.tree_util.tree_map(lambda *x: 0, g, PARAMS),
        MAPS,
    ),
}


def equinox():
    return pytest.importorskip("equinox")


def labels(label):
    return lambda params: jax.tree.map(lambda p: label, params)


def step(tx, grads):
    return tx.update(grads, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.interop if "eqx" in n else ()) for n in FOREIGN],
)
def test_functions_that_map_over_two_trees_say_what_to_type(name, jit):
    call, instead = FOREIGN[name]
    with pytest.raises(ValueError, match=r"key path .'table'.: IndexedSlices") as caught:
        (jax.jit(call) if jit else call)(grads_of(0))
    assert f"an array; type {instead}" in str(caught.value)


def test_a_mean_of_stacked_gradients_says_what_to_type():
    """As DrJAX's ``reduce_mean`` takes it."""
    stacked = jax.vmap(js.grad(lambda t, i: t[i].sum()), (None, 0))
    stacked = stacked(jnp.ones((4, 2)), jnp.array([[0, 1], [3, 3]]))
    with pytest.raises(TypeError, match=r"jslices\.sum_stacked for a sum or mean of"):
        jax.tree.map(lambda x: jnp.mean(x, 0), stacked)
    assert js.sum_stacked(stacked).shape == (4, 2)


def test_other_trees_that_differ_have_the_error_of_jax():
    grads = grads_of(0)
    with pytest.raises(ValueError, match=r"(?s)^pytree structure error.*tree\['w'\]"):
        jax.tree.map(lambda *x: 0, {**grads, "w": {"a": 1}}, grads)
    longer = js.IndexedSlices(grads["table"].values, [1, 7, 1, V], (V + 1, D))
    with pytest.raises(ValueError, match=r"^pytree structure error: different pytree meta"):
        jax.tree.map(lambda *x: 0, grads, {**grads, "table": longer})


@pytest.mark.parametrize(
    "call",
    [
        optax.tree.norm,
        lambda g: step(optax.clip_by_global_norm(1.0), g),
        lambda g: step(optax.chain(optax.clip_by_global_norm(1.0), ADAM), g),
        lambda g: step(js.optim.chain(optax.clip_by_global_norm(1.0), ADAM), g),
    ],
)
def test_norms_of_optax_are_refused(call):
    message = "row numbers of IndexedSlices.*jslices.(global_norm for a|optim.clip_by_glob)"
    for f in (call, jax.jit(call)):
        with pytest.raises(TypeError, match=message):
            f(grads_of(0))
    assert js.global_norm(grads_of(0)) == optax.tree.norm(dense(grads_of(0)))


def test_sizes_that_are_injected_are_known_outside_of_jit_alone():
    tx = optax.inject_hyperparams(js.adafactor)(0.1)
    params, state = jax.tree.map(jnp.ones_like, PARAMS), tx.init(PARAMS)
    wanted, _ = js.adafactor(0.1).update(params, js.adafactor(0.1).init(PARAMS), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, tx.update(params, state, PARAMS)[0], wanted)
    with pytest.raises(TypeError, match=r'static_args=\("min_dim_size_to_factor",\)'):
        jax.jit(tx.update)(params, state, PARAMS)
