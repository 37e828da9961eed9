"""Optimizers: dense leaves equal Optax; sparse ones do, on the rows of each step."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import examples
from helpers import all_at_once, assert_close, fast_jit, golden, slow_unless, ulps
from hypothesis import given
from hypothesis import strategies as st
from optimizers import (
    ALL,
    BY_ROW,
    FIRST,
    IDS,
    OWN,
    SCHEDULE,
    SHARED,
    THREE,
    D,
    V,
    drawn,
    each_row,
    label,
    make,
    only_touched,
    rng_tree,
    slices_of,
)

import jslices as js
import jslices.tf1 as tf

DENSE = [*SHARED, *BY_ROW]
FIRST_DENSE = [case for case in FIRST if case in DENSE]
OTHER_DENSE = [case for case in DENSE if case not in FIRST]
# The factors of a table are not a row's own: compared further down.
FACTORED = [case for case in ALL if "min_dim_size_to_factor" in case[1]]
ROWS_ALONE = [case for case in ALL if case not in FACTORED]

every = pytest.mark.parametrize("name, kwargs", ALL, ids=label)
three = pytest.mark.parametrize("name, kwargs", THREE, ids=label)


@pytest.mark.as_users
@pytest.mark.parametrize(
    "name, kwargs, rate, jit",
    slow_unless(
        [
            # Each optimizer and each of its settings; all pairs of rate and jit for one.
            *((*case, 0.1, True) for case in FIRST_DENSE),
            *((*case, SCHEDULE, False) for case in FIRST_DENSE),
            *((*case, 0.1, False) for case in OTHER_DENSE),
            ("adam", {}, 0.1, False),
            ("adam", {}, SCHEDULE, True),
        ],
        lambda case: case[3] or case[:2] in THREE,
    ),
    ids=label,
)
def test_dense_leaves_equal_optax(name, kwargs, rate, jit):
    """Updates and state, over five steps."""
    for ours, theirs in five_steps(name, kwargs, rate, jit, rng_tree):
        assert ulps(ours, theirs) <= most_ulps(kwargs, jit)


@pytest.mark.as_users
@pytest.mark.parametrize(
    "name, kwargs, jit",
    slow_unless(
        [
            *((*case, False) for case in FIRST_DENSE),
            # What is read off the parameters, or for each of them.
            *((*case, False) for case in OTHER_DENSE if {"mask", "factored"} & {*case[1]}),
            *((*case, True) for case in THREE if case in DENSE),
        ],
        lambda case: case[:2] in FIRST,
    ),
    ids=label,
)
def test_a_single_dense_array_equals_optax(name, kwargs, jit):
    """Not in a tree."""
    mask = kwargs.get("mask")
    if mask:
        kwargs = {**kwargs, "mask": (mask(None) if callable(mask) else mask)["table"]}
    for ours, theirs in five_steps(
        name, kwargs, 0.1, jit, lambda rng: rng_tree(rng)["table"]
    ):
        assert ulps(ours, theirs) <= most_ulps(kwargs, jit)


def is_compiled(kwargs, jit):
    """Without ``jit`` ours is compiled all the same, unless the mask is a function."""
    return jit or not callable(kwargs.get("mask"))


def most_ulps(kwargs, jit):
    """One; a few where both run operation by operation, ours in another order."""
    return 1 if is_compiled(kwargs, jit) else 4


def five_steps(name, kwargs, rate, jit, draw):
    """After each step our update and state, and Optax's; the parameters are Optax's."""
    rng = np.random.default_rng(0)
    ours, theirs = make(js, name, rate, kwargs), make(optax, name, rate, kwargs)
    update = jax.jit(ours.update) if jit else ours.update
    compiled = is_compiled(kwargs, jit)
    wanted_update = jax.jit(theirs.update) if compiled else theirs.update
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


@functools.cache
def compiled_step(number, dtype="float32"):
    """Initial state and step of ``ALL[number]``, compiled once for this whole module.

    ``step(params, state, grads) -> (params, state, update of the table)`` takes six ids.
    """
    tx = make(js, ALL[number][0], 0.1, ALL[number][1])
    chex.clear_trace_counter()

    @fast_jit
    @chex.assert_max_traces(n=1)  # one compilation for all kinds of ids and all steps
    def step(params, state, grads):
        updates, new = tx.update(grads, state, params)
        return js.apply_updates(params, updates), new, updates["table"]

    return tx.init(wide(start(dtype))), step


def start(dtype):
    """The parameters; one row is zero, so that its norm is."""
    params = rng_tree(np.random.default_rng(2), dtype)
    return {**params, "table": params["table"].at[4].set(0)}


def wide(params):
    return jax.tree.map(lambda p: p.astype(jnp.float32), params)


#: Three steps after one another, twice: each kind of ids, most of them after others.
RUNS = [("unique", "duplicated", "padded"), ("all_equal", "empty", "duplicated")]


def gradients_of(run, dtype="float32"):
    """Of each of three steps."""
    rng = np.random.default_rng(1)
    return [
        {"table": slices_of(rng, IDS[kind], dtype=dtype), "w": rng_tree(rng, dtype)["w"]}
        for kind in run
    ]


@functools.cache
def lazy_steps_of_optax(number, dtype="float32"):
    """The parameters after each of the steps of each run."""
    name, kwargs = ALL[number]
    # What is not in Optax is compared with itself on dense gradients, and that with numpy.
    oracle = make(js if (name, kwargs) in OWN else optax, name, 0.1, kwargs)
    oracle = each_row(oracle) if (name, kwargs) in BY_ROW else oracle
    step, first = only_touched(oracle), oracle.init(wide(start(dtype)))
    after = {run: [] for run in RUNS}
    for run in RUNS:
        params, state = start(dtype), first
        for grads in gradients_of(run, dtype):
            params, state = step(params, state, grads)
            after[run].append(params)
    return after


# A table of 16 bits may be rounded to a neighbour, in each of three steps.
TOLERANCES = {"float32": (1e-5, 1e-6), "bfloat16": (1e-2, 1e-2)}


@pytest.mark.parametrize(
    "name, kwargs, dtype",
    slow_unless(
        [
            *((*case, "float32") for case in ROWS_ALONE),
            # Others do the same arithmetic in float32; by the norm or mean of a row, too.
            *((*case, "bfloat16") for case in FIRST if case in [*THREE, *BY_ROW, *OWN]),
        ],
        lambda case: case[:2] in (FIRST if case[2] == "float32" else THREE),
    ),
    ids=label,
)
def test_lazy_is_optax_on_the_touched_rows(name, kwargs, dtype):
    """For all kinds of ids, after each step; the state is float32 in any case."""
    number = ALL.index((name, kwargs))
    wanted = lazy_steps_of_optax(number, dtype)
    first, step = compiled_step(number, dtype)
    rtol, atol = TOLERANCES[dtype]
    for run in RUNS:
        carry = start(dtype), first
        steps = zip(run, gradients_of(run, dtype), wanted[run], strict=True)
        for kind, grads, params in steps:
            *new, update = step(*carry, grads)
            chex.assert_trees_all_equal_shapes_and_dtypes(tuple(new), carry)
            print(f"{kind} in {run}:")  # is shown where it fails
            assert_close(new[0], params, rtol=rtol, atol=atol)
            check_rows(carry, new, update, IDS[kind])
            carry = tuple(new)


@pytest.mark.parametrize(
    "name, kwargs, how",
    slow_unless(
        [(*case, how) for case in THREE for how in ("eager", "scan", "vmap")],
        lambda case: case[0] == "adam",
    ),
    ids=label,
)
def test_lazy_is_optax_however_it_is_run(name, kwargs, how):
    tx = make(js, name, 0.1, kwargs)
    wanted = lazy_steps_of_optax(ALL.index((name, kwargs)))
    wanted = stack([stack(wanted[run]) for run in RUNS])
    grads = stack([stack(gradients_of(run)) for run in RUNS])
    carry = start("float32"), tx.init(start("float32"))

    def step(carry, grads):
        updates, state = tx.update(grads, carry[1], carry[0])
        new = js.apply_updates(carry[0], updates), state
        return new, new[0]

    if how == "eager":
        got = stack([stack(eagerly(step, carry, at(grads, k))) for k in range(len(RUNS))])
    elif how == "scan":
        scan = fast_jit(lambda grads: jax.lax.scan(step, carry, grads)[1])
        got = stack([scan(at(grads, k)) for k in range(len(RUNS))])
    else:
        mapped, got = fast_jit(jax.vmap(step)), []
        carry = stack([carry] * len(RUNS))
        for k in range(3):
            carry, params = mapped(carry, at(grads, (slice(None), k)))
            got.append(params)
        got = jax.tree.map(lambda *x: np.stack(x, 1), *got)
    assert_close(got, wanted, *TOLERANCES["float32"])


def eagerly(step, carry, grads):
    for k in range(3):
        carry, params = step(carry, at(grads, k))
        yield params


def stack(trees):
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def at(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


@pytest.mark.parametrize("shape", [(V,), (V, 2, 2), (1, D)], ids=str)
@three
def test_tables_of_any_rank(name, kwargs, shape):
    rng = np.random.default_rng(7)
    ids = [i % shape[0] for i in (2, 5, 2, 2, 8, 5)]
    touched = np.isin(np.arange(shape[0]), ids)
    ours = make(js, name, 0.1, kwargs)
    theirs = make(js if (name, kwargs) in OWN else optax, name, 0.1, kwargs)
    table = wanted = drawn(rng, shape)
    state, wanted_state = ours.init(table), theirs.init(table)

    @fast_jit
    def step(grads, table, state, wanted, wanted_state):
        table, state = ours.apply(grads, state, table)
        updates, wanted_state = theirs.update(grads.to_dense(), wanted_state, wanted)
        moves = touched.reshape(-1, *(1,) * (wanted.ndim - 1))
        return table, state, jnp.where(moves, wanted + updates, wanted), wanted_state

    for _ in range(2):
        grads = slices_of(rng, ids, shape)
        table, state, wanted, wanted_state = step(grads, table, state, wanted, wanted_state)
    assert_close(table, wanted)


@pytest.mark.parametrize("name, kwargs", [*THREE, *FACTORED], ids=label)
@examples(10)
@given(
    ids=st.lists(st.integers(-2, V + 2), min_size=6, max_size=6), data=st.integers(0, 99)
)
def test_untouched_rows_and_their_state_do_not_change(name, kwargs, ids, data):
    """Whatever the ids are: the test above looks at all optimizers."""
    rng = np.random.default_rng(data)
    state, step = compiled_step(ALL.index((name, kwargs)))
    carry = start("float32"), state
    # Some history first, so that momentum would move a row if it were let to.
    for seen in (range(6), range(3, 9), ids):
        grads = {"table": slices_of(rng, [*seen]), "w": rng_tree(rng)["w"]}
        before, (*carry, update) = carry, step(*carry, grads)
    check_rows(before, carry, update, ids)


def check_rows(before, after, update, ids):
    """Rows that no id names keep their bits, and their state; others move, named once."""
    (params, state), (new_params, new_state) = jax.device_get((before, after))
    old, new = params["table"], new_params["table"]
    touched = [*np.unique([i for i in ids if 0 <= i < V]).astype(int)]
    untouched = ~np.isin(np.arange(V), touched)
    for x, y in zip(*map(jax.tree.leaves, (state, new_state)), strict=True):
        if x.shape[:1] == (V,):
            np.testing.assert_array_equal(x[untouched], y[untouched])
    np.testing.assert_array_equal(old[untouched], new[untouched])
    assert (old != new).any(1)[touched].all()
    named = np.asarray(update.indices) < V
    assert sorted(np.asarray(update.indices)[named]) == touched
    assert not np.asarray(update.values)[~named].any()


@pytest.mark.parametrize(
    "shape, momentum",
    slow_unless(
        [((V, D), None), ((V, D), 0.9), ((D, V), None), ((V,), None), ((V, 2, 2), None)],
        lambda case: case in (((V, D), 0.9), ((D, V), None)),
    ),
    ids=str,
)
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
    table = drawn(rng, shape)
    state, wanted_state = fast_jit(lambda: (ours.init(table), theirs.init(table)))()

    @fast_jit
    def both(grads, state, wanted_state):
        updates, state = ours.update(grads, state, table)
        wanted, wanted_state = theirs.update(grads.to_dense(), wanted_state, table)
        return updates.to_dense(), wanted, state, wanted_state

    for _ in range(3):
        grads = slices_of(rng, [*range(shape[0]), 2, 2], shape)
        updates, wanted, state, wanted_state = both(grads, state, wanted_state)
        np.testing.assert_allclose(updates, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name, kwargs", [*FIRST, *FACTORED], ids=label)
def test_a_bad_row_stays_alone_unless_rows_share_a_moment(name, kwargs):
    """As docs/optimizers.md says: in factored Adafactor it spoils the column moment."""
    first, step = compiled_step(ALL.index((name, kwargs)))
    grads, *_ = gradients_of(["unique"])
    hit, other = IDS["unique"][:2]
    alone = np.arange(V) != hit

    def after(number):
        """The table and the state after a step with that number in the gradient."""
        rows = np.array(grads["table"].values)
        rows[0] = rows[0] if number is None else number
        table = js.IndexedSlices(jax.device_put(rows), grads["table"].indices, (V, D))
        params, state, _ = step(start("float32"), first, {**grads, "table": table})
        return jax.device_get((params["table"], state))

    table, state = after(None)
    for bad in (np.nan, 1e20):
        spoiled, spoiled_state = after(bad)
        if (name, kwargs) in FACTORED:
            assert np.isnan(spoiled[other]).all()
            continue
        np.testing.assert_array_equal(spoiled[alone], table[alone])
        for x, y in zip(*map(jax.tree.leaves, (spoiled_state, state)), strict=True):
            if x.shape[:1] == (V,):
                np.testing.assert_array_equal(x[alone], y[alone])


def test_adafactor_knows_the_columns_of_the_whole_gradient():
    """A few rows, zeros elsewhere: as Optax's on the dense gradient, in the first step."""
    rng = np.random.default_rng(4)
    kwargs = {"min_dim_size_to_factor": 1, "clipping_threshold": None}
    kwargs |= {"multiply_by_parameter_scale": False}
    table = rng_tree(rng)["table"]
    grads = slices_of(rng, [3, 7, 3])
    ours, theirs = js.adafactor(0.1, **kwargs), optax.adafactor(0.1, **kwargs)

    @fast_jit
    def both():
        updates, state = ours.update(grads, ours.init(table), table)
        wanted = theirs.update(grads.to_dense(), theirs.init(table), table)
        return updates.to_dense(), state, *wanted

    updates, state, wanted, wanted_state = both()
    np.testing.assert_allclose(updates, wanted, rtol=1e-5)
    np.testing.assert_allclose(state.v_row, wanted_state[0].v_row, rtol=1e-6)


