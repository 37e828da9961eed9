"""Optimizers: dense leaves equal Optax; sparse ones do, on the rows of each step."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, golden, quickly, ulps
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import (
    ALL,
    BY_ROW,
    IDS,
    OWN,
    SCHEDULE,
    SHARED,
    D,
    V,
    each_row,
    label,
    make,
    only_touched,
    rng_tree,
    slices_of,
)

import jslices as js

every = pytest.mark.parametrize("name, kwargs", ALL, ids=label)


constant_or_not = pytest.mark.parametrize(
    "rate", [0.1, SCHEDULE], ids=["constant", "schedule"]
)
jit_or_eager = pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])


@jit_or_eager
@constant_or_not
@pytest.mark.parametrize("name, kwargs", [*SHARED, *BY_ROW], ids=label)
def test_dense_leaves_equal_optax_to_one_ulp(name, kwargs, rate, jit):
    """Updates and state, over five steps. (To the bit, where this was run.)"""
    for ours, theirs in five_steps(name, kwargs, rate, jit, rng_tree):
        assert ulps(ours, theirs) <= 1


@jit_or_eager
@pytest.mark.parametrize("name, kwargs", [*SHARED, *BY_ROW], ids=label)
def test_a_single_dense_array_equals_optax(name, kwargs, jit):
    """Not in a tree: without jit Optax takes reciprocals in its bias correction then."""
    mask = kwargs.get("mask")
    if mask:
        kwargs = {**kwargs, "mask": (mask(None) if callable(mask) else mask)["table"]}
    for ours, theirs in five_steps(
        name, kwargs, 0.1, jit, lambda rng: rng_tree(rng)["table"]
    ):
        assert ulps(ours, theirs) <= 1


def five_steps(name, kwargs, rate, jit, draw):
    """After each step our update and state, and Optax's; the parameters are Optax's."""
    rng = np.random.default_rng(0)
    ours, theirs = make(js, name, rate, kwargs), make(optax, name, rate, kwargs)
    update, wanted_update = ours.update, theirs.update
    if jit:
        update, wanted_update = jax.jit(update), jax.jit(wanted_update)
    params = draw(rng)
    state, wanted_state = ours.init(params), theirs.init(params)
    for _ in range(5):
        grads = draw(rng)
        updates, state = update(grads, state, params)
        wanted, wanted_state = wanted_update(grads, wanted_state, params)
        params = optax.apply_updates(params, wanted)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, wanted)
        slots = {k: v for k, v in state._asdict().items() if v is not None and k != "count"}
        fields = fields_of(wanted_state)
        theirs_of = {k: fields["ema" if k == "momentum" else k] for k in slots}
        yield (updates, slots), (wanted, theirs_of)


def fields_of(state):
    """What is in the named tuples of a state, by name."""
    found = {}
    for node in state if isinstance(state, tuple) else ():
        found |= fields_of(node)
    return found | (state._asdict() if hasattr(state, "_asdict") else {})


def test_ulps_are_counted():
    one = np.float32(1)
    for x, y, wanted in [
        (one, one, 0),
        (one, np.nextafter(one, np.float32(2)), 1),
        (one, np.float32(1 + 2**-20), 8),
        (np.float32(0), -np.float32(0), 0),
        (np.float32(1e-45), np.float32(-1e-45), 2),
    ]:
        assert ulps({"x": x, "y": one}, {"x": y, "y": one}) == wanted


# The factors of a table are not a row's own: compared further down.
FACTORED = [case for case in ALL if "min_dim_size_to_factor" in case[1]]
ROWS_ALONE = [case for case in ALL if case not in FACTORED]
# A table of 16 bits may be rounded to a neighbour, in each of three steps.
TOLERANCES = {"float32": (1e-5, 1e-6), "bfloat16": (1e-2, 1e-2)}


@pytest.mark.parametrize("how", ["eager", "jit", "scan", "vmap"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name, kwargs", ROWS_ALONE, ids=label)
def test_lazy_is_optax_on_the_touched_rows(name, kwargs, dtype, how):
    """For all kinds of ids, after each of three steps; the state is float32 in any case."""
    tx = make(js, name, 0.1, kwargs)
    start, grads, wanted = lazy_steps_of_optax(ROWS_ALONE.index((name, kwargs)), dtype)

    def step(carry, grads):
        updates, state = tx.update(grads, carry[1], carry[0])
        new = js.apply_updates(carry[0], updates), state
        chex.assert_trees_all_equal_shapes_and_dtypes(new, carry)
        return new, new[0]

    got = run(step, (start[0], tx.init(start[1])), grads, how)
    rtol, atol = TOLERANCES[dtype]
    for number, kind in enumerate(IDS):
        print(f"{kind}:")  # is shown where it fails
        assert_close(at(got, number), at(wanted, number), rtol=rtol, atol=atol)


@functools.lru_cache(maxsize=1)
def lazy_steps_of_optax(number, dtype):
    """What each way of running is compared with: compiled once for all of them.

    Returns:
      parameters, and the same in float32, which is the dtype of the state; gradients, three
      for each kind of ids (leaves ``[kind, step, ...]``); and the parameters after each.
    """
    name, kwargs = ROWS_ALONE[number]
    # What is not in Optax is compared with itself on dense gradients, and that with numpy.
    oracle = make(js if (name, kwargs) in OWN else optax, name, 0.1, kwargs)
    oracle = each_row(oracle) if (name, kwargs) in BY_ROW else oracle
    lazy = only_touched(oracle)
    params = rng_tree(np.random.default_rng(2), dtype)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    grads = [
        stack(
            {"table": slices_of(rng, ids, dtype=dtype), "w": rng_tree(rng, dtype)["w"]}
            for _ in range(3)
        )
        for ids in IDS.values()
        for rng in [np.random.default_rng(1)]
    ]

    def step(carry, grads):
        new = lazy(*carry, grads)
        return new, new[0]

    start = params, oracle.init(wide)
    return (params, wide), stack(grads), run(step, start, stack(grads), "scan")


def run(step, carry, grads, how):
    """The parameters after each step (leaves ``[kind, step, ...]``), run in some way."""
    kinds, steps = range(len(IDS)), range(3)
    if how == "scan":
        scan = quickly(lambda grads: jax.lax.scan(step, carry, grads)[1])
        return stack(scan(at(grads, kind)) for kind in kinds)
    if how == "vmap":
        mapped, results = quickly(jax.vmap(step)), []
        carry = stack([carry for _ in kinds])
        for k in steps:
            carry, params = mapped(carry, at(grads, (slice(None), k)))
            results.append(params)
        return jax.tree.map(lambda *x: np.stack(x, 1), *results)
    if how == "jit":  # one compilation for all kinds of ids and all steps
        chex.clear_trace_counter()
        step = jax.jit(chex.assert_max_traces(n=1)(step))

    def each(carry, grads):
        for k in steps:
            carry, params = step(carry, at(grads, k))
            yield params

    return stack(stack(each(carry, at(grads, kind))) for kind in kinds)


def stack(trees):
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def at(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


FIRST = list({name: (name, kwargs) for name, kwargs in reversed(ALL)}.values())


@every
@settings(max_examples=6)
@given(
    ids=st.lists(st.integers(-2, V + 2), min_size=6, max_size=6), data=st.integers(0, 99)
)
def test_untouched_rows_and_their_state_do_not_change(name, kwargs, ids, data):
    rng = np.random.default_rng(data)
    tx = make(js, name, 0.1, kwargs)
    table = {"table": rng_tree(rng)["table"], "w": jnp.ones(4)}
    state = tx.init(table)
    # Some history first, so that momentum would move a row if it were let to.
    _, state = tx.update(rng_tree(rng), state, table)
    before = (table["table"], state)
    grads = {"table": slices_of(rng, ids), "w": None}
    updates, state = tx.update(grads, state, table)
    after = (js.apply_updates(table, updates)["table"], state)
    untouched = np.array(sorted(set(range(V)) - set(ids)), int)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if old.shape[:1] == (V,):
            np.testing.assert_array_equal(old[untouched], new[untouched])
    touched = sorted(set(range(V)) & set(ids))
    moved = np.asarray(after[0]) != np.asarray(table["table"])
    assert all(moved[i].any() for i in touched)
    # The update names each row once.
    update = updates["table"]
    np.testing.assert_array_equal(update.indices[: len(touched)], touched)
    assert not np.asarray(update.values)[len(touched) :].any()


def test_lamb_takes_each_row_by_itself():
    """As Optax's with every row a parameter of its own."""
    rng = np.random.default_rng(3)
    kwargs = {"weight_decay": 0.1}
    ours, theirs = js.lamb(0.1, **kwargs), optax.lamb(0.1, **kwargs)
    table = rng_tree(rng)["table"].at[4].set(0.0)
    rows = {i: table[i] for i in range(V)}
    state, wanted_state = ours.init(table), theirs.init(rows)
    for _ in range(3):
        grads = slices_of(rng, [*range(V), 2, 2])
        dense = grads.to_dense()
        updates, state = jax.jit(ours.update)(grads, state, table)
        wanted, wanted_state = jax.jit(theirs.update)(
            {i: dense[i] for i in range(V)}, wanted_state, rows
        )
        table, rows = js.apply_updates(table, updates), optax.apply_updates(rows, wanted)
        np.testing.assert_allclose(table, jnp.stack(list(rows.values())), rtol=1e-5)


