"""Tables whose gradient under plain ``jax.grad`` is rows (jslices.experimental)."""

import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jslices as js

try:
    from jslices import experimental
except ImportError as error:
    pytestmark = pytest.mark.skip(f"no jax.experimental.hijax: {error}")

V, D = 9, 3
ARRAY = jnp.sin(jnp.arange(V * D, dtype=jnp.float32)).reshape(V, D)
IDS = jnp.array([3, 5, 3, -1, 12])
W = jnp.array([0.3, -0.5, 0.2])
BATCH = jnp.stack([IDS, IDS[::-1], IDS + 1])
ROOM = 40
KEY = jax.random.key(0)
#: What JAX's own gradients of lookups in loops, branches and loops with no end need.
WANTS_ROOM = ("scan", "nested_scan", "cond", "switch", "loop")


def table(room=None, array=ARRAY, **kwargs):
    return experimental.table(array + 0, room, **kwargs)


def _twice(t, w):
    return jnp.tanh(t[IDS] @ w).sum() ** 2 + (t[IDS[:2] - 1] @ w).sum()


def _scan(t, w):
    def body(c, ids):
        return 0.9 * c + jnp.sin(t[ids] @ w).sum(), None

    return jax.lax.scan(body, 0.0, BATCH)[0] + (t[2] * w).sum()


def _nested_scan(t, w):
    def body(c, ids):
        def inner(c, i):
            return (0.9 * c + jnp.sin(t[i] @ w), None)

        return jax.lax.scan(inner, c + (t[ids[0]] * w).sum(), ids)[0], None

    return jax.lax.scan(body, 0.0, BATCH)[0]


def _custom_vjp(t, w):
    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))
    return sine(t[IDS] @ w).sum()


def _custom_vjp_of_table(t, w):
    def pull(t, w):
        return jax.vjp(lambda t, w: jnp.sin(t[IDS] @ w), t, w)

    read = jax.custom_vjp(lambda t, w: jnp.sin(t[IDS] @ w))
    read.defvjp(lambda t, w: (pull(t, w)[0], (t, w)), lambda tw, g: pull(*tw)[1](g))
    return read(t, w).sum()


PROGRAMS = {
    "twice": _twice,
    "jit": lambda t, w: jax.jit(_twice)(t, w),
    "scan": _scan,
    "nested_scan": _nested_scan,
    "cond": lambda t, w: jax.lax.cond(
        w[0] > 0, lambda t: (t[IDS] @ w).sum(), lambda t: (t[0] * w).sum(), t
    ),
    "switch": lambda t, w: jax.lax.switch(
        2, [lambda t: (t[IDS] @ w).sum(), lambda t: w.sum(), lambda t: (t[1] * w).sum()], t
    ),
    "loop": lambda t, w: jax.lax.fori_loop(0, 3, lambda k, c: c + jnp.sin(t[k] @ w), 0.0),
    "checkpoint_after": lambda t, w: jax.checkpoint(
        lambda rows, w: jnp.tanh(rows @ w).sum(),
        policy=jax.checkpoint_policies.dots_saveable,
    )(t[IDS], w),
    "vmap": lambda t, w: jax.vmap(lambda i: jnp.tanh(t[i] @ w))(IDS).sum(),
    "custom_vjp": _custom_vjp,
    "custom_vjp_of_table": _custom_vjp_of_table,
    "none": lambda t, w: w.sum(),
    "stopped": lambda t, w: jax.lax.stop_gradient(t[IDS]).sum() * w.sum(),
}
FORMS = {
    "scalar": lambda t: t[4],
    "negative": lambda t: t[-2],
    "no ids": lambda t: t[jnp.zeros((0,), int)],
    "matrix": lambda t: t[BATCH],
    "uint8": lambda t: t[jnp.array([1, 200], jnp.uint8)],
    "slice": lambda t: t[1:8:3],
    "columns": lambda t: t[IDS, :2],
    "column": lambda t: t[IDS, 1],
    "dots": lambda t: t[IDS, ...],
    "at": lambda t: t.at[IDS].get(),
    "fill": lambda t: t.at[IDS].get(mode="fill", fill_value=2.0),
    "clip": lambda t: t.at[IDS].get(mode="clip"),
    "astype": lambda t: t.astype(jnp.bfloat16)[IDS].astype(jnp.float32),
    "lookup": lambda t: jnp.nan_to_num(js.embedding_lookup(t, IDS)),
    "lookup with options": lambda t: js.embedding_lookup(
        t, IDS, mode="clip", max_norm=0.5, padding_id=3
    ),
    "shards": lambda t: js.embedding_lookup([t, t], [0, 7, 3]),
    "bags": lambda t: js.embedding_lookup_sparse(t, BATCH % V, combiner="mean"),
    "whole": lambda t: getattr(t, "array", t),
}


