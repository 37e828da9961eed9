"""from_optax: the transformation itself, on the touched rows."""

import contextlib
import functools
import inspect
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import all_at_once, assert_close, dense, fast_jit, slow_unless

import jslices as js
from jslices.testing import assert_in_place

V, D = 8, 3
RNG = np.random.default_rng(2)
SHAPES = {"table": (V, D), "w": (D,)}
PARAMS = {k: RNG.normal(size=shape).astype(np.float32) for k, shape in SHAPES.items()}
PARAMS = jax.device_put(PARAMS)
TRANSFORMATIONS = {
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1, weight_decay=0.1),
    "rmsprop": optax.rmsprop(0.1, momentum=0.9, centered=True),
    "lion": optax.lion(0.1),
    "partition": optax.partition(
        {"rows": optax.adam(0.1), "rest": optax.sgd(0.1, momentum=0.9)},
        {"table": "rows", "w": "rest"},
    ),
    "masked": optax.chain(
        optax.masked(optax.scale_by_adam(), {"table": True, "w": False}), optax.scale(-0.1)
    ),
    "chain": optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.01),
        optax.scale_by_schedule(optax.cosine_decay_schedule(-0.1, 10)),
    ),
}


def grads_of(rng, ids):
    values = rng.normal(size=(len(ids), D)).astype(np.float32)
    w = rng.normal(size=D).astype(np.float32)
    values, ids, w = jax.device_put((values, np.array(ids, np.int32), w))
    return {"table": js.IndexedSlices(values, ids, (V, D)), "w": w}


@functools.cache
def compiled_update(name):
    """The transformation's update on slices with ``len(EVERY_ROW)`` ids."""
    return fast_jit(js.from_optax(TRANSFORMATIONS[name]).update)


EVERY_ROW = [*range(V), 1, 1, V]


@pytest.mark.parametrize(
    "name",
    slow_unless([(x,) for x in TRANSFORMATIONS], lambda case: case[0] in ("adam", "chain")),
)
def test_equals_optax_on_rows_touched_each_step(name):
    rng = np.random.default_rng(3)
    tx, update = TRANSFORMATIONS[name], compiled_update(name)
    params, state = PARAMS, js.from_optax(tx).init(PARAMS)
    wanted, wanted_state = PARAMS, tx.init(PARAMS)
    apply, their_update = fast_jit(js.apply_updates), fast_jit(tx.update)
    for _ in range(3):
        grads = grads_of(rng, EVERY_ROW)
        updates, state = update(grads, state, params)
        params = apply(params, updates)
        updates, wanted_state = their_update(dense(grads), wanted_state, wanted)
        wanted = apply(wanted, updates)
    assert_close(params, wanted, rtol=1e-4, atol=1e-5)
    assert_close(state, wanted_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_untouched_rows_and_their_state_stay(name):
    rng, update = np.random.default_rng(4), compiled_update(name)
    state = js.from_optax(TRANSFORMATIONS[name]).init(PARAMS)
    _, state = update(grads_of(rng, EVERY_ROW), state, PARAMS)
    few = [5, 2, 5, *[V] * (len(EVERY_ROW) - 3)]
    updates, new = update(grads_of(rng, few), state, PARAMS)
    indices = np.asarray(updates["table"].indices)
    assert sorted(indices[indices < V]) == [2, 5] and indices.max() == V
    assert not np.asarray(updates["table"].values)[indices == V].any()
    rest = np.array([0, 1, 3, 4, 6, 7])
    state, new = jax.device_get((state, new))
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        if before.shape == (V, D):
            np.testing.assert_array_equal(before[rest], after[rest])


def test_without_jit():
    rng, name = np.random.default_rng(4), "adamw"
    tx, grads = js.from_optax(TRANSFORMATIONS[name]), grads_of(rng, EVERY_ROW)
    got = tx.update(grads, tx.init(PARAMS), PARAMS)
    assert_close(got, compiled_update(name)(grads, tx.init(PARAMS), PARAMS))


def test_without_sparse_leaves_it_is_the_transformation():
    tx = optax.adam(0.1)
    got = js.from_optax(tx).update(PARAMS, tx.init(PARAMS), PARAMS)
    assert_close(got, tx.update(PARAMS, tx.init(PARAMS), PARAMS))


def test_in_place():
    table = jax.ShapeDtypeStruct((200_000, 16), jnp.float32)
    tx = js.from_optax(optax.adam(0.1))

    def step(table, state, ids):
        grads = js.grad(lambda t: (t[ids] ** 2).sum())(table)
        updates, state = tx.update(grads, state, table)
        return js.apply_updates(table, updates), state

    state = jax.eval_shape(tx.init, table)
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    memory = assert_in_place(step, table, state, ids, donate_argnums=(0, 1))
    assert memory.temp_bytes < 200_000 * 16
    assert memory.alias_bytes >= 3 * 200_000 * 16 * 4


def sgd():
    return optax.sgd(0.1)


def squares(tree):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))