@pytest.mark.parametrize("shape", [(V, D), (D, V), (V,), (V, 2, 2)], ids=str)
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_adafactor_keeps_its_factors_from_rows_alone(shape, momentum):
    """Without what is taken row by row it equals Optax's, where every row is touched."""
    rng = np.random.default_rng(4)
    kwargs = {
        "learning_rate": 0.1,
        "min_dim_size_to_factor": 1,
        "factored": len(shape) < 3,
        "momentum": momentum,
        "clipping_threshold": None,
        "multiply_by_parameter_scale": False,
    }
    ours, theirs = js.adafactor(**kwargs), optax.adafactor(**kwargs)
    table = jnp.asarray(rng.normal(size=shape), jnp.float32)
    state, wanted_state = ours.init(table), theirs.init(table)
    for _ in range(3):
        grads = slices_of(rng, [*range(shape[0]), 2, 2], shape)
        updates, state = jax.jit(ours.update)(grads, state, table)
        wanted, wanted_state = jax.jit(theirs.update)(grads.to_dense(), wanted_state, table)
        np.testing.assert_allclose(updates.to_dense(), wanted, rtol=2e-5, atol=1e-6)


def test_adafactor_knows_the_columns_of_the_whole_gradient():
    """A few rows, zeros elsewhere: as Optax's on the dense gradient, in the first step."""
    rng = np.random.default_rng(4)
    kwargs = {"min_dim_size_to_factor": 1, "clipping_threshold": None}
    kwargs |= {"multiply_by_parameter_scale": False}
    table = rng_tree(rng)["table"]
    grads = slices_of(rng, [3, 7, 3])
    ours, theirs = js.adafactor(0.1, **kwargs), optax.adafactor(0.1, **kwargs)
    updates, state = ours.update(grads, ours.init(table), table)
    wanted, wanted_state = theirs.update(grads.to_dense(), theirs.init(table), table)
    np.testing.assert_allclose(updates.to_dense(), wanted, rtol=1e-5)
    np.testing.assert_allclose(state.v_row, wanted_state[0].v_row, rtol=1e-6)