def dense(grad):
    return grad.to_dense() if js.is_slices(grad) else grad


def assert_close(got, want, **kwargs):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(dense(x), y, atol=2e-6, **kwargs),
        got,
        want,
        is_leaf=js.is_slices,
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_jax_grad_gives_rows(name, compiled):
    f = PROGRAMS[name]
    want = jax.value_and_grad(f, (0, 1))(ARRAY, W)
    for room in (ROOM,) if name in WANTS_ROOM else (None, ROOM):
        grad = jax.value_and_grad(f, (0, 1))
        got = (jax.jit(grad) if compiled else grad)(table(room), W)
        assert js.is_slices(got[1][0]) and got[1][0].indices.shape[0] <= ROOM + 10
        assert_close(got, want)


@pytest.mark.filterwarnings("ignore::jslices.DensificationWarning")  # of the array
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_lookups(form):
    def f(t):
        return (jnp.sin(FORMS[form](t)) * 3).sum()

    grad = jax.jit(jax.grad(f))(table())
    assert_close((f(table()), grad), (f(ARRAY), jax.grad(f)(ARRAY)))
    assert_close(grad, dense(js.grad(f)(ARRAY)))


@dataclasses.dataclass
class RandomProgram:
    """A function of a table and weights, of lookups under transformations."""

    rng: np.random.Generator
    room: int = 0  #: how many entries the gradient has at most

    def function(self, depth, times=1):
        """A part of it, which runs so many times."""
        names = AROUND if depth else FORMS.keys() - {"astype"}  # of 8 bits
        name = self.rng.choice(sorted(names))
        if depth == 0:
            form, scale = FORMS[name], self.rng.normal()
            self.room += times * (30 if name in ("matrix", "bags") else 10)
            return lambda t, w: scale * jnp.tanh(form(t) * (1 + w[0])).sum()
        turns = 3 if name in ("scan", "vmap", "loop") else 1
        parts = [self.function(depth - 1, times * turns) for _ in range(2)]
        return lambda t, w: AROUND[name](*parts, t, w)


def _scan_of(f, g, t, w):
    def body(c, x):
        return jnp.tanh(c + f(t, w * x)), g(t, x * w)

    c, ys = jax.lax.scan(body, 0.0, jnp.arange(3.0))
    return c + ys.sum()


def _custom(f, g, t, w):
    def pull(t, w):
        return jax.vjp(lambda t, w: f(t, w) * g(t, w), t, w)

    fun = jax.custom_vjp(lambda t, w: f(t, w) * g(t, w))
    fun.defvjp(lambda t, w: (pull(t, w)[0], (t, w)), lambda tw, x: pull(*tw)[1](x))
    return fun(t, w)


