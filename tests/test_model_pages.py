"""The pages of docs/models: their code runs, and trains as the library does with Optax."""

import functools
import importlib
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close

import jslices as js

# The libraries' own; that a gradient is dense without need stays an error.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PAGES = pathlib.Path(__file__).parent.parent / "docs" / "models"
V, D = 50, 4
IDS = jnp.array([[1, 2], [3, 1], [7, 7]])
LABELS = jnp.ones((3, 1))
STEPS = 4
# Where rows without gradient do not move in Optax either.
OURS, THEIRS = js.adagrad(0.1), optax.adagrad(0.1)


@pytest.mark.parametrize(
    "page, library",
    [
        ("nnx.md", "flax.nnx"),
        ("linen.md", "flax.linen"),
        ("equinox.md", "equinox"),
        ("haiku.md", "haiku"),
    ],
)
def test_code_runs(page, library):
    pytest.importorskip(library)
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.M | re.S)
    assert len(blocks) >= 2
    names = {"__name__": "page"}
    with jax.numpy_rank_promotion("allow"):  # which the libraries rely on
        for block in blocks:
            exec(block, names)


def mean_square(out):
    return ((out - LABELS) ** 2).mean()


def check_equal(train):
    """``train(tx, value_and_grad)``, the values of some steps, is the same with both."""
    ours, theirs = train(OURS, js.value_and_grad), train(THEIRS, jax.value_and_grad)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert ours[-1] < ours[0]


def nnx_model(nnx, normed):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.words = nnx.Embed(V, D, rngs=rngs)
            self.out = nnx.Linear(D, 1, rngs=rngs)
            if normed:
                self.norm = nnx.BatchNorm(D, rngs=rngs)
                self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, ids):
            rows = self.words(ids).mean(1)
            return self.out(self.dropout(self.norm(rows)) if normed else rows)

    return Model(nnx.Rngs(0))


def test_nnx_optimizer():
    nnx = pytest.importorskip("flax.nnx")

    def train(tx, value_and_grad):
        model = nnx_model(nnx, normed=False)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @functools.partial(nnx.jit, donate_argnums=(0, 1))
        def step(model, optimizer, ids):
            value, grads = value_and_grad(lambda m: mean_square(m(ids)))(model)
            optimizer.update(model, grads)
            return value

        return [float(step(model, optimizer, IDS)) for _ in range(STEPS)]

    check_equal(train)


@pytest.mark.parametrize("rate", [0.1, lambda count: 0.1 / (count + 1)])
@pytest.mark.parametrize("together", [1, 4, None])
def test_exact_steps_of_an_nnx_optimizer(rate, together):
    """One step in a program, four, and by itself; dropout and means change the model."""
    nnx = pytest.importorskip("flax.nnx")
    loss = lambda model, ids: mean_square(model(ids))  # noqa: E731

    def train(tx, step):
        model = nnx_model(nnx, normed=True)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @functools.partial(nnx.jit, donate_argnums=(0, 1))
        def steps(model, optimizer, batches):
            return [step(model, optimizer, ids) for ids in batches]

        every = [(IDS + i) % V for i in range(8)]
        if not together and step is not dense:
            of_model = js.train_step(loss, optimizer)
            values = [float(of_model(model, ids)) for ids in every]
        else:
            size = together or 8
            parts = [every[i : i + size] for i in range(0, 8, size)]
            values = [float(x) for part in parts for x in steps(model, optimizer, part)]
        assert optimizer.step[...] == 8
        return values, model, optimizer

    def dense(model, optimizer, ids):
        by_params = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.Param))
        value, grads = by_params(model, ids)
        optimizer.update(model, grads)
        return value

    def exact(model, optimizer, ids):
        return js.train_step(loss, optimizer)(model, ids)

    wanted, other, _ = train(optax.adam(rate), dense)
    values, model, optimizer = train(js.adam(rate, untouched="exact"), exact)
    np.testing.assert_allclose(values, wanted, rtol=1e-5)
    assert bool((model.norm.mean[...] != 0).any())
    other.eval(), model.eval()
    value = js.eval_step(loss, optimizer)(model, IDS)
    np.testing.assert_allclose(value, loss(other, IDS), rtol=1e-5)
    if not together:
        with pytest.raises(TypeError, match="rows of this table may be behind"):
            model(IDS)