def test_adafactor_clips_and_scales_each_row_by_itself():
    table = jnp.array([[3.0, 4.0], [0.0, 0.0]]) * jnp.ones((2, 2))
    grads = js.IndexedSlices(jnp.array([[1.0, -1.0]] * 2), jnp.array([0, 1]), (2, 2))
    tx = js.adafactor(0.1, factored=False)
    updates, _ = tx.update(grads, tx.init(table), table)
    scales = np.array([[np.sqrt(12.5)], [1e-3]])  # of the row, and the least one
    np.testing.assert_allclose(updates.values, scales * [[-0.1, 0.1]] * 1, rtol=1e-5)


def test_own_arithmetic_in_numpy():
    """Row-wise Adagrad and partial row-wise Adam, as FBGEMM writes them."""
    rng = np.random.default_rng(5)
    p, q = (rng.normal(size=(V, D)).astype(np.float32) for _ in range(2))
    s, m, v = np.full(V, 0.1), np.zeros((V, D)), np.zeros(V)
    adagrad = js.rowwise_adagrad(0.1, initial_accumulator_value=0.1)
    adam = js.partial_rowwise_adam(0.1)
    jp, jq = jnp.asarray(p), jnp.asarray(q)
    adagrad_state, adam_state = adagrad.init(jp), adam.init(jq)
    for t in range(1, 4):
        g = rng.normal(size=(V, D)).astype(np.float32)
        s += (g**2).mean(1)
        p = p - 0.1 * g / (np.sqrt(s)[:, None] + 1e-8)
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * (g**2).mean(1)
        root = np.sqrt(v / (1 - 0.999**t))[:, None] + 1e-8
        q = q - 0.1 * (m / (1 - 0.9**t)) / root
        updates, adagrad_state = adagrad.update(jnp.asarray(g), adagrad_state, jp)
        jp = js.apply_updates(jp, updates)
        updates, adam_state = adam.update(jnp.asarray(g), adam_state, jq)
        jq = js.apply_updates(jq, updates)
    np.testing.assert_allclose(jp, p, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jq, q, rtol=1e-4, atol=1e-5)
    assert adagrad_state.sum_of_squares.shape == adam_state.nu.shape == (V,)