AROUND = {
    "sum": lambda f, g, t, w: f(t, w) + jnp.sin(g(t, w)),
    "product": lambda f, g, t, w: jnp.sin(f(t, w)) * jnp.cos(g(t, w)),
    "jit": lambda f, g, t, w: jax.jit(lambda t, w: f(t, w) + g(t, w))(t, w),
    "scan": _scan_of,
    "loop": lambda f, g, t, w: jax.lax.fori_loop(
        0, 3, lambda k, c: jnp.tanh(c + f(t, w * k)), g(t, w)
    ),
    "cond": lambda f, g, t, w: jax.lax.cond(W[1] < 0, f, g, t, w),
    "vmap": lambda f, g, t, w: (
        jax.vmap(lambda s: f(t, s * w) * s)(jnp.arange(3.0)).sum() + g(t, w)
    ),
    "custom": _custom,
    "stopped": lambda f, g, t, w: f(t, w) * jax.lax.stop_gradient(g(t, w)),
}
LATER = [pytest.param(k, marks=pytest.mark.slow) for k in range(24, 300, 23)]


@pytest.mark.filterwarnings("ignore::jslices.DensificationWarning")
@pytest.mark.parametrize("first", [0, *LATER])
def test_random_programs(first):
    for seed in range(first, first + (24 if first == 0 else 23)):
        program = RandomProgram(np.random.default_rng(seed))
        f = program.function(seed % 3)
        got = jax.jit(jax.value_and_grad(f, (0, 1)))(table(program.room), W)
        assert js.is_slices(got[1][0])
        assert_close(got, jax.jit(jax.value_and_grad(f, (0, 1)))(ARRAY, W), rtol=2e-4)
        want = jax.jit(lambda *args, f=f: js.grad(f)(*args))(ARRAY, W)
        assert_close(got[1][0], dense(want), rtol=2e-4)


@pytest.mark.parametrize("room", [None, ROOM])
def test_other_derivatives(room):
    t, f = table(room), lambda t: _twice(t, W)
    slices = js.IndexedSlices(jnp.ones((3, D)), jnp.array([3, 3, 8]), (V, D))
    tangent, direction = experimental.like(slices, t), slices.to_dense()
    assert_close(jax.jvp(f, (t,), (tangent,)), jax.jvp(f, (ARRAY,), (direction,)))
    assert_close(
        jax.jit(lambda t, d: jax.linearize(f, t)[1](d))(t, tangent),
        jax.jvp(f, (ARRAY,), (direction,))[1],
    )
    assert_close(jax.vjp(f, t)[1](2.0)[0], 2 * jax.grad(f)(ARRAY))
    assert_close(
        jax.jvp(jax.grad(f), (t,), (tangent,))[1],
        jax.jvp(jax.grad(f), (ARRAY,), (direction,))[1],
    )

    def penalty(t):
        return (jax.grad(lambda w: _twice(t, w))(W) ** 2).sum()

    assert_close(jax.jit(jax.grad(penalty))(t), jax.grad(penalty)(ARRAY), rtol=1e-4)


@pytest.mark.parametrize("room", [None, ROOM])
def test_vmap(room):
    def f(t, ids):
        return jnp.tanh(t[ids] @ W).sum() + (t[ids[0]] * W).sum()

    each = jax.jit(jax.vmap(jax.grad(f), (None, 0)))(table(room), BATCH)
    assert each.shape == (3, V, D)
    assert_close(each, jax.vmap(jax.grad(f), (None, 0))(ARRAY, BATCH))
    arrays = jnp.stack([ARRAY, 2 * ARRAY, -ARRAY])
    tables = table(room, arrays)
    want = jax.vmap(jax.grad(f))(arrays, BATCH % V)
    assert_close(jax.vmap(jax.grad(f))(tables, BATCH % V), want)
    together = jax.grad(lambda t: jax.vmap(f)(t, BATCH % V).sum())
    assert_close(jax.jit(together)(table(room, arrays, row_axes=2)), want)
    pull = jax.vjp(lambda t: f(t, IDS), table(room))[1]
    assert_close(jax.vmap(pull)(jnp.ones(2))[0][1], jax.grad(f)(ARRAY, IDS))


