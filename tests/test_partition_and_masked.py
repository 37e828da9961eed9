"""``js.optim.partition`` and ``masked``: Optax's on dense gradients, and rows as leaves."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, fast_jit, slow_unless

import jslices as js

V, D = 9, 3
RNG = np.random.default_rng(0)
PARAMS = {
    "table": RNG.normal(size=(V, D)).astype(np.float32),
    "mlp": {"w": RNG.normal(size=(D, 2)).astype(np.float32), "b": np.zeros(2, np.float32)},
}
PARAMS = jax.device_put(PARAMS)
IDS = np.array([[1, 7, 1, 2], [2, 2, 8, 0], [4, 1, 7, 7]])


def loss(params, ids):
    hidden = params["table"][ids] @ params["mlp"]["w"] + params["mlp"]["b"][None]
    return (hidden**2).mean()


grad = js.grad(loss)
grads_of = fast_jit(grad)
LABELS = {"table": "table", "mlp": "dense"}  # a prefix: of all that is in mlp
MASK = {"table": True, "mlp": {"w": False, "b": True}}
FORMS = {
    "prefix": LABELS,
    "tree": {"table": "table", "mlp": {"w": "dense", "b": "dense"}},
    "function": lambda params: jax.tree.map(
        lambda p: "table" if p.shape == (V, D) else "dense", params
    ),
    "function to a prefix": lambda params: LABELS,
}
INNER = {"table": js.adagrad(0.1), "dense": optax.adam(0.1)}
OPTAX = {"table": optax.adagrad(0.1), "dense": optax.adam(0.1)}


def train(tx, grad, way="update", steps=IDS):
    @fast_jit
    def step(params, state, ids):
        if hasattr(tx, "catch_up"):
            ids_of = {"table": ids, "mlp": None}
            ids_of["mlp"] = {"w": None, "b": None}
            params, state = tx.catch_up(params, state, ids_of)
        grads = grad(params, ids)
        if way == "apply":
            return tx.apply(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for ids in steps:
        params, state = step(params, state, ids)
    return params, state


@functools.cache
def by_optax(name):
    tx = optax.partition(OPTAX, LABELS)
    if name == "masked":
        tx = optax.chain(optax.masked(optax.clip(1e-3), MASK), optax.sgd(0.5))
    return train(tx, jax.grad(loss))


def key_paths(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


@pytest.mark.parametrize(
    "form, way", [*((form, "update") for form in FORMS), ("function", "apply")]
)
def test_partition_equals_that_of_optax(form, way):
    tx = js.optim.partition(INNER, FORMS[form])
    params, _ = train(tx, grad, way)
    assert_close(params, by_optax("partition")[0])


@pytest.mark.parametrize("way", ["update", "apply"])
@pytest.mark.parametrize("mask", [MASK, lambda params: MASK], ids=["tree", "function"])
def test_masked_equals_that_of_optax(mask, way):
    tx = js.optim.chain(js.optim.masked(js.optim.clip(1e-3), mask), js.sgd(0.5))
    params, _ = train(tx, grad, way)
    assert_close(params, by_optax("masked")[0])


def test_states_have_the_key_paths_and_leaves_of_optax():
    """So that whatever goes by key paths, such as a checkpoint, takes one for the other."""
    pairs = [
        (js.optim.partition(OPTAX, LABELS), optax.partition(OPTAX, LABELS)),
        (js.optim.masked(optax.adam(0.1), MASK), optax.masked(optax.adam(0.1), MASK)),
    ]
    grads = fast_jit(jax.grad(loss))(PARAMS, IDS[0])
    for ours, theirs in pairs:
        updates, state = fast_jit(ours.update)(grads, ours.init(PARAMS), PARAMS)
        wanted, wanted_state = fast_jit(theirs.update)(grads, theirs.init(PARAMS), PARAMS)
        assert_close(updates, wanted)
        assert key_paths(state) == key_paths(wanted_state)
        for x, y in zip(*map(jax.tree.leaves, (state, wanted_state)), strict=True):
            np.testing.assert_allclose(x, y, 1e-6)
        assert len(optax.tree.get_all_with_path(state, "count")) == 1
    assert isinstance(state, js.optim.MaskedState)
    assert state.inner_state[0].mu["mlp"]["w"] == js.optim.MaskedNode()


@pytest.mark.parametrize(
    "wrap, way",
    slow_unless(
        [
            ("partition", "update"),
            ("masked", "apply"),
            ("chain", "update"),
            ("multi_steps", "apply"),  # of a partition
        ],
        lambda case: case[0] in ("partition", "masked"),
    ),
)
def test_exact_rows_catch_up_inside(wrap, way):
    exact = js.sgd(0.1, momentum=0.9, untouched="exact")
    tx = js.optim.partition({"table": exact, "dense": js.adam(0.1)}, FORMS["function"])
    theirs = {"table": optax.sgd(0.1, momentum=0.9), "dense": optax.adam(0.1)}
    reference = optax.partition(theirs, LABELS)
    if wrap == "masked":
        tables = {"table": True, "mlp": False}
        tx = js.optim.masked(exact, tables)
        reference = optax.masked(theirs["table"], tables)
    elif wrap == "chain":
        tx = js.optim.chain(js.optim.clip(0.01), tx)
        reference = optax.chain(optax.clip(0.01), reference)
    elif wrap == "multi_steps":
        shapes = jax.eval_shape(grad, PARAMS, IDS[0])
        tx = js.optim.multi_steps(tx, 1, shapes)
    assert tx.catches_up
    params, state = train(tx, grad, way)
    late = np.asarray(params["table"])
    params, _ = fast_jit(tx.flush)(params, state)
    assert (late != np.asarray(params["table"])).any()
    wanted, _ = train(reference, jax.grad(loss))
    assert_close(params, wanted, rtol=1e-4, atol=1e-5)


SHAPES = jax.eval_shape(grad, PARAMS, IDS[0])
OUT = js.optim.MaskedNode()


@pytest.mark.parametrize(
    "untouched, way",
    slow_unless(
        [
            *((x, way) for x in ("lazy", "exact") for way in ("update", "apply")),
            ("exact", "train_step"),
        ],
        lambda case: case in [("lazy", "update"), ("exact", "train_step")],
    ),
)
def test_multi_steps_of_some_parameters(untouched, way):
    """As Optax's of them, on dense gradients; those of its dense parameters as well."""
    make = js.sgd if untouched == "lazy" else functools.partial(js.adam, untouched="exact")
    theirs = optax.sgd if untouched == "lazy" else optax.adam
    dense = optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation()
    table = optax.MultiSteps(theirs(0.1), 2).gradient_transformation()
    reference = optax.partition({"table": table, "dense": dense}, LABELS)
    steps = np.concatenate([IDS, IDS[::-1]])  # the last of which is a step of both
    wanted, _ = train(reference, jax.grad(loss), steps=steps)
    tx = js.optim.multi_steps(make(0.1), 2, SHAPES)
    tx = js.optim.partition({"table": tx, "dense": dense}, LABELS)
    if way == "train_step":
        step = fast_jit(js.train_step(loss, tx))
        params, state = PARAMS, tx.init(PARAMS)
        for ids in steps:
            params, state, _ = step(params, state, ids)
    else:
        params, state = train(tx, grad, way, steps)
    assert_close(tx.flush(params, state)[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "shapes",
    [SHAPES, {"table": SHAPES["table"], "mlp": {"w": OUT, "b": OUT}}],
    ids=["of all", "of its own"],
)
def test_multi_steps_in_a_mask(shapes):
    tables = {"table": True, "mlp": False}
    table = js.optim.masked(js.optim.multi_steps(js.sgd(0.1), 2, shapes), tables)
    state = table.init(PARAMS)
    assert state.inner_state.acc_grads["mlp"]["w"] == OUT
    plan = table.plan(SHAPES, PARAMS)
    assert plan["table"].entries == 8 and plan["mlp"]["w"] is None
    (params, state), (first, _) = (train(table, grad, steps=IDS[:n]) for n in (2, 1))
    np.testing.assert_array_equal(first["table"], PARAMS["table"])
    reference = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    wanted, _ = train(optax.masked(reference, tables), jax.grad(loss), steps=IDS[:2])
    assert_close(params, wanted)
    only = {"table": SHAPES["table"]}
    with pytest.raises(ValueError, match=r"multi_steps was made for gradients.*, got "):
        js.optim.multi_steps(js.sgd(0.1), 2, only).update(SHAPES, state.inner_state, PARAMS)


def test_inside_a_chain_of_optax_and_a_scan():
    tx = optax.chain(js.optim.partition(INNER, FORMS["function"]), optax.identity())

    @fast_jit
    def run(carry):
        def body(carry, ids):
            params, state = carry
            updates, state = tx.update(grad(params, ids), state, params)
            return (js.apply_updates(params, updates), state), None

        return jax.lax.scan(body, carry, IDS)[0]

    params, _ = run((PARAMS, tx.init(PARAMS)))
    assert_close(params, by_optax("partition")[0])


def test_without_parameters_none_gradients_and_untouched_leaves():
    tx = js.optim.partition({"table": js.sgd(1.0), "dense": js.sgd(0.5)}, FORMS["function"])
    grads = grads_of(PARAMS, IDS[0])
    updates, _ = tx.update(grads, tx.init(PARAMS))
    assert_close(updates["mlp"]["b"], np.float32(-0.5) * np.asarray(grads["mlp"]["b"]))
    assert js.is_slices(updates["table"])
    missing = {**grads, "mlp": {"w": None, "b": grads["mlp"]["b"]}}
    updates, _ = tx.update(missing, tx.init(PARAMS), PARAMS)
    assert updates["mlp"]["w"] is None
    with pytest.raises(
        ValueError, match=r"not every gradient .*tx.update\(grads, state, p"
    ):
        tx.update(missing, tx.init(PARAMS))
    # masked passes on what it leaves out, as it is; None stays None.
    tx = js.optim.masked(js.sgd(1.0), {"table": False, "mlp": True})
    updates, state = tx.update(missing, tx.init(PARAMS))
    assert updates["table"] is grads["table"] and updates["mlp"]["w"] is None
    params, _ = tx.apply(missing, state, PARAMS)
    assert_close(params["table"], js.apply_updates(PARAMS, grads)["table"])
    assert params["mlp"]["w"] is PARAMS["mlp"]["w"]
    # One array, None among the parameters, nothing at all.
    tx = js.optim.partition({"a": js.sgd(1.0)}, "a")
    assert tx.update(jnp.ones(2), tx.init(jnp.ones(2)))[0].tolist() == [-1, -1]
    pair = [None, jnp.ones(1)]
    assert tx.apply(pair, tx.init(pair), pair)[0] == [None, 0]
    assert tx.update({}, tx.init({}))[0] == {}


def test_extra_arguments_reach_those_who_take_them():
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(extra)
        return updates, state

    takes = optax.GradientTransformationExtraArgs(lambda params: (), update)
    inner = {"table": js.sgd(1.0), "dense": takes}
    grads, tags = grads_of(PARAMS, IDS[0]), jax.tree.map(np.ones_like, PARAMS)
    for also in (False, True):
        tx = js.optim.partition(inner, LABELS, mask_compatible_extra_args=also)
        tx.update(grads, tx.init(PARAMS), PARAMS, value=3.0, tags=tags)
        masked = {**tags, "table": js.optim.MaskedNode()}
        assert seen[-1]["value"] == 3.0
        chex.assert_trees_all_equal(seen[-1]["tags"], masked if also else tags)


def test_errors():
    with pytest.raises(TypeError, match=r"partition wants transformations .*, got 0.1"):
        js.optim.partition({"a": 0.1}, "a")
    with pytest.raises(TypeError, match=r"masked wants transformations .*, got 0.1"):
        js.optim.masked(0.1, True)
    tx = js.optim.partition(INNER, {"table": "rows", "mlp": {"w": "dense", "b": None}})
    wanted = r"one of \['table', 'dense'\] .* got None at \['mlp'\]\['b'\], 'rows' at \['ta"
    with pytest.raises(ValueError, match=wanted):
        tx.init(PARAMS)
    with pytest.raises(
        ValueError, match=r"masked\(mask=...\): wanted one of \[True, False"
    ):
        js.optim.masked(js.sgd(1.0), "no").init(PARAMS)
    tx = js.optim.partition(INNER, {"table": "table", "head": "dense"})
    with pytest.raises(ValueError, match=r"param_labels=...\) must have the structure of"):
        tx.init(PARAMS)
    exact = js.optim.masked(js.adam(0.1, untouched="exact"), True)
    late = js.optim.chain(exact, js.optim.clip(1.0))
    with pytest.raises(ValueError, match=r"last of a chain.*jslices.optim.partition"):
        late.apply(grads_of(PARAMS, IDS[0]), late.init(PARAMS), PARAMS)
    old = js.optim.partition(INNER, LABELS)
    with pytest.raises(ValueError, match=r"params, state = tx.apply\(grads, state, params"):
        old.apply(grads_of(PARAMS, IDS[0]), old.init(PARAMS), None)


def test_label_functions_of_optax_die_on_slices_and_ours_do_not():
    """Why these exist: should Optax come to take slices, say so in docs/optimizers.md."""
    tx = optax.partition(INNER, FORMS["function"])
    with pytest.raises(ValueError, match="different types at key path"):
        tx.update(grads_of(PARAMS, IDS[0]), tx.init(PARAMS), PARAMS)


def test_the_step_inside_is_explained():
    def loss(params, ids):
        return (params["table"][ids] @ params["w"]).sum()

    params = {"table": jnp.ones((9, 2)), "w": jnp.ones(2)}
    tx = js.optim.partition(
        {"rows": js.adam(0.1), "rest": optax.sgd(0.1)},
        {"table": "rows", "w": "rest"},
    )
    for each in (tx, js.optim.masked(js.adam(0.1), {"table": True, "w": False})):
        report = js.explain(loss, optimizer=each)(params, jnp.array([1, 2]))
        assert "2 entries are stepped" in str(report)


def test_modules_that_can_be_called_are_masks():
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        table: object
        bias: object

        def __call__(self, x):
            raise AssertionError("the model was called")

    params, mask = Model(jnp.ones((4, 2)), jnp.ones(3)), Model(True, False)
    for name in ("adamw", "lion", "lamb"):
        kwargs = {"weight_decay": 0.5, "mask": mask}
        txs = [getattr(module, name)(0.1, **kwargs) for module in (js, optax)]
        got, wanted = (tx.update(params, tx.init(params), params)[0] for tx in txs)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, wanted)
    masked = js.optim.masked(js.sgd(0.1), mask)
    assert (masked.update(params, masked.init(params), params)[0].bias == 1).all()
    loss = lambda model: model.table[jnp.array([1])].sum() + model.bias.sum()  # noqa: E731
    grads = js.grad(loss, sparse=Model(False, None))(params)
    assert not js.is_slices(grads.table)