def _adam_states(state):
    return {"m": state.mu, "v": state.nu}


def _ftrl_states(state):
    return {"accum": state.accum, "linear": state.linear}


def _ftrl(**kwargs):
    return js.ftrl(0.1, **{f"{k}_regularization_strength": v for k, v in kwargs.items()})


# TensorFlow's name of the run, ours, and its slots by ours.
TENSORFLOW = [
    ("GradientDescent(0.1)", js.sgd(0.1), lambda s: {}),
    ("Momentum(0.1,0.9)", js.sgd(0.1, 0.9), lambda s: {"momentum": s.trace}),
    (
        "Momentum(0.1,0.9,use_nesterov)",
        js.sgd(0.1, 0.9, nesterov=True),
        lambda s: {"momentum": s.trace},
    ),
    (
        "Adagrad(0.1)",
        js.adagrad(0.1, eps=0.0),
        lambda s: {"accumulator": s.sum_of_squares},
    ),
    ("LazyAdam(0.1)", js.adam(0.1), _adam_states),
    # TensorFlow's Adam and Keras' move every row at every step, as exact ones do.
    ("Adam(0.1)", js.adam(0.1, untouched="exact"), _adam_states),
    (
        "RMSProp(0.1)",
        js.rmsprop(0.1, eps=1e-10, initial_scale=1.0),
        lambda s: {"rms": s.nu},
    ),
    (
        "RMSProp(0.1,decay=.8,momentum=.5,epsilon=1e-5)",
        js.rmsprop(0.1, 0.8, 1e-5, 1.0, momentum=0.5),
        lambda s: {"rms": s.nu, "momentum": -s.trace},
    ),
    (
        "RMSProp(0.1,centered)",
        js.rmsprop(0.1, eps=1e-10, initial_scale=1.0, centered=True),
        lambda s: {"rms": s.nu, "mg": s.mu},
    ),
    ("Ftrl(0.1)", _ftrl(), _ftrl_states),
    (
        "Ftrl(0.1,lr_power=-.6,init_acc=.2,l1=.01,l2=.02)",
        js.ftrl(0.1, -0.6, 0.2, 0.01, 0.02),
        _ftrl_states,
    ),
    (
        "Ftrl(0.1,l1=.01,l2=.02,l2_shrinkage=.03)",
        _ftrl(l1=0.01, l2=0.02, l2_shrinkage=0.03),
        _ftrl_states,
    ),
    (
        "ProximalAdagrad(0.1,l1=.01,l2=.02)",
        js.proximal_adagrad(
            0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.02
        ),
        lambda s: {"accumulator": s.accum},
    ),
    (
        "Adadelta(1.0)",
        js.adadelta(1.0, rho=0.95, eps=1e-8),
        lambda s: {"accum": s.e_g, "accum_update": s.e_x},
    ),
]
# Runs of TensorFlow that have no optimizer here, and why.
NOT_HERE = {
    "Adam(0.01,beta1=.8,beta2=.95,epsilon=1e-3)": "epsilon beside the uncorrected root",
    "ProximalGradientDescent(0.1,l1=.01,l2=.02)": "proximal Adagrad is the one kept",
    "AdagradDA(0.1,gs,l1=.01,l2=.02)": "removed from TensorFlow 2",
}


@pytest.mark.parametrize("number", range(len(TENSORFLOW)))
def test_equal_tensorflow_with_duplicates_and_untouched_rows(number):
    (name, tx, slots), section = TENSORFLOW[number], golden("optimizers")
    wanted = section[name]["sparse"]
    for step, (now, there) in zip(wanted, after_each_step(tx, section), strict=True):
        # LazyAdam puts its epsilon of 1e-8 elsewhere; float32 hardly sees it.
        np.testing.assert_allclose(now, step["w"], rtol=3e-5, atol=3e-6)
        for slot, values in slots(there).items():
            np.testing.assert_allclose(values, step["slots"][slot], rtol=2e-5, atol=1e-6)