def test_adafactor_clips_and_scales_each_row_by_itself():
    table = jnp.array([[3.0, 4.0], [0.0, 0.0]]) * jnp.ones((2, 2))
    grads = js.IndexedSlices(jnp.array([[1.0, -1.0]] * 2), jnp.array([0, 1]), (2, 2))
    tx = js.adafactor(0.1, factored=False)
    updates, _ = fast_jit(tx.update)(grads, tx.init(table), table)
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


@pytest.mark.parametrize("name", ["apply_gradients", "minimize", "step", "zero_grad"])
def test_methods_of_other_optimizers_are_told(name):
    with pytest.raises(AttributeError, match=f"no '{name}'; type (params|step|nothing)"):
        getattr(js.adam(0.1), name)
    assert not hasattr(js.adam(0.1), "lr")


def _told(name, rate, momentum=None):
    """The optimizer that the error for ``tf.train``'s says to type."""
    with pytest.raises(AttributeError) as caught:
        getattr(tf.train, name)
    (text,) = re.findall(r"jslices\.\w+\(rate.*?\)", str(caught.value))
    return eval(text, {"jslices": js, "rate": rate, "momentum": momentum})


# TensorFlow's name of the run, ours, and its slots by ours.
TENSORFLOW = [
    ("GradientDescent(0.1)", _told("GradientDescentOptimizer", 0.1), lambda s: {}),
    (
        "Momentum(0.1,0.9)",
        _told("MomentumOptimizer", 0.1, 0.9),
        lambda s: {"momentum": s.trace},
    ),
    (
        "Momentum(0.1,0.9,use_nesterov)",
        js.sgd(0.1, 0.9, nesterov=True),
        lambda s: {"momentum": s.trace},
    ),
    (
        "Adagrad(0.1)",
        _told("AdagradOptimizer", 0.1),
        lambda s: {"accumulator": s.sum_of_squares},
    ),
    ("LazyAdam(0.1)", js.adam(0.1, eps_hat=True), _adam_states),
    # TensorFlow's Adam and Keras' move every row at every step, as exact ones do.
    ("Adam(0.1)", _told("AdamOptimizer", 0.1), _adam_states),
    (
        "Adam(0.01,beta1=.8,beta2=.95,epsilon=1e-3)",
        js.adam(0.01, 0.8, 0.95, 1e-3, eps_hat=True, untouched="exact"),
        _adam_states,
    ),
    (
        "RMSProp(0.1)",
        _told("RMSPropOptimizer", 0.1),
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
    ("Ftrl(0.1)", _told("FtrlOptimizer", 0.1), _ftrl_states),
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
        _told("AdadeltaOptimizer", 1.0),
        lambda s: {"accum": s.e_g, "accum_update": s.e_x},
    ),
]
# Runs of TensorFlow that have no optimizer here, and why.
NOT_HERE = {
    "ProximalGradientDescent(0.1,l1=.01,l2=.02)": "proximal Adagrad is the one kept",
    "AdagradDA(0.1,gs,l1=.01,l2=.02)": "removed from TensorFlow 2",
}