def test_rows_of_two_axes():
    arrays = jnp.stack([ARRAY, 2 * ARRAY])

    def f(t):
        return jnp.sin(t[1, IDS]).sum() + jnp.cos(t[jnp.array([[0], [1]]), IDS[None]]).sum()

    assert_close(jax.grad(f)(table(None, arrays, row_axes=2)), jax.grad(f)(arrays))


def test_what_exceeds_the_room_is_not_dropped():
    def loop(t):
        return jax.lax.scan(lambda c, i: (c + t[i].sum(), None), 0.0, BATCH)[0]

    assert bool(js.all_finite(jax.jit(jax.grad(loop))(table(15))))
    for room in (5, 12):
        grad = jax.jit(jax.grad(loop))(table(room))
        assert not bool(js.all_finite(grad)) and np.isnan(grad.to_dense()).any()
    step = jax.jit(
        lambda t: js.sgd(0.1).apply(jax.grad(loop)(t), js.sgd(0.1).init(t), t)[0]
    )
    assert np.isnan(step(table(12)).array).any()
    with pytest.raises(ValueError, match=r"5 entries got a table with room=4: .*room=5"):
        jax.jit(jax.grad(lambda t: t[IDS].sum()))(table(4))
    with pytest.raises(TypeError, match="carry"):
        jax.grad(loop)(table())


def loss(params, ids):
    return (jnp.tanh(params["t"][ids] @ params["w"]) ** 2).sum()


def params_of(room=None):
    return {"t": table(room), "w": W + 0}


def trained(tx, grad, params, in_two=False, compiled=True):
    def step(params, state, ids):
        if tx is EXACT:
            params, state = tx.catch_up(params, state, {"t": ids, "w": None})
        grads = grad(loss)(params, ids)
        if not in_two:
            return tx.apply(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state

    state = tx.init(params)
    step = jax.jit(step, donate_argnums=(0, 1)) if compiled else step
    for shift in range(3):
        params, state = step(params, state, (IDS + shift) % V)
    return params, state


EXACT = js.adam(0.1, untouched="exact")
OPTIMIZERS = {
    "sgd": js.sgd(0.1),
    "adam": js.adam(0.1),
    "exact": EXACT,
    "rowwise": js.rowwise_adagrad(0.1),
    "chain": js.optim.chain(js.optim.clip_by_global_norm(0.1), js.adagrad(0.1)),
}


@pytest.mark.parametrize("in_two", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_tables(name, in_two):
    tx = OPTIMIZERS[name]
    want = trained(tx, js.grad, {"t": ARRAY + 0, "w": W + 0})
    for room, compiled in ((None, True), (ROOM, True), (None, False)):
        got = trained(tx, jax.grad, params_of(room), in_two, compiled)
        assert isinstance(got[0]["t"], experimental.Table)
        assert_close(experimental.arrays(got), want)


def test_optax():
    optax = pytest.importorskip("optax")
    tx = js.from_optax(optax.adam(0.1))
    want = trained(tx, js.grad, {"t": ARRAY + 0, "w": W + 0})
    assert_close(experimental.arrays(trained(tx, jax.grad, params_of())), want)
    tx, params = optax.chain(js.optim.clip_by_global_norm(0.1), js.adam(0.1)), params_of()
    updates, _ = jax.jit(tx.update)(jax.grad(loss)(params, IDS), tx.init(params), params)
    assert js.is_slices(updates["t"])
    want = js.apply_updates({"t": ARRAY, "w": W}, experimental.arrays(updates))
    for apply in (optax.apply_updates, jax.jit(optax.apply_updates)):
        assert_close(experimental.arrays(apply(params, updates)), want)


def test_a_step_is_in_place_and_has_no_dense_buffer():
    tx, height = js.adam(0.1), 10_000

    def step(params, state, ids):
        return tx.apply(jax.grad(loss)(params, ids), state, params)

    array = jnp.ones((height, D))
    params = {"t": experimental.table(array), "w": W}
    compiled = (
        jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), IDS).compile()
    )
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < array.nbytes / 10
    assert memory.alias_size_in_bytes > 3 * array.nbytes