def after_each_step(tx, section):
    """Parameters and state, brought up to date, after each of TensorFlow's steps."""
    params = jnp.asarray(section["_w0"])
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        params, state = tx.catch_up(params, state, grads.indices)
        updates, state = tx.update(grads, state, params)
        params = js.apply_updates(params, updates)
        return params, state, *tx.flush(params, state)

    for inputs in section["_steps"]:
        empty = 6 - len(inputs["indices"])  # one shape, one compilation
        values = np.pad(inputs["values"], ((0, empty), (0, 0)))
        indices = np.pad(inputs["indices"], (0, empty), constant_values=len(params))
        grads = js.IndexedSlices(values, indices, params.shape)
        params, state, now, there = step(params, state, grads)
        yield now, there


def test_every_run_of_tensorflow_is_compared_or_named():
    runs = {name for name in golden("optimizers") if not name.startswith("_")}
    assert runs == {name for name, *_ in TENSORFLOW} | set(NOT_HERE)


KERAS = {
    "SGD(learning_rate=0.1)": js.sgd(0.1),
    "Adagrad(learning_rate=0.1)": js.adagrad(0.1, eps=1e-7),
    "RMSprop(learning_rate=0.1)": js.rmsprop(0.1, eps=1e-7, untouched="exact"),
    "Adadelta(learning_rate=1.0)": js.adadelta(1.0, 0.95, 1e-7, untouched="exact"),
}


@pytest.mark.parametrize("name", KERAS)
def test_equal_tf_keras(name):
    """The optimizers of tf_keras sum duplicates and move every row, as exact ones do."""
    section, wanted = golden("optimizers"), golden("keras_optimizers")
    steps = wanted[f"tf_keras.{name}"]["sparse"]
    for after, (now, _) in zip(steps, after_each_step(KERAS[name], section), strict=True):
        np.testing.assert_allclose(now, after, rtol=3e-5, atol=3e-6)


@every
def test_protocol_in_optax_and_without_gradients(name, kwargs):
    rng = np.random.default_rng(3)
    params = rng_tree(rng)
    tx = optax.chain(make(js, name, 0.1, kwargs))
    grads = {"table": slices_of(rng, [1, 1]), "w": None}
    updates, _state = tx.update(grads, tx.init(params), params)
    assert updates["w"] is None
    new = js.apply_updates(params, updates)
    chex.assert_trees_all_equal(new["w"], params["w"])
    again = optax.apply_updates({"table": params["table"]}, {"table": updates["table"]})
    chex.assert_trees_all_equal(again["table"], new["table"])


@every
def test_the_state_is_donated_as_it_is_made(name, kwargs):
    tx, params = make(js, name, 0.1, kwargs), rng_tree(np.random.default_rng(0))
    arrays = [x for x in jax.tree.leaves((params, tx.init(params))) if x.size]
    memory = [x.unsafe_buffer_pointer() for x in arrays]
    assert len({*memory}) == len(memory)  # XLA refuses to be given one twice


@pytest.mark.parametrize("name, kwargs", [*FIRST, *FACTORED], ids=label)
def test_one_compilation_for_all_steps(name, kwargs):
    """With a schedule; without one, each setting's steps are counted where they are run."""
    chex.clear_trace_counter()
    tx = make(js, name, SCHEDULE, kwargs)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, state, ids):
        grads = js.grad(lambda p: (p["table"][ids] ** 2).sum() + (p["w"] ** 2).sum())(
            params
        )
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state

    params = rng_tree(np.random.default_rng(4))
    state = tx.init(params)
    for k in range(3):
        new = step(params, state, jnp.array([k, k, 3]))
        chex.assert_trees_all_equal_shapes_and_dtypes(new, (params, state))
        params, state = new


@every
def test_dtypes_are_kept(name, kwargs):
    params = {"table": jnp.ones((V, D), jnp.bfloat16), "w": jnp.ones(4, jnp.bfloat16)}
    grads = {
        "table": js.IndexedSlices(jnp.ones((2, D), jnp.bfloat16), [1, 1], (V, D)),
        "w": None,
    }
    tx = make(js, name, SCHEDULE, kwargs)
    state = tx.init(params)
    updates, new = jax.eval_shape(tx.update, grads, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, new)
    after = jax.eval_shape(js.apply_updates, params, updates)
    assert after["table"].dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["adam", "adamw", "amsgrad", "lion"])