@pytest.mark.parametrize("number", range(len(TENSORFLOW)))
def test_equal_tensorflow_with_duplicates_and_untouched_rows(number):
    (name, tx, slots), section = TENSORFLOW[number], golden("optimizers")
    wanted = section[name]["sparse"]
    for step, (now, there) in zip(wanted, after_each_step(tx, section), strict=True):
        np.testing.assert_allclose(now, step["w"], rtol=3e-5, atol=3e-6)
        for slot, values in slots(there).items():
            np.testing.assert_allclose(values, step["slots"][slot], rtol=2e-5, atol=1e-6)


def after_each_step(tx, section):
    """Parameters and state, brought up to date, after each of TensorFlow's steps."""
    params = jnp.asarray(section["_w0"])
    state = tx.init(params)

    @fast_jit
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
    "tf_keras.SGD(learning_rate=0.1)": js.sgd(0.1),
    "tf_keras.Adagrad(learning_rate=0.1)": js.adagrad(0.1, eps=1e-7),
    "tf_keras.Adam(learning_rate=0.1)": js.adam(
        0.1, eps=1e-7, eps_hat=True, untouched="exact"
    ),
    "tf_keras.RMSprop(learning_rate=0.1)": js.rmsprop(0.1, eps=1e-7, untouched="exact"),
    "tf_keras.Adadelta(learning_rate=1.0)": js.adadelta(1.0, 0.95, 1e-7, untouched="exact"),
    "keras.Lion(learning_rate=0.1)": js.lion(0.1, weight_decay=0.0, untouched="exact"),
    "keras.Lion(learning_rate=0.1,weight_decay=0.1)": js.lion(
        0.1, weight_decay=0.1, untouched="exact"
    ),
}