def test_functions_of_gradients():
    grads, other = (
        jax.grad(loss)(params_of(), IDS),
        jax.jit(jax.grad(loss))(params_of(), IDS),
    )
    want = jax.grad(loss)({"t": ARRAY, "w": W}, IDS)

    @jax.jit
    def all_of_them(x, y):
        total = jax.tree.map(lambda a, b: 0.5 * a + b / 2 - b * jnp.float32(2), x, y)
        return js.global_norm(x), js.clip_by_global_norm(x, 0.1), total, js.all_finite(y)

    for norm, clipped, total, finite in (all_of_them(grads, other),):
        np.testing.assert_allclose(norm, js.global_norm(want), rtol=1e-6)
        assert_close(clipped, js.clip_by_global_norm(want, 0.1))
        assert_close(total, jax.tree.map(jnp.negative, want), rtol=1e-5)
        assert finite
    with pytest.raises(TypeError, match=r"type g1 \+ g2"):
        jax.jit(lambda x: jax.tree.map(jnp.sign, x))(grads)
    with pytest.raises(TypeError, match="room=") as error:
        jax.jit(lambda t: jax.grad(lambda t: t[IDS].sum())(t).values)(table())
    assert "jslices.explain" in str(error.value)
    values = jax.jit(lambda t: jax.grad(lambda t: t[IDS].sum())(t).values)(table(6))
    assert values.shape == (6, D)


def test_what_wants_the_whole_array_says_so():
    t = table()
    for f in (
        lambda t: t @ W,
        jnp.sum,
        lambda t: jnp.take(t, IDS, axis=0),
        lambda t: t.at[0].add(1),
    ):
        for run in (f, jax.jit(f), lambda t, f=f: jax.grad(lambda t: f(t).sum())(t)):
            with pytest.raises((TypeError, AttributeError), match=r"table\.array"):
                run(t)
    for key, text in ((None, "used whole"), ((IDS % V, IDS % D), r"\[\.\.\., columns\]")):
        with pytest.raises(js.DenseUseError, match=text):
            jax.grad(lambda t, key=key: t[key].sum())(t)
    explained = js.explain(lambda t: t[IDS].sum() + t.sum())
    assert explained(t) == explained(experimental.arrays(t))
    with pytest.raises(TypeError, match=r"int32\[3\]; leave it an array"):
        experimental.table(jnp.arange(3))
    for bad in ({"room": 0}, {"row_axes": 3}):
        with pytest.raises(ValueError, match=r"experimental\.table"):
            table(**bad)


def test_checkpoint():
    def f(t, w, **how):
        return jax.checkpoint(_twice, **how)(t, w) + _scan(t, w)

    policy = jax.checkpoint_policies.dots_saveable
    want = jax.grad(f, (0, 1))(ARRAY, W)
    with pytest.raises(NotImplementedError, match=r"jax\.checkpoint\(f\)\(table\[ids\]"):
        jax.grad(f)(table(ROOM), W)
    jax.config.update("jax_remat3", True)
    try:
        for how in ({}, {"policy": policy}):
            grad = jax.grad(lambda t, w, how=how: f(t, w, prevent_cse=False, **how), (0, 1))
            assert_close(grad(table(ROOM), W), want, rtol=1e-5)
            assert_close(jax.jit(grad)(table(ROOM), W), want, rtol=1e-5)
        with pytest.raises(NotImplementedError, match="prevent_cse=False"):
            jax.jit(jax.grad(f))(table(ROOM), W)
    finally:
        jax.config.update("jax_remat3", False)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [(), ("x",)])