def every_other_step(step, **_):
    return step % 2 == 0


LABELS = {"table": "rows", "w": "rest"}
IS_TABLE = {"table": True, "w": False}
#: Every transformation of Optax: the arguments of those that are lifted.
LIFTED = {
    **dict.fromkeys(
        """
        adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad lion nadam nadamw
        novograd optimistic_adam optimistic_adam_v2 optimistic_gradient_descent radam
        rmsprop rprop scale_by_rprop sgd sign_sgd signum yogi contrib.acprop
        contrib.ademamix contrib.adopt contrib.madgrad contrib.scale_by_madgrad
        contrib.schedule_free_adamw contrib.schedule_free_sgd contrib.simplified_ademamix
        """.split(),
        (0.1,),
    ),
    **dict.fromkeys(
        """
        centralize identity keep_params_nonnegative normalize_by_update_norm polyak_sgd
        scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan scale_by_amsgrad
        scale_by_belief scale_by_factored_rms scale_by_lion scale_by_novograd
        scale_by_optimistic_gradient scale_by_polyak scale_by_radam scale_by_rms
        scale_by_rss scale_by_sign scale_by_stddev scale_by_yogi set_to_zero
        zero_nans contrib.cocob contrib.normalize contrib.reduce_on_plateau
        contrib.scale_by_acprop contrib.scale_by_ademamix contrib.scale_by_adopt
        contrib.scale_by_cocob contrib.scale_by_simplified_ademamix
        """.split(),
        (),
    ),
    "add_decayed_weights": (0.1,),
    "apply_if_finite": (optax.adam(0.1), 3),
    "chain": (optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "clip": (0.5,),
    "clip_by_global_norm": (0.5,),
    "conditionally_mask": (optax.adam(0.1), every_other_step),
    "conditionally_transform": (optax.adam(0.1), every_other_step),
    "ema": (0.9,),
    "freeze": (IS_TABLE,),
    "masked": (optax.adam(0.1), IS_TABLE),
    "multi_transform": ({"rows": optax.adam(0.1), "rest": sgd()}, LABELS),
    "named_chain": (("adam", optax.adam(0.1)),),
    "partition": ({"rows": optax.adam(0.1), "rest": sgd()}, LABELS),
    "scale": (0.1,),
    "scale_by_learning_rate": (0.1,),
    "scale_by_schedule": (optax.exponential_decay(0.1, 1, 0.5),),
    "selective_transform": (optax.adam(0.1), IS_TABLE),
    "snapshot": ("norm", squares),
    "stateless": (lambda updates, _: updates,),
    "stateless_with_tree_map": (lambda g, p: g * jnp.abs(p),),
    "trace": (0.9,),
    "with_extra_args_support": (optax.adam(0.1),),
    "contrib.schedule_free": (sgd(), 0.1),
    "contrib.split_real_and_imaginary": (optax.adam(0.1),),
}
KEY = jax.random.key(0)
#: Those that are refused: their arguments, and with which words.
ALL_ROWS = "in some steps it moves all rows"
REFUSED = {
    "adafactor": ((0.1,), "dim_as_value in clip_by_block_rms"),
    "adaptive_grad_clip": ((4.0,), "shape polymorphism"),
    "add_noise": ((1e-9, 0.5, KEY), "random_bits"),
    "apply_every": ((2,), ALL_ROWS),
    "clip_by_block_rms": ((1e9,), "dim_as_value in clip_by_block_rms"),
    "flatten": ((sgd(),), "reshape in flatten"),
    "fromage": ((0.1,), "reduce_sum in scale_by_trust_ratio"),
    "lamb": ((0.1,), "reduce_sum in scale_by_trust_ratio"),
    "lars": ((0.1,), "reduce_sum in scale_by_trust_ratio"),
    "lbfgs": ((), "missing"),
    "lookahead": ((sgd(), 2, 0.5), ALL_ROWS),
    "measure_with_ema": ((squares, 0.9), "another structure"),
    "monitor": (({"norm": squares},), "another structure"),
    "noisy_sgd": ((0.1, 0.01, 0.55, KEY), "random_bits"),
    "scale_by_backtracking_linesearch": ((5,), "missing"),
    "scale_by_distance_over_gradients": ((), "rows0"),
    "scale_by_lbfgs": ((), "an array of shape"),
    "scale_by_param_block_norm": ((), "reduce_sum"),
    "scale_by_param_block_rms": ((), "dim_as_value"),
    "scale_by_sm3": ((), "reduce_max in scale_by_sm3"),
    "scale_by_trust_ratio": ((), "reduce_sum in scale_by_trust_ratio"),
    "scale_by_zoom_linesearch": ((5,), "missing"),
    "sm3": ((0.1,), "reduce_max in scale_by_sm3"),
    "contrib.dadapt_adamw": ((), "reshape in dadapt_adamw"),
    "contrib.differentially_private_aggregate": ((1.0, 0.1, KEY), "batch dimension"),
    "contrib.dog": ((), "reduce_sum in scale_by_dog"),
    "contrib.dowg": ((), "reduce_sum in scale_by_dowg"),
    "contrib.dpsgd": ((0.1, 1.0, 0.1, 0), "batch dimension"),
    "contrib.galore": ((0.1,), "svd in scale_by_galore"),
    "contrib.hutchinson_estimator_diag_hessian": ((), "obj_fn"),
    "contrib.mechanize": ((sgd(),), "reduce_sum in mechanize"),
    "contrib.momo": ((), "reshape in momo"),
    "contrib.momo_adam": ((), "reshape in momo_adam"),
    "contrib.muon": ((0.1,), "reshape in"),
    "contrib.prodigy": ((), "reshape in prodigy"),
    "contrib.sam": ((sgd(), sgd()), ALL_ROWS),
    "contrib.scale_by_galore": ((), "svd in scale_by_galore"),
    "contrib.scale_by_muon": ((), "structure"),
    "contrib.sophia": ((0.1,), "obj_fn"),
}
#: They take optimizers of any kind, which decide.
AROUND = {"inject_hyperparams", "inject_stateful_hyperparams", "MultiSteps"}


def transformation(name, arguments):
    """The transformation of this name in Optax; None if this release has none."""
    try:
        make = operator.attrgetter(name)(optax)
    except AttributeError:
        return None
    if name == "selective_transform":
        return make(arguments[0], freeze_mask=arguments[1])
    return make(*arguments)


def test_every_transformation_of_optax_is_known():
    modules = {"": optax, "contrib.": optax.contrib}
    found = {
        prefix + name
        for prefix, module in modules.items()
        for name, x in vars(module).items()
        if inspect.isfunction(x)
        and not name.startswith("_")
        and "GradientTransformation" in str(inspect.signature(x).return_annotation)
    }
    assert len(found) > 80 and found <= {*LIFTED, *REFUSED, *AROUND}


def two_steps(tx):
    """From two gradients to the second updates and the state: the rows touched in both."""
    tx, rows = optax.with_extra_args_support(tx), np.array([1, 5])

    def touched(x):
        x = x.to_dense() if js.is_slices(x) else x
        return x[rows] if x.shape == (V, D) else x

    def run(warm, few):
        _, state = tx.update(warm, tx.init(PARAMS), PARAMS, value=jnp.ones(()))
        new = tx.update(few, state, PARAMS, value=jnp.ones(()))
        return js.tree.map(touched, new)

    return run


#: Unlike those of the other tests.
QUICK = "conditionally_mask normalize_by_update_norm"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")
@pytest.mark.parametrize(
    "names",
    [QUICK.split(), LIFTED],
    ids=["some", "all"],
)
def test_those_that_are_lifted_are_dense_optax_on_touched_rows(names):
    warm, few = grads_of(RNG, [*range(V), 1, 1]), grads_of(RNG, [5, 1, 5])
    ours, theirs = {}, {}
    for name, arguments in LIFTED.items():
        if (tx := transformation(name, arguments)) is not None:
            ours[name], theirs[name] = two_steps(js.from_optax(tx)), two_steps(tx)
            jax.eval_shape(ours[name], warm, few)  # refuses none
    some = [name for name in names if name in ours]
    got = all_at_once({name: ours[name] for name in some}, warm, few)
    wanted = all_at_once({name: theirs[name] for name in some}, dense(warm), dense(few))
    for name in some:
        assert_close(got[name], wanted[name], rtol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")
@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows_is_refused(name):
    arguments, words = REFUSED[name]
    tx = transformation(name, arguments)
    if tx is None:
        pytest.skip("not in this release of Optax")
    lifted, grads = js.from_optax(tx), grads_of(RNG, [1, 5])

    def update(grads, params):
        return lifted.update(grads, tx.init(params), params, value=jnp.ones(()))

    with pytest.raises(ValueError, match=rf"from_optax.*{words}") as caught:
        jax.eval_shape(update, grads, PARAMS)
    assert "sparse=False" in str(caught.value)


def stateless(update):
    return js.from_optax(optax.stateless(update))


#: Of the table, gradient and parameter: what mixes rows, or depends on how many there are.
MIXING = {
    "largest": lambda g, p: g / jnp.max(jnp.abs(g)),
    "others": lambda g, p: jnp.roll(p, 1, 0) * g,
    "parameters": lambda g, p: g * jnp.where(jnp.abs(p) > 1e9, p, 0).sum(),
    "height": lambda g, p: g / g.shape[0],
    "ones": lambda g, p: g / jnp.ones_like(g).sum(),
    "in a loop": lambda g, p: (
        g * jax.lax.fori_loop(0, 2, lambda i, x: x + jnp.ones_like(g).sum(), 0.0)
    ),
    "a row each": lambda g, p: g * jnp.arange(V, dtype=jnp.float32)[:, None],
    "branches": lambda g, p: jax.lax.cond(p.sum() > 1e9, lambda: g, lambda: 2 * g),
    "draws": lambda g, p: g + 1e-9 * jax.random.normal(KEY, (g.size,)).reshape(g.shape),
}


@pytest.mark.parametrize("name", MIXING)
def test_no_threshold_hides_what_mixes_rows(name):
    tx = stateless(lambda g, p: {**g, "table": MIXING[name](g["table"], p["table"])})
    with pytest.raises(ValueError, match="does not treat each row by itself"):
        jax.eval_shape(lambda g: tx.update(g, tx.init(PARAMS), PARAMS), grads_of(RNG, [1]))


def test_each_axis_that_numbers_rows_counts():
    """Of `[L, V, D]` dense Optax takes the mean over V as well."""
    layers = jnp.ones((2, V, D))
    grads = js.grad(lambda x: (x[0, [1, 5]] ** 2).sum())(layers)
    js.from_optax(optax.adam(0.1)).update(grads, optax.adam(0.1).init(layers), layers)
    for tx in (optax.centralize(), optax.stateless(lambda g, p: g / (g**2).sum((0, 1)))):
        with pytest.raises(ValueError, match="does not treat each row by itself"):
            js.from_optax(tx).update(grads, tx.init(layers), layers)


def test_a_chain_that_changes_its_states_structure_is_refused():
    tx, grads = js.optim.chain(optax.zero_nans(), js.sgd(0.1)), grads_of(RNG, [1])
    with pytest.raises(TypeError, match=r"another structure.*jslices.from_optax"):
        jax.eval_shape(lambda g: tx.update(g, tx.init(PARAMS)), grads)


EXACT = js.sgd(0.1, momentum=0.9, untouched="exact")
SOME = {"table": lambda rows: rows < 3, "w": None}


@pytest.mark.parametrize(
    ["link", "lazy"],
    [
        (js.from_optax(optax.add_decayed_weights(0.1)), True),
        (js.from_optax(optax.ema(0.9)), True),
        (js.from_optax(optax.scale_by_novograd()), True),
        (js.rmsprop(0.1), True),
        (js.lamb(0.1), True),
        (js.optim.freeze_rows(js.from_optax(optax.add_decayed_weights(0.1)), SOME), True),
        (js.optim.freeze_rows(js.optim.clip(1.0), SOME), False),
        (js.from_optax(optax.apply_if_finite(optax.clip(1.0), 3)), False),
        (js.from_optax(optax.contrib.reduce_on_plateau()), False),
        (js.optim.clip_by_global_norm(0.5), False),
        (js.optim.scale({"table": lambda rows: 1.0 / (1 + rows), "w": 1.0}), False),
    ],
)
def test_what_is_lazy_may_not_come_before_an_exact_optimizer(link, lazy):
    tx, grads = js.optim.chain(js.optim.clip(9.0), link, EXACT), grads_of(RNG, [1, 5])
    refused = pytest.raises(ValueError, match=r"steps that they miss: type .*adamw")
    for step in (tx.update, tx.apply):
        step = functools.partial(step, value=jnp.ones(()))
        with refused if lazy else contextlib.nullcontext():
            jax.eval_shape(lambda g, step=step: step(g, tx.init(PARAMS), PARAMS), grads)


@pytest.mark.slow
def test_an_exact_optimizer_after_adagrad_is_exact():
    """Which leaves rows without gradient as they are."""
    tx = js.optim.chain(js.from_optax(optax.adagrad(0.5)), EXACT)
    theirs = optax.chain(optax.adagrad(0.5), optax.sgd(0.1, momentum=0.9))

    def loss(params, ids):
        return ((params["table"][ids] - params["w"][None]) ** 2).sum()

    @fast_jit
    def train(params):
        state, other, wanted = tx.init(params), params, theirs.init(params)
        for ids in np.array([[1, 5], [2, 1], [7, 7], [5, 0]]):
            params, state, _ = js.train_step(loss, tx)(params, state, ids)
            grads = jax.grad(loss)(other, ids)
            updates, wanted = theirs.update(grads, wanted, other)
            other = optax.apply_updates(other, updates)
        return tx.flush(params, state)[0], other

    assert_close(*train(PARAMS))


def test_train_step_says_that_what_is_lifted_is_lazy():
    def step_of(tx):
        step = js.train_step(lambda p, ids: (p["table"][ids] ** 2).sum(), tx)
        return jax.eval_shape(step, PARAMS, tx.init(PARAMS), np.array([1, 2]))

    lifted = js.from_optax(optax.adam(0.1))
    for tx in (lifted, js.optim.chain(js.optim.clip(1.0), lifted)):
        with pytest.warns(UserWarning, match=r"from_optax.*lazy: .*untouched=\"exact\""):
            step_of(tx)
    step_of(js.from_optax(optax.adagrad(0.1)))  # no warning: no row misses anything


def test_extra_arguments_go_through():
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    grads = grads_of(RNG, [1, 1])

    @fast_jit
    def update(grads, value):
        return js.from_optax(tx).update(grads, tx.init(PARAMS), PARAMS, value=value)[0]

    updates, grads = update(grads, 1.0), dense(grads)
    assert_close(updates["table"], -np.float32(0.1) * np.asarray(grads["table"]))


def test_accumulation_is_refused():
    steps = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    tx = js.from_optax(optax.chain(optax.clip(1.0), steps))
    with pytest.raises(ValueError, match=r"MultiSteps: .*jslices.accumulate_gradients"):
        tx.update(grads_of(RNG, [1]), tx.init(PARAMS), PARAMS)


def test_errors():
    with pytest.raises(TypeError, match="wants an Optax transformation"):
        js.from_optax(0.1)
    tx = js.from_optax(optax.adam(0.1))
    grads = grads_of(RNG, [1])
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(grads, tx.init(PARAMS))
    by_row = js.from_optax(
        optax.GradientTransformation(lambda p: p["table"][:, 0], lambda g, s, p: (g, s))
    )
    with pytest.raises(ValueError, match=r"cannot tell the rows of a state array of shape"):
        by_row.update(grads, by_row.init(PARAMS), PARAMS)