@pytest.mark.parametrize("name", KERAS)
def test_equal_keras(name):
    """The optimizers of tf_keras sum duplicates and move every row, as exact ones do.

    Those of Keras 3, which does not sum duplicates, were given dense gradients.
    """
    section, (steps,) = golden("optimizers"), golden("keras_optimizers")[name].values()
    for after, (now, _) in zip(steps, after_each_step(KERAS[name], section), strict=True):
        np.testing.assert_allclose(now, after, rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize(
    "name, decay, eps_root", [("adam", 0.0, 1e-14), ("adamw", 0.1, 0.0)]
)
def test_epsilon_hat_is_where_sparse_adam_has_it(name, decay, eps_root):
    """In float64, as torch/optim/_functional.py has it, of a loss that is a mean."""
    gradients = 1e-7 * np.random.default_rng(5).normal(size=(6, 2, D))
    w, mu, nu = np.ones((V, D)), np.zeros((V, D)), np.zeros((V, D))
    settings = {"weight_decay": decay} if decay else {}
    make_one = functools.partial(getattr(js, name), 0.1, eps_root=eps_root, **settings)
    ends = {}
    for hat in (True, False):
        tx, ends[hat] = make_one(eps_hat=hat), jnp.ones((V, D))
        state, step = tx.init(ends[hat]), fast_jit(tx.apply)
        for g in gradients:
            rows = js.IndexedSlices(jnp.asarray(g, "float32"), jnp.array([1, 4]), (V, D))
            ends[hat], state = step(rows, state, ends[hat])
    for t, g in enumerate(gradients, 1):
        mu[[1, 4]] += 0.1 * (g - mu[[1, 4]])
        nu[[1, 4]] += 0.001 * (g**2 - nu[[1, 4]])
        size = 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        moved = size * mu / (np.sqrt(nu + eps_root) + 1e-8)
        w[[1, 4]] -= moved[[1, 4]] + 0.1 * decay * w[[1, 4]]
    np.testing.assert_allclose(ends[True], w, rtol=2e-5)
    assert np.abs(ends[False] - w).max() > 0.03  # a third of a step


def test_epsilon_hat_is_no_number():
    for make_one in (js.adam, js.adamw):
        with pytest.raises(
            TypeError, match=r"eps_hat=1e-07\): wanted True or False.*number is eps"
        ):
            make_one(0.1, eps_hat=1e-7)


def test_amsgrad_of_keras_is_another():
    """It keeps the largest moment before correction, and ``eps`` beside that root."""
    section = golden("optimizers")
    name = "keras.Adam(learning_rate=0.1,beta_2=0.9,amsgrad=True)"
    theirs = golden("keras_optimizers")[name]["dense"]
    w = section["_w0"].astype(np.float64)
    mean, moment, largest = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    tx = js.amsgrad(0.1, b2=0.9, eps=1e-7)
    ours, state = section["_w0"], tx.init(section["_w0"])
    for t, inputs in enumerate(section["_steps"], 1):
        grad = np.zeros_like(ours)
        np.add.at(grad, inputs["indices"], inputs["values"])
        mean, moment = 0.9 * mean + 0.1 * grad, 0.9 * moment + 0.1 * grad**2
        largest = np.maximum(largest, moment)
        rate = 0.1 * np.sqrt(1 - 0.9**t) / (1 - 0.9**t)
        w = w - rate * mean / (np.sqrt(largest) + 1e-7)
        np.testing.assert_allclose(theirs[t - 1], w, rtol=1e-4, atol=1e-5)
        updates, state = tx.update(grad, state, ours)
        ours = ours + np.asarray(updates)
    assert np.abs(ours - w).max() > 0.01


@three
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
def test_no_gradient_at_all(name, kwargs):
    """The step is counted; parameters and state stay as they are."""
    tx, params = make(js, name, 0.1, kwargs), rng_tree(np.random.default_rng(3))
    state = tx.init(params)
    updates, new = tx.update({"table": None, "w": None}, state, params)
    assert updates == {"table": None, "w": None}
    assert new.count == 1
    chex.assert_trees_all_equal(new._replace(count=state.count), state)


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("mask", [None, {"table": True, "mlp": False}], ids=str)
def test_no_gradient_for_a_part_of_the_tree(mask, untouched):
    """One None stands for all parameters below it; they and their state stay."""
    rng = np.random.default_rng(3)
    tx = js.adamw(0.1, weight_decay=0.1, mask=mask, untouched=untouched)
    params = {"table": rng_tree(rng)["table"], "mlp": rng_tree(rng)}
    grads = {"table": slices_of(rng, [1, 4, 1]), "mlp": None}
    each = {**grads, "mlp": {"table": None, "w": None}}
    (got, state), (wanted, wanted_state) = (
        tx.apply(g, tx.init(params), params) for g in (grads, each)
    )
    chex.assert_trees_all_equal((got, state), (wanted, wanted_state))
    chex.assert_trees_all_equal(got["mlp"], params["mlp"])
    assert np.abs(got["table"] - params["table"]).max() > 0.01


MASKS = {
    "function": lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    "prefix": {"table": False, "w": True, "activation": None, "names": False},
    "all": True,
}


@pytest.mark.parametrize(
    "name, mask",
    slow_unless(
        [*(("adamw", mask) for mask in MASKS), ("lion", "prefix"), ("lamb", "all")],
        lambda case: case in (("adamw", "function"), ("lion", "prefix")),
    ),
)
def test_masks_where_parameters_are_none(name, mask):
    """As Equinox has None for what is no array: equal to Optax, as rows and as arrays."""
    rng, absent = np.random.default_rng(4), {"activation": None, "names": {"first": None}}
    ours, theirs = (
        make(module, name, 0.1, {"weight_decay": 0.1, "mask": MASKS[mask]})
        for module in (js, optax)
    )
    start = {**rng_tree(rng), **absent}
    if name == "lamb":  # by the norms of a row for slices, of the table for an array
        start["table"] = start["table"][:1]
    height = len(start["table"])

    @jax.jit
    def their_step(dense, state, wanted):
        updates, state = theirs.update(dense, state, wanted)
        return optax.apply_updates(wanted, updates), state

    for by_rows in (True, False):
        params, wanted = start, start
        state, wanted_state = ours.init(start), theirs.init(start)
        for _ in range(2):
            rows = slices_of(rng, [*range(height), 0], (height, D))
            dense = {**rng_tree(rng), **absent, "table": rows.to_dense()}
            grads = {**dense, "table": rows} if by_rows else dense
            params, state = ours.apply(grads, state, params)
            wanted, wanted_state = their_step(dense, wanted_state, wanted)
        assert_close(params, wanted)
        assert ours.plan(grads, params)["activation"] is None
        assert jax.tree.structure(state) == jax.tree.structure(ours.init(start))


@every
def test_the_state_is_donated_as_it_is_made(name, kwargs):
    tx, params = make(js, name, 0.1, kwargs), rng_tree(np.random.default_rng(0))
    arrays = [x for x in jax.tree.leaves((params, tx.init(params))) if x.size]
    memory = [x.unsafe_buffer_pointer() for x in arrays]
    assert len({*memory}) == len(memory)  # XLA refuses to be given one twice


@pytest.mark.parametrize("name, kwargs", [*THREE, *FACTORED], ids=label)
def test_one_compilation_for_all_steps(name, kwargs):
    """With a schedule, and from the loss; for the others types are compared below."""
    chex.clear_trace_counter()
    tx = make(js, name, SCHEDULE, kwargs)

    @fast_jit
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


@pytest.mark.parametrize(
    "name, kwargs, dtype",
    slow_unless(
        [
            *((*case, "float32") for case in ALL),
            *((*case, "bfloat16") for case in FIRST),
            ("adam", {}, "float16"),
        ],
        lambda case: case[:2] in FIRST,
    ),
    ids=label,
)
def test_types_are_kept(name, kwargs, dtype):
    """Dtypes, and that they are strong: another type would be another compilation."""
    params = rng_tree(np.random.default_rng(0), dtype)
    rows = slices_of(np.random.default_rng(0), [1, 1], dtype=dtype)
    tx = make(js, name, SCHEDULE, kwargs)
    state = tx.init(params)
    for w in (None, params["w"]):
        grads = {"table": rows, "w": w}
        updates, new = jax.eval_shape(tx.update, grads, state, params)
        assert_same_types(new, state)
        assert_same_types(jax.eval_shape(js.apply_updates, params, updates), params)


def assert_same_types(actual, wanted):
    assert types_of(actual) == types_of(wanted)


def types_of(tree):
    return jax.tree.map(jax.typeof, jax.eval_shape(lambda: tree))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("adam", "sgd") else pytest.mark.slow)
        for name in sorted({name for name, _ in SHARED})
    ],
)
def test_squares_of_float16_overflow_as_in_optax(name):
    """As docs/optimizers.md says, and that gradients in float32 help."""
    tx, theirs = getattr(js, name)(0.1), getattr(optax, name)(0.1)

    @fast_jit
    def updates(table, rows):
        """Of row 1: ours, that of Optax, and both for gradients in float32."""
        ours, _ = tx.update(rows, tx.init(table), table)
        wanted, _ = theirs.update(rows.to_dense(), theirs.init(table), table)
        wide, whole = rows.astype(jnp.float32), table.astype(jnp.float32)
        ours_wide, _ = tx.update(wide, tx.init(table), table)
        wanted_wide, _ = theirs.update(wide.to_dense(), theirs.init(whole), table)
        return ours.to_dense()[1], wanted[1], ours_wide.to_dense()[1], wanted_wide[1]

    gradient = np.full((2, 1), 488, np.float16)
    rows = js.IndexedSlices(jax.device_put(gradient), [1, 1], (V, 1))
    ours, wanted, ours_wide, wanted_wide = updates(np.ones((V, 1), np.float16), rows)
    assert_close(ours, wanted, 1e-2)
    squares = name not in ("sgd", "lion")
    assert squares == (abs(wanted[0]) < 1e-4)
    assert_close(ours_wide, wanted_wide, 1e-2)