def test_states_of_nnx_that_cannot_be_stepped():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx_model(nnx, normed=False)
    graph, params = nnx.split(model, nnx.Param)

    def loss(params):
        return mean_square(nnx.merge(graph, params)(IDS))

    pure = nnx.as_pure(params)
    shapes = jax.eval_shape(js.grad(loss), pure)
    accumulating = js.optim.multi_steps(js.adam(0.1), 2, shapes)
    for tx, of in (
        (js.adam(0.1), lambda optimizer: nnx.state(optimizer)["opt_state"]),
        (js.adam(0.1, untouched="exact"), lambda optimizer: optimizer),
        (accumulating, lambda optimizer: optimizer.opt_state),
    ):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        with pytest.raises(TypeError, match=r"nnx\.as_pure\(optimizer\.opt_state\)"):
            js.train_step(loss, tx)(pure, of(optimizer))
    with pytest.raises(ValueError, match=r"pass it gradients of nnx\.as_pure\(params\)"):
        js.train_step(loss, accumulating)(params, accumulating.init(pure))


def test_nnx_models_with_other_state():
    """Keys, counts and running means go on, too."""
    nnx = pytest.importorskip("flax.nnx")
    means = []

    def train(tx, value_and_grad):
        model = nnx_model(nnx, normed=True)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        by = nnx.value_and_grad if value_and_grad is jax.value_and_grad else value_and_grad

        @nnx.jit
        def step(model, optimizer, ids):
            loss = lambda m, ids: mean_square(m(ids))  # noqa: E731
            value, grads = by(loss, argnums=nnx.DiffState(0, nnx.Param))(model, ids)
            optimizer.update(model, grads)
            return value

        values = [float(step(model, optimizer, IDS)) for _ in range(STEPS)]
        means.append(np.array(model.norm.mean[...]))
        return values

    with jax.numpy_rank_promotion("allow"):
        check_equal(train)
    np.testing.assert_allclose(*means, rtol=1e-5)


def test_nnx_states_of_several_models():
    """What is changed in a model stays so, whether it is differentiated or not.

    Without jit: :func:`test_nnx_models_given_whole`.
    """
    nnx = pytest.importorskip("flax.nnx")

    def loss(x, scale, y, ids):
        return scale * mean_square(x(ids) + y(ids)), {"mean": x(ids).mean()}

    def results(grad):
        x, y = (nnx_model(nnx, normed=True) for _ in range(2))
        of = nnx.All(nnx.Param, nnx.PathContains("words"))
        grads = nnx.jit(grad(loss, argnums=(nnx.DiffState(2, of), 1), has_aux=True))
        found = grads(x, 2.0, y, IDS)
        rest = nnx.filter_state(nnx.state([x, y]), nnx.Not(nnx.RngKey))
        return *found, rest

    with jax.numpy_rank_promotion("allow"):
        ours, theirs = results(js.grad), results(nnx.grad)
    assert js.is_slices(ours[0][0]["words"]["embedding"][...])
    assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_nnx_models_given_whole():
    """What cannot be differentiated is named; what would be lost is warned of."""
    nnx = pytest.importorskip("flax.nnx")
    model, loss = nnx_model(nnx, normed=True), lambda model: mean_square(model(IDS))
    with jax.numpy_rank_promotion("allow"):
        text = r"model.dropout.rngs.count.*uint32.*nnx.split\(model, nnx.Param, \.\.\.\)"
        with pytest.raises(TypeError, match=text):
            js.value_and_grad(loss)(model)
        with pytest.raises(TypeError, match="needs at least 6 positional arguments"):
            js.value_and_grad(loss, argnums=nnx.DiffState(5, nnx.Param))(model)
        with pytest.raises(TypeError, match=r"here split the model, graph, params, rest"):
            js.explain(loss, argnums=nnx.DiffState(0, nnx.Param))(model)
        norm, loss = model.norm, lambda norm: mean_square(norm(jnp.ones((3, D))))
        with pytest.warns(UserWarning, match=r"changes norm.mean.*DiffState\(0"):
            js.value_and_grad(loss)(norm)
        before = norm.mean[...]
        js.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.Param))(norm)
        assert (norm.mean[...] != before).all()
        norm.eval()
        js.value_and_grad(loss)(norm)  # changes nothing, and triggers no warning


