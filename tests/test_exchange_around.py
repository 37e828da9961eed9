"""What is done with tables split over devices and their gradients sends no table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, dense, fast_jit
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jslices as js
from jslices._proof.cost import cost_of

pytestmark = pytest.mark.filterwarnings("ignore::jslices.DensificationWarning")

V, D, B, L = 200_000, 4, 16, 4
RNG = np.random.default_rng(3)
TABLE = RNG.normal(size=(V, D)).astype(np.float32)
IDS = RNG.integers(0, V, (B, L)).astype(np.int32)
IDS[:2] = 3


def step_with(tx, table, ids, grad):
    return tx.apply(grad(table, ids), tx.init(table), table)


def two_micro_steps(table, ids, grad):
    shapes = jax.eval_shape(grad, table, ids)
    tx = js.optim.multi_steps(js.adam(0.1), 2, shapes)
    state = tx.init(table)
    table, state = tx.apply(grad(table, ids), state, table)
    table, state = tx.apply(grad(table, ids + 1), state, table)
    return table, state.inner_opt_state


def accumulated(table, ids, grad):
    batches = jnp.stack([ids, ids + 1])
    return js.accumulate_gradients(lambda ids: grad(table, ids), batches)


def sampled(loss):
    def run(table, ids, grad):
        def whole(table):
            options = {
                "num_sampled": 4,
                "num_classes": V,
                "num_true": L,
                "key": jax.random.key(0),
            }
            inputs = jnp.ones((len(ids), D))
            return loss(table, jnp.zeros(V), ids, inputs, **options).sum()

        return js.grad(whole, exchange=grad.exchange)(table)

    return run


def safely_with_default(table, ids, grad):
    def loss(table):
        return (js.safe_embedding_lookup_sparse(table, ids - 9, default_id=3) ** 2).sum()

    return js.grad(loss, exchange=grad.exchange)(table)


DONE = {
    "from_optax": lambda t, i, grad: step_with(js.from_optax(optax.adam(0.1)), t, i, grad),
    "multi_steps": two_micro_steps,
    "accumulate_gradients": accumulated,
    "coalesce": lambda t, i, grad: grad(t, i).coalesce(size=64),
    "project_rows": lambda t, i, grad: js.project_rows(t, grad(t, i), 1.0),
    "sparse_mask": lambda t, i, grad: js.sparse_mask(grad(t, i), np.arange(9)),
    "sampled softmax": sampled(js.sampled_softmax_loss),
    "nce": sampled(js.nce_loss),
    "safe bags with a default": safely_with_default,
    "array + slices": lambda t, i, grad: t + grad(t, i),
    "apply_slices": lambda t, i, grad: js.apply_slices(t, grad(t, i), "sub"),
    "scatter_nd_add": lambda t, i, grad: js.scatter_nd_add(t, i[..., None], 1.0),
    **{
        f"scatter_{op}": lambda t, i, grad, op=op: getattr(js, f"scatter_{op}")(t, i, 2.0)
        for op in ("update", "add", "sub", "mul", "div", "min", "max")
    },
    "scatter_add, float16": lambda t, i, grad: js.scatter_add(t.astype("float16"), i, 2.0),
}


def everything(names, exchange, table, ids):
    """What has those names, of one gradient, which is computed once."""

    def computed(table, ids):
        def loss(table):
            return (js.embedding_lookup_sparse(table, ids, combiner="sum") ** 2).sum()

        return js.grad(loss, exchange=exchange)(table)

    first = computed(table, ids)

    def grad(table, batch):
        return first if batch is ids else computed(table, batch)

    grad.exchange = exchange
    return {name: dense(DONE[name](table, ids, grad)) for name in names}


KEPT = [name for name in DONE if name not in ("coalesce", "sparse_mask")]
# Each with each kind of axes, and with two of the splits of ids.
RELATED = ["nce", "scatter_nd_add", "scatter_add, float16"]
RELATED += [f"scatter_{op}" for op in ("update", "sub", "div", "min", "max")]
FIRST = [name for name in DONE if name not in RELATED]
CASES = [
    ("Explicit", P("x"), FIRST[::2]),
    ("Explicit", P(None, "x"), FIRST[1::2]),
    ("Explicit", P(), RELATED),
    ("Auto", P(), FIRST[::2]),
    ("Auto", P("x"), FIRST[1::2]),
    ("Auto", P("x"), RELATED),
]


@functools.cache
def on_one_device(*names):
    run = functools.partial(everything, names, None)
    return fast_jit(run)(jnp.asarray(TABLE), jnp.asarray(IDS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, split, names",
    CASES,
    ids=lambda x: f"{len(x)} operations" if type(x) is list else str(x),
)
def test_no_table_is_sent(kind, split, names):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    mesh = jax.make_mesh(
        (4,), ("x",), axis_types=(getattr(AxisType, kind),), devices=jax.devices()[:4]
    )
    by_rows = NamedSharding(mesh, P("x"))
    table = jax.device_put(TABLE, by_rows)
    ids = jax.device_put(IDS, NamedSharding(mesh, split))
    room = 2.0 if split == P("x") else 4.0  # for all ids
    exchange = js.Exchange("x", "all_to_all", room) if kind == "Auto" else None
    with jax.set_mesh(mesh):
        run = functools.partial(everything, names, exchange)
        compiled = fast_jit(run).lower(table, ids).compile()
        found = compiled(table, ids)
    sent = cost_of(compiled).collectives
    assert max(x.nbytes for x in sent) < V // 4, sent  # not a byte for each row of a device
    for name, wanted in on_one_device(*names).items():
        assert_close(found[name], wanted, rtol=1e-4, atol=1e-4)
    for name in {*KEPT} & {*names}:
        for x in jax.tree.leaves(found[name]):
            assert x.ndim < 2 or x.sharding.is_equivalent_to(by_rows, 2), name