@pytest.mark.parametrize("name", ["adam", "adamw", "amsgrad", "lion"])
def test_mu_dtype(name):
    table = jnp.ones((V, D), jnp.bfloat16)
    assert getattr(js, name)(0.1, mu_dtype="float32").init(table).mu.dtype == jnp.float32


@pytest.mark.parametrize(  # together, and in chunks
    "num_ids", slow_unless([(6,), (3000,)], (3000,).__eq__)
)
def test_a_learned_learning_rate(num_ids):
    rng = np.random.default_rng(6)
    table, ids = drawn(rng, (5000, D)), rng.integers(0, 5000, num_ids)

    def after(rate, grad, module):
        tx = module.adam(rate)
        loss = lambda t: (t[ids] ** 3).sum()  # noqa: E731
        updates, _ = tx.update(grad(loss)(table), tx.init(table), table)
        return (module.apply_updates(table, updates)[ids] ** 2).sum()

    rate = jnp.float32(0.1)
    wanted = fast_jit(jax.grad(lambda rate: after(rate, jax.grad, optax)))(rate)
    ours = lambda rate: after(rate, js.grad, js)  # noqa: E731
    derivatives = [fast_jit(jax.grad(ours)), fast_jit(jax.jacfwd(ours))]
    if num_ids == 6:  # and without jit
        derivatives += [jax.grad(ours)]
    for derivative in derivatives:
        np.testing.assert_allclose(derivative(rate), wanted, rtol=1e-3)