def test_nnx_in_place():
    """With donation nothing of a table's size is copied; without it all of them are."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx_model(nnx, normed=False)
    optimizer = nnx.Optimizer(model, js.adam(0.1), wrt=nnx.Param)

    def step(model, optimizer, ids):
        by = js.value_and_grad(lambda m: mean_square(m(ids)), nnx.DiffState(0, nnx.Param))
        value, grads = by(model)
        optimizer.update(model, grads)
        return value

    table = V * D * 4
    for donated, copied in (((0, 1), 0), ((), 3)):
        lowered = nnx.jit(step, donate_argnums=donated).lower(model, optimizer, IDS)
        memory = lowered.compile().memory_analysis()
        fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
        assert copied * table <= fresh < (copied + 0.5) * table


@pytest.mark.parametrize("make", [js.train_step, js.eval_step])
def test_an_nnx_step_made_anew_in_each_turn_is_told(make, monkeypatch):
    nnx = pytest.importorskip("flax.nnx")
    monkeypatch.setattr("jslices._place.hints.hinted", set())
    model = nnx_model(nnx, normed=False)
    optimizer = nnx.Optimizer(model, js.sgd(0.1), wrt=nnx.Param)
    with pytest.warns(js.PerformanceHint, match=r"made anew for each call.*3 times"):
        for _ in range(3):
            make(lambda m, ids: mean_square(m(ids)), optimizer)(model, IDS)


def test_nnx_explain():
    nnx = pytest.importorskip("flax.nnx")
    graph, params = nnx.split(nnx_model(nnx, normed=False))
    report = js.explain(lambda p: mean_square(nnx.merge(graph, p)(IDS)))(params)
    assert "sparse" in str(report) and "words" in str(report)


def test_linen_train_state():
    nn = pytest.importorskip("flax.linen")
    train_state = importlib.import_module("flax.training.train_state")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            return nn.Dense(1)(nn.Embed(V, D)(ids).mean(1))

    def train(tx, value_and_grad):
        model = Model()
        state = train_state.TrainState.create(
            apply_fn=model.apply, params=model.init(jax.random.key(0), IDS), tx=tx
        )

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, ids):
            loss = lambda params: mean_square(state.apply_fn(params, ids))  # noqa: E731
            value, grads = value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), value

        values = []
        for _ in range(STEPS):
            state, value = step(state, IDS)
            values.append(float(value))
        assert state.step == STEPS
        return values

    with jax.numpy_rank_promotion("allow"):
        check_equal(train)


@pytest.fixture
def equinox_model():
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        words: eqx.nn.Embedding
        mlp: eqx.nn.MLP

        def __call__(self, ids):
            return self.mlp(jax.vmap(self.words)(ids).mean(0))

    key = jax.random.key(0)
    model = Model(eqx.nn.Embedding(V, D, key=key), eqx.nn.MLP(D, 1, 8, 1, key=key))
    return eqx, model


def test_equinox(equinox_model):
    eqx, model = equinox_model

    def train(tx, value_and_grad):
        params, rest = eqx.partition(jax.tree.map(lambda x: x, model), eqx.is_inexact_array)

        @eqx.filter_jit
        def step(params, state, ids):
            loss = lambda p: mean_square(jax.vmap(eqx.combine(p, rest))(ids))  # noqa: E731
            value, grads = value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            return js.apply_updates(params, updates), state, value

        state, values = tx.init(params), []
        for _ in range(STEPS):
            params, state, value = step(params, state, IDS)
            values.append(float(value))
        return values

    check_equal(train)


def test_equinox_says_to_split_and_keeps_states(equinox_model, tmp_path):
    eqx, model = equinox_model
    with pytest.raises(TypeError, match=r"m.mlp.activation, .*eqx.partition"):
        js.grad(lambda m: mean_square(jax.vmap(m)(IDS)))(model)
    state = js.adam(0.1, untouched="exact").init(eqx.filter(model, eqx.is_inexact_array))
    state = jax.tree.map(lambda x: x + 1, state)
    eqx.tree_serialise_leaves(tmp_path / "state", state)
    zeros = jax.tree.map(jnp.zeros_like, state)
    again = eqx.tree_deserialise_leaves(tmp_path / "state", zeros)
    jax.tree.map(np.testing.assert_array_equal, again, state)


def test_haiku_with_the_lines_of_optax():
    hk = pytest.importorskip("haiku")
    forward = lambda ids: hk.Linear(1)(hk.Embed(V, D)(ids).mean(1))  # noqa: E731
    model = hk.without_apply_rng(hk.transform(forward))

    def train(tx, value_and_grad):
        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, ids):
            loss = lambda p: mean_square(model.apply(p, ids))  # noqa: E731
            value, grads = value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        params = model.init(jax.random.key(0), IDS)
        state, values = tx.init(params), []
        for _ in range(STEPS):
            params, state, value = step(params, state, IDS)
            values.append(float(value))
        return values

    with jax.numpy_rank_promotion("allow"):
        check_equal(train)


@pytest.mark.parametrize("kind", ["model", "optimizer"])
@pytest.mark.filterwarnings("ignore")
def test_nnx_through_orbax(kind, tmp_path):
    nnx = pytest.importorskip("flax.nnx")
    ocp = pytest.importorskip("orbax.checkpoint")
    model = nnx_model(nnx, normed=True)
    optimizer = nnx.Optimizer(model, js.adam(0.1, untouched="exact"), wrt=nnx.Param)
    state = nnx.state(model if kind == "model" else optimizer)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "1", jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        )
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert a.dtype == b.dtype and bool((a == b).all())


@pytest.mark.parametrize(
    "tx",
    [
        js.adam(lambda count: 0.1 / (count + 1), untouched="exact"),
        js.partial_rowwise_adam(0.1),
        js.rowwise_adagrad(0.1),
        js.adafactor(0.1, min_dim_size_to_factor=1),
        js.adafactor(0.1),
    ],
    ids=["exact", "partial", "rowwise", "factored", "whole"],
)
def test_state_of_boxed_parameters_names_the_axes_it_has(tx):
    nn = pytest.importorskip("flax.linen")
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    box = functools.partial(nn.with_partitioning, lambda key, shape: jnp.ones(shape))
    names = {"t": ("x", "y"), "square": ("x", "y"), "b": ("x",)}
    shapes = {"t": (V - 2, D), "square": (D, D), "b": (D,)}
    params = {k: box(names[k])(None, shapes[k]) for k in names}

    def loss(params, ids):
        p = nn.meta.unbox(params)
        return ((p["t"][ids] @ p["square"] + p["b"][None]) ** 2).mean()

    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = nn.get_partition_spec(jax.eval_shape(tx.init, params))
    is_spec = lambda x: isinstance(x, jax.P)  # noqa: E731
    split = jax.tree.map(lambda x: jax.NamedSharding(mesh, x), specs, is_leaf=is_spec)
    state = jax.jit(tx.init, out_shardings=split)(params)
    for x in jax.tree.leaves(state):
        assert len(x.sharding.spec) <= x.ndim
    if hasattr(specs, "v_row"):
        factored = specs.v == dict.fromkeys(names, jax.P()) | {"b": jax.P("x")}
        rows, columns = (jax.P("y"), jax.P("x")) if factored else (jax.P(), jax.P())
        assert (specs.v_row["t"], specs.v_col["t"]) == (rows, columns)
        assert (specs.v_row["square"], specs.v_col["square"]) == (columns, rows)
    else:
        numbers = specs.sum_of_squares if hasattr(specs, "sum_of_squares") else specs.nu
        numbers = specs.clock.last if tx.catches_up else numbers
        assert numbers["t"] == numbers["b"] == jax.P("x")

    step = jax.jit(js.train_step(loss, tx))
    new, new_state, _ = step(params, state, jnp.array([1, 3]))
    new, new_state = tx.flush(new, new_state)
    for x, y in ((new, params), (new_state, state)):
        assert jax.tree.structure(x) == jax.tree.structure(y)
    bare = nn.meta.unbox(params)
    wanted, _, _ = step(bare, tx.init(bare), jnp.array([1, 3]))
    assert_close(nn.meta.unbox(new), wanted, rtol=1e-5)
