"""Parameters in boxes that name their axes: a state array names those that it has."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close

import jslices as js
from jslices.extend import register_box

V, D = 12, 4
IDS = jnp.array([1, 3, 1])
EXACT = js.adam(lambda count: 0.1 / (count + 1), untouched="exact")
OPTIMIZERS = {
    "exact": EXACT,
    "partial": js.partial_rowwise_adam(0.1),
    "rowwise": js.rowwise_adagrad(0.1),
    "factored": js.adafactor(0.1, min_dim_size_to_factor=1),
    "chain": js.optim.chain(js.optim.clip_by_global_norm(1.0), EXACT),
    "by_label": js.optim.partition(
        {"a": EXACT, "b": js.rowwise_adagrad(0.1)},
        lambda params: jax.tree.map(lambda x: "a" if x.ndim == 2 else "b", params),
    ),
    "average": js.optim.params_ema(EXACT, 0.99),
}
each_optimizer = pytest.mark.parametrize(
    "tx",
    [
        pytest.param(
            tx,
            id=name,
            marks=[pytest.mark.slow] * (name in ("chain", "average", "by_label")),
        )
        for name, tx in OPTIMIZERS.items()
    ],
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Named:
    """An array whose axes have names and sizes, which are in the structure of a tree."""

    array: jax.Array
    axes: tuple = dataclasses.field(metadata={"static": True})


register_box(Named, lambda box, left, a: Named(a, tuple(box.axes[i] for i in left)))


def arrays():
    return {"t": jnp.arange(V * D, dtype=jnp.float32).reshape(V, D), "w": jnp.ones(D)}


def loss_of(content):
    def loss(params, ids):
        t, w = (content(params[k]) for k in "tw")
        return ((t[ids] @ w - 1) ** 2).mean()

    return loss


def trained(loss, tx, params):
    state = tx.init(params)
    step = jax.jit(js.train_step(loss, tx))
    before = jax.tree.structure((params, state))
    for i in range(3):
        params, state, _ = step(params, state, IDS + i)
        assert jax.tree.structure((params, state)) == before
    params, state = tx.flush(params, state)
    assert jax.tree.structure((params, state)) == before
    return params, state


@each_optimizer
def test_registered_boxes(tx):
    axes = {"t": (("V", V), ("D", D)), "w": (("D", D),)}
    boxed = {k: Named(x, axes[k]) for k, x in arrays().items()}
    params, state = trained(loss_of(lambda x: x.array), tx, boxed)
    wanted = trained(loss_of(lambda x: x), tx, arrays())
    assert_close(*([*jax.tree.leaves(x)] for x in ((params, state), wanted)), rtol=1e-6)
    boxes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Named))
    boxes = [x for x in boxes if isinstance(x, Named) and hasattr(x.array, "shape")]
    assert boxes
    for box in boxes:
        sizes = tuple(size for _, size in box.axes)
        assert box.array.shape in (sizes, (1,))  # or a placeholder


def test_what_is_no_box_is_not_registered():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Plain:
        array: jax.Array

    params = {k: Plain(x) for k, x in arrays().items()}
    tx = OPTIMIZERS["rowwise"]
    _, state = trained(loss_of(lambda x: x.array), tx, params)
    assert state.sum_of_squares["t"].array.shape == (V,)


@pytest.mark.interop
@each_optimizer
def test_linen_in_parts_of_an_optimizer(tx):
    meta = pytest.importorskip("flax.core.meta")
    names = {"t": ("x", None), "w": (None,)}
    boxed = {k: meta.Partitioned(x, names[k]) for k, x in arrays().items()}
    params, _ = trained(loss_of(lambda x: x.value), tx, boxed)
    wanted, _ = trained(loss_of(lambda x: x), tx, arrays())
    assert_close(meta.unbox(params), wanted, rtol=1e-6)


# --- Flax NNX ---


def nnx_model(key="out_sharding", names=("x", None)):
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            self.t = nnx.Param(arrays()["t"], **{key: names})
            self.w = nnx.Param(arrays()["w"])

        def __call__(self, ids):
            return loss_of(lambda x: x[...])({"t": self.t, "w": self.w}, ids)

    return Model()


def auto_mesh():
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    return jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.interop
@each_optimizer
def test_an_nnx_optimizer_on_a_mesh(tx):
    nnx = pytest.importorskip("flax.nnx")
    mesh = auto_mesh()
    with jax.set_mesh(mesh):
        model = nnx_model()
        graph, states = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))
        shardings = nnx.get_named_sharding(states, mesh)
        pairs = zip(*map(jax.tree.leaves, (states, shardings)), strict=True)
        for x, sharding in pairs:
            assert len(sharding.spec) <= x.ndim
            if x.shape[:1] == (V,):
                assert sharding.spec == jax.P("x", *[None] * (x.ndim - 1))

        @functools.partial(jax.jit, out_shardings=shardings)
        def step(states, ids):
            model, optimizer = nnx.merge(graph, states)
            of_model, params, rest = nnx.split(model, nnx.Param, ...)
            loss = lambda p: nnx.merge(of_model, p, rest)(ids)  # noqa: E731
            one = js.train_step(loss, tx)
            params, state, _ = one(params, nnx.as_pure(optimizer.opt_state))
            nnx.update(model, params)
            nnx.update(optimizer.opt_state, nnx.state(state))
            return nnx.split((model, optimizer))[1]

        states = jax.device_put(states, shardings)
        for i in range(3):
            states = step(states, IDS + i)
        model, optimizer = nnx.merge(graph, states)
        assert model.t[...].sharding.spec == jax.P("x", None)
    wanted = arrays()
    wanted_state = tx.init(wanted)
    one = jax.jit(js.train_step(loss_of(lambda x: x), tx))
    for i in range(3):
        wanted, wanted_state, _ = one(wanted, wanted_state, IDS + i)
    wanted = tx.flush(wanted, wanted_state)
    done = tx.flush(*map(nnx.as_pure, (nnx.state(model, nnx.Param), optimizer.opt_state)))
    assert_close(*([*jax.tree.leaves(x)] for x in (done, wanted)), rtol=1e-4)


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore:.*deprecated, use 'out_sharding':DeprecationWarning")
@pytest.mark.parametrize("key", ["sharding", "sharding_names", "out_sharding"])
@pytest.mark.parametrize("names", [("x", None), ("x",), jax.P("x"), jax.P("x", None)])
def test_names_in_the_metadata_of_nnx(key, names):
    nnx = pytest.importorskip("flax.nnx")
    with jax.set_mesh(auto_mesh()):
        model = nnx_model(key, names)
        optimizer = nnx.Optimizer(model, js.rowwise_adagrad(1e-2), wrt=nnx.Param)
    spec = nnx.get_partition_spec(nnx.state(optimizer))["opt_state"]["sum_of_squares"]
    assert nnx.as_pure(spec) == nnx.State({"t": jax.P("x"), "w": jax.P()})


@pytest.mark.interop
def test_a_sharding_as_metadata_of_nnx():
    nnx = pytest.importorskip("flax.nnx")
    mesh = auto_mesh()
    sharding = jax.NamedSharding(mesh, jax.P(None, "x"))
    params = {"t": nnx.Param(arrays()["t"], out_sharding=sharding)}
    state = js.rowwise_adagrad(1e-2).init(params)
    assert state.sum_of_squares["t"].out_sharding == jax.NamedSharding(mesh, jax.P(None))


@pytest.mark.interop
def test_trees_in_boxes_of_nnx():
    nnx = pytest.importorskip("flax.nnx")
    params = nnx.Param(arrays(), tag="both")
    new, state = trained(
        lambda p, ids: loss_of(lambda x: x)(p.get_value(), ids), EXACT, params
    )
    wanted, _ = trained(loss_of(lambda x: x), EXACT, arrays())
    assert_close(new.get_value(), wanted, rtol=1e-6)
    assert state.mu.tag == "both"


def penzai_box(x, *names):
    nx = pytest.importorskip("penzai.pz").nx
    return nx.wrap(x).tag(*names)


def haliax_box(x, *names):
    hax = pytest.importorskip("haliax", exc_type=ImportError)
    return hax.named(x, tuple(map(hax.Axis, names, x.shape)))


def sizes_of(box):
    return tuple(axis.size for axis in box.axes)


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore")
@each_optimizer
@pytest.mark.parametrize(
    ["box", "content", "sizes"],
    [
        (penzai_box, lambda x: x.data_array, lambda x: (*x.named_axes.values(),)),
        (haliax_box, lambda x: x.array, sizes_of),
    ],
    ids=["penzai", "haliax"],
)
def test_named_arrays(box, content, sizes, tx):
    params = arrays()
    boxed = {"t": box(params["t"], "rows", "width"), "w": box(params["w"], "width")}
    kind = type(boxed["t"])
    new, state = trained(loss_of(content), tx, boxed)
    wanted, _ = trained(loss_of(lambda x: x), tx, arrays())
    assert_close({k: content(x) for k, x in new.items()}, wanted, rtol=1e-6)
    boxes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    boxes = [x for x in boxes if isinstance(x, kind)]
    assert boxes
    for x in boxes:
        assert sizes(x) == content(x).shape or content(x).shape == (1,)


@pytest.mark.interop
def test_axes_by_position_in_penzai():
    nx = pytest.importorskip("penzai.pz").nx
    table = nx.wrap(jnp.ones((V, D))).tag("rows", "width").untag("rows")
    table = table.with_positional_prefix()
    state = js.rowwise_adagrad(0.1).init(table)
    assert state.sum_of_squares.data_array.shape == (V,)
    assert dict(state.sum_of_squares.named_axes) == {}
    state.sum_of_squares.check_valid()