def test_slices_without_dense_shape():
    grads = js.IndexedSlices(jnp.ones((2, D)), jnp.array([1, 1]))
    table = jnp.zeros((V, D))
    for tx in (js.sgd(0.5), js.sgd(0.5, momentum=0.9)):
        updates, _ = tx.update(grads, tx.init(table), table)
        np.testing.assert_array_equal(js.apply_updates(table, updates)[1], [-1] * D)


@pytest.mark.parametrize("name, kwargs", [*FIRST, *FACTORED], ids=label)
def test_no_rows_and_no_table(name, kwargs):
    tx, rng = make(js, name, 0.1, kwargs), np.random.default_rng(0)
    for rows in (V, 0):
        params = {"table": drawn(rng, (rows, D)), "w": drawn(rng, (4,))}
        grads = {"table": slices_of(rng, [], (rows, D)), "w": None}
        updates, _ = tx.update(grads, tx.init(params), params)
        np.testing.assert_array_equal(
            js.apply_updates(params, updates)["table"], params["table"]
        )


def test_errors():
    table = jnp.zeros((V, D))
    wrong = js.IndexedSlices(jnp.ones((1, D)), jnp.array([1]), (V + 1, D))
    tx = js.adam(0.1)
    with pytest.raises(ValueError, match=r"shape \(10, 3\), and the parameter has"):
        tx.update(wrong, tx.init(table), table)
    with pytest.raises(ValueError, match=r"cannot add .* to a parameter of shape \(9, 3\)"):
        js.apply_updates(table, wrong)
    batch = jax.vmap(lambda v: js.IndexedSlices(v, jnp.array([1]), (V, D)))(
        jnp.ones((2, 1, D))
    )
    with pytest.raises(ValueError, match="batch axis from vmap; sum it first"):
        tx.update(batch, tx.init(table), table)
    grads = js.IndexedSlices(jnp.ones((1, D)), jnp.array([1]), (V, D))
    for tx in (js.adamw(0.1), js.lion(0.1), js.lamb(0.1), js.ftrl(0.1), js.adafactor()):
        with pytest.raises(ValueError, match=r"needs the parameters as well, .*tx.update"):
            tx.update(grads, tx.init(table))
    cube = js.IndexedSlices(jnp.ones((1, D, D)), jnp.array([1]), (V, D, D))
    tx = js.adafactor(min_dim_size_to_factor=1)
    with pytest.raises(ValueError, match=r"slices of a factored parameter of shape \(9, 3"):
        tx.update(cube, tx.init(jnp.ones((V, D, D))), jnp.ones((V, D, D)))