def test_mu_dtype(name):
    table = jnp.ones((V, D), jnp.bfloat16)
    assert getattr(js, name)(0.1, mu_dtype="float32").init(table).mu.dtype == jnp.float32


def test_a_learned_learning_rate_goes_through_many_rows():
    rng = np.random.default_rng(6)
    table = jnp.asarray(rng.normal(size=(5000, D)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 5000, 3000))

    def after(rate, grad, module):
        tx = module.adam(rate)
        loss = lambda t: (t[ids] ** 3).sum()  # noqa: E731
        updates, _ = tx.update(grad(loss)(table), tx.init(table), table)
        return (module.apply_updates(table, updates)[ids] ** 2).sum()

    for derivative in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f))):
        got = derivative(lambda r: after(r, js.grad, js))(jnp.float32(0.1))
        wanted = derivative(lambda r: after(r, jax.grad, optax))(jnp.float32(0.1))
        np.testing.assert_allclose(got, wanted, rtol=1e-3)


def test_slices_without_dense_shape():
    grads = js.IndexedSlices(jnp.ones((2, D)), jnp.array([1, 1]))
    table = jnp.zeros((V, D))
    for tx in (js.sgd(0.5), js.sgd(0.5, momentum=0.9)):
        updates, _ = tx.update(grads, tx.init(table), table)
        np.testing.assert_array_equal(js.apply_updates(table, updates)[1], [-1] * D)


@every
def test_no_rows_and_no_table(name, kwargs):
    tx = make(js, name, 0.1, kwargs)
    for rows in (V, 0):
        params = {"table": jnp.ones((rows, D)), "w": jnp.ones(4)}
        grads = {"table": js.IndexedSlices(jnp.zeros((0, D)), [], (rows, D)), "w": None}
        updates, _ = tx.update(grads, tx.init(params), params)
        np.testing.assert_array_equal(
            js.apply_updates(params, updates)["table"], params["table"]
        )


def test_errors():
    table = jnp.zeros((V, D))
    wrong = js.IndexedSlices(jnp.ones((1, D)), jnp.array([1]), (V + 1, D))
    tx = js.adam(0.1)
    with pytest.raises(ValueError, match=r"shape \(10, 3\), the optimizer state"):
        tx.update(wrong, tx.init(table), table)
    with pytest.raises(ValueError, match=r"cannot add .* to a parameter of shape \(9, 3\)"):
        js.apply_updates(table, wrong)
    batch = jax.vmap(lambda v: js.IndexedSlices(v, jnp.array([1]), (V, D)))(
        jnp.ones((2, 1, D))
    )
    with pytest.raises(ValueError, match="batch axis from vmap; sum it first"):
        tx.update(batch, tx.init(table), table)
    grads = js.IndexedSlices(jnp.ones((1, D)), jnp.array([1]), (V, D))
    for tx in (js.adamw(0.1), js.lion(0.1), js.lamb(0.1), js.ftrl(0.1)):
        with pytest.raises(ValueError, match=r"needs the parameters as well, .*tx.update"):
            tx.update(grads, tx.init(table))
    with pytest.raises(ValueError, match=r"adafactor needs the parameters as well"):
        js.adafactor().update(grads, js.adafactor().init(table))
    cube = js.IndexedSlices(jnp.ones((1, D, D)), jnp.array([1]), (V, D, D))
    tx = js.adafactor(min_dim_size_to_factor=1)
    with pytest.raises(ValueError, match=r"slices of a factored parameter of shape \(9, 3"):
        tx.update(cube, tx.init(jnp.ones((V, D, D))), jnp.ones((V, D, D)))


@pytest.mark.parametrize("name", sorted({name for name, _ in ALL}))
def test_learning_rates_are_checked(name):
    with pytest.raises(TypeError, match=f"{name}.*wants a number or a schedule"):
        getattr(js, name)("0.1")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: js.ftrl(0.1, 0.5), "ftrl got learning_rate_power=0.5; "),
        (
            lambda: js.ftrl(0.1, l1_regularization_strength=-1.0),
            "ftrl got l1_regularization_strength=-1.0; learning_rate_power must be",
        ),
        (
            lambda: js.proximal_adagrad(0.1, 0.0),
            "wants initial_accumulator_value above 0 and regularization strengths",
        ),
        (
            lambda: js.adamw(0.1, weight_decay_mode="some"),
            r"adamw\(weight_decay_mode='some'\): wanted \"touched\" .* or \"all\"",
        ),
    ],
)
def test_hyperparameters_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()