def test_meshes(kind, spec):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    array = jnp.sin(jnp.arange(48.0)).reshape(16, 3)

    def lookups(params):
        return (jnp.tanh(js.embedding_lookup(params["t"], IDS, mode="clip") @ W)).sum()

    tx, want = js.adam(0.1), js.grad(lookups)({"t": array})["t"].to_dense()
    with jax.set_mesh(mesh):
        placed = jax.device_put(array, jax.NamedSharding(mesh, jax.P(*spec)))
        params = {"t": experimental.table(placed)}
        state = tx.init(params)

        @jax.jit
        def step(params, state):
            grads = jax.grad(lookups)(params)
            return grads, tx.apply(grads, state, params)[0]

        grads, params = step(params, state)
        assert_close(np.asarray(grads["t"].to_dense()), want)
        assert params["t"].sharding.is_equivalent_to(placed.sharding, 2)


def test_arrays_and_back(tmp_path):
    params = params_of(ROOM)
    saver = js.Saver()
    path = saver.save(experimental.arrays(params), str(tmp_path / "model"))
    restored = experimental.like(saver.restore(path, experimental.arrays(params)), params)
    assert restored["t"].room == ROOM
    assert_close(experimental.arrays(restored), {"t": ARRAY, "w": W})


def test_flax():
    nnx = pytest.importorskip("flax.nnx")

    class Embed(nnx.Embed):
        def __call__(self, ids):
            return self.embedding[...][ids]

    @nnx.jit
    def step(layer, optimizer):
        value, grads = nnx.value_and_grad(lambda m: jnp.tanh(m(IDS)).sum())(layer)
        optimizer.update(layer, grads)
        return value

    def trained(array):
        layer = Embed(V, D, rngs=nnx.Rngs(0))
        layer.embedding.set_value(array)
        optimizer = nnx.Optimizer(layer, js.adam(0.1), wrt=nnx.Param)
        return [step(layer, optimizer) for _ in range(2)], layer.embedding.get_value()

    values, embedding = trained(table())
    assert_close((values, embedding.array), trained(ARRAY))


def test_equinox():
    eqx = pytest.importorskip("equinox")
    tx = js.adam(0.1)

    @eqx.filter_jit
    def step(model, state):
        fun = eqx.filter_value_and_grad(lambda m: jnp.tanh(jax.vmap(m)(IDS % V)).sum())
        value, grads = fun(model)
        updates, state = tx.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, value

    def trained(array):
        model = eqx.tree_at(lambda m: m.weight, eqx.nn.Embedding(V, D, key=KEY), array)
        state = tx.init(eqx.filter(model, eqx.is_inexact_array))
        for _ in range(2):
            model, state, value = step(model, state)
        return value, model.weight

    value, weight = trained(table())
    assert_close((value, weight.array), trained(ARRAY))


def test_numpyro():
    numpyro = pytest.importorskip("numpyro")

    def trained(array):
        def model(ids):
            rows = numpyro.param("t", array)[ids]
            numpyro.sample("y", numpyro.distributions.Normal(rows @ W, 1.0), obs=1.0)

        tx = numpyro.optim.optax_to_numpyro(js.adam(0.1))
        svi = numpyro.infer.SVI(model, lambda ids: None, tx, numpyro.infer.Trace_ELBO())
        state = svi.init(KEY, IDS % V)
        for _ in range(2):
            state, value = jax.jit(svi.update)(state, IDS % V)
        return value, svi.get_params(state)["t"]

    value, params = trained(table())
    assert_close((value, params.array), trained(ARRAY))


def test_the_page():
    page = pathlib.Path(__file__).parent.parent / "docs" / "jax_grad.md"
    names, losses = {}, []
    ids, labels = jnp.array([7, 7, 3]), jnp.ones(3)
    for k, code in enumerate(page.read_text().split("```python\n")[1:3]):
        exec(code.split("```")[0], names)
        array = jnp.zeros((1_000_000, 64))
        params = {"table": array if k else experimental.table(array), "w": jnp.ones(64)}
        state = names["tx"].init(params)
        for _ in range(2):
            params, state, value = names["step"](params, state, ids, labels)
            losses.append(value)
    assert losses[1] < losses[0] and losses[2:] == losses[:2]


def test_it_loads_on_request_only():
    program = "import sys, jslices; print('jslices.experimental' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert run.stdout == b"False\n"