def test_complex_parameters_are_stepped_by_the_size_of_their_gradients():
    """If parameters and gradients are turned by one phase, so are the steps."""
    rng = np.random.default_rng(3)
    params, rows = rng_tree(rng), slices_of(rng, [5, 2, 5])
    ordering = ("ftrl", "proximal_adagrad")
    for name in ordering:
        tx = getattr(js, name)(0.1)
        with pytest.raises(TypeError, match=f"{name} orders numbers"):
            tx.apply(1j * params["w"], tx.init(1j * params["w"]), 1j * params["w"])
    # Optax's adadelta, and so ours, adds squares without their sizes.
    without = (*ordering, "adadelta", "sgd", "adamw", "lion")
    cases = [case for case in FIRST if case[0] not in without]

    def stepped(case, phase):
        tx, p = make(js, case[0], 0.1, case[1]), jax.tree.map(lambda x: x * phase, params)
        return tx.apply({"table": rows * phase, "w": p["w"]}, tx.init(p), p)[0]

    found = all_at_once({case[0]: functools.partial(stepped, case, 1j) for case in cases})
    wanted = all_at_once({case[0]: functools.partial(stepped, case, 1.0) for case in cases})
    assert_close(found, jax.tree.map(lambda x: x * 1j, wanted), rtol=1e-4)
