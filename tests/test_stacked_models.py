"""Models whose tables stand in one array, read in scanned layers, by heads and levels."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import all_at_once, assert_close
from jax import lax

import jslices as js

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

L, V, D, K = 3, 40, 4, 5
RNG = np.random.default_rng(3)
IDS = jnp.asarray(RNG.integers(0, V, (2, K)))
LAYER_IDS = jnp.asarray(RNG.integers(0, V, (L, K)))


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


TABLES = normal(L, V, D)


def over_layers(f):
    """A loss that adds up what layers give, in a loop over their numbers."""
    return lambda p: lax.scan(lambda x, n: (x + f(p, n).sum(), None), 0.0, jnp.arange(L))[0]


# By name: loss, parameters, and the rows of each gradient that is slices.
MODELS = {}


def model(f):
    MODELS[f.__name__] = f
    return f


@model
def lookups():
    def loss(p, n):
        return js.embedding_lookup(p[n], IDS, mode="clip") ** 2

    return over_layers(loss), TABLES, {"": L * 2 * K}


@model
def bags():
    weights = jnp.arange(2.0 * K).reshape(2, K)

    def loss(p, n):
        rows = js.embedding_lookup_sparse(p[n], IDS, weights, combiner="mean")
        return jnp.tanh(rows) + js.embedding_lookup_sparse(p[n], IDS, combiner="max")

    return over_layers(loss), TABLES, {"": 2 * L * 2 * K}


@model
def sampled():
    inputs, labels = normal(K, D), LAYER_IDS[0][:, None]

    def loss(p, n):
        key = jax.random.fold_in(jax.random.key(0), n)
        return js.sampled_softmax_loss(p, jnp.zeros(V), labels, inputs, 4, V, key=key)

    def layers(p):
        return over_layers(lambda p, n: loss(p[n], n))(p)

    return layers, TABLES, {"": L * (K + 4)}


@model
def hash_grid():
    """Mueller et al. (2022): levels ``[2**12, 2]``; coordinates have gradients too."""
    levels, size = 16, 2**12
    params = {"grid": normal(levels, size, 2), "w": normal(levels * 2, 3)}
    params["x"] = jnp.asarray(RNG.uniform(size=(K, 2)), jnp.float32)
    corners = jnp.array([[0, 0], [0, 1], [1, 0], [1, 1]], jnp.uint32)
    primes = jnp.array([1, 2654435761], jnp.uint32)

    def level(table, resolution, x):
        at = x * resolution
        cell, inside = jnp.floor(at).astype(jnp.uint32), (at - jnp.floor(at))[:, None]
        a, b = jnp.moveaxis((cell[:, None] + corners) * primes, -1, 0)
        weights = jnp.where(corners == 1, inside, 1 - inside).prod(-1, keepdims=True)
        return (weights * table[(a ^ b) % size]).sum(1)

    def loss(p):
        resolutions = jnp.floor(16 * 1.4 ** jnp.arange(levels))
        features = jax.vmap(level, (0, 0, None), 1)(p["grid"], resolutions, p["x"])
        return (jnp.tanh(features.reshape(K, -1) @ p["w"]) ** 2).sum()

    return loss, params, {"['grid']": levels * 4 * K}


@model
def product_keys():
    """Lample et al. (2019): each layer and head has values ``[n * n, D]`` of its own."""
    heads, n, best = 2, 8, 3
    shapes = {"q": (D, 6), "one": (n, 3), "two": (n, 3), "values": (n * n, D)}
    params = {name: normal(L, heads, *shape) for name, shape in shapes.items()}

    def layer(x, p):
        queries = jnp.split(jnp.einsum("bd,hde->bhe", x, p["q"]), 2, -1)
        scores = [
            jnp.einsum("bhe,hne->bhn", q, p[k])
            for q, k in zip(queries, ("one", "two"), strict=True)
        ]
        (a, i), (b, j) = (lax.top_k(s, best) for s in scores)
        sums = (a[..., None] + b[..., None, :]).reshape(*a.shape[:2], -1)
        ids = (i[..., None] * n + j[..., None, :]).reshape(sums.shape)
        top, where = lax.top_k(sums, best)
        ids = jnp.take_along_axis(ids, where, -1)
        values = p["values"][jnp.arange(heads)[:, None], ids]
        return x + jnp.einsum("bhk,bhkd->bd", jax.nn.softmax(top), values), None

    x = normal(2, D)
    rows = L * heads * 2 * best
    return lambda p: (lax.scan(layer, x, p)[0] ** 2).sum(), params, {"['values']": rows}


@model
def per_layer_embeddings():
    """Gemma 3n: a vector for each token and layer, ``[V, L, D]``."""
    params = {"table": normal(V, L, D), "w": normal(L, D, D)}

    def loss(p):
        def layer(x, of_layer):
            w, table = of_layer
            return jnp.tanh(x @ w + table[IDS[0]]), None

        layers = p["w"], jnp.swapaxes(p["table"], 0, 1)
        return (lax.scan(layer, jnp.zeros((K, D)), layers)[0] ** 2).sum()

    return loss, params, {"['table']": L * K}


def nnx_layers():
    nnx = pytest.importorskip("flax.nnx")

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(V, D, rngs=rngs)
            self.mix = nnx.Linear(D, D, rngs=rngs)

        def __call__(self, x, ids):
            return jnp.tanh(self.mix(x) + self.embed(ids))

    make = nnx.split_rngs(splits=L)(nnx.vmap(Layer, in_axes=0, out_axes=0))
    graph, state = nnx.split(make(nnx.Rngs(0)))
    return nnx, lambda state: nnx.merge(graph, state), state


@model
def nnx_scan():
    nnx, merged, state = nnx_layers()

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def layers(x, layer):
        return layer(x, IDS[0])

    def loss(state):
        return (layers(jnp.zeros((K, D)), merged(state)) ** 2).sum()

    return loss, state, {"['embed']['embedding'].value": L * K}


@model
def nnx_vmap():
    nnx, merged, state = nnx_layers()
    heads = nnx.vmap(lambda layer, ids: layer(jnp.zeros((K, D)), ids), in_axes=(0, 0))

    def loss(state):
        return (heads(merged(state), LAYER_IDS) ** 2).sum()

    return loss, state, {"['embed']['embedding'].value": L * K}


@model
def linen_scan():
    nn = pytest.importorskip("flax.linen")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, ids):
            rows = nn.Embed(V, D, name="embed")(ids)
            return nn.tanh(nn.Dense(D, name="mix")(x) + rows), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            layers = nn.scan(
                nn.remat(Layer),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=L,
            )
            return layers(name="layers")(jnp.zeros((*ids.shape, D)), ids)[0]

    params = jax.jit(Model().init)(jax.random.key(0), IDS)
    path = "['params']['layers']['embed']['embedding']"
    return lambda p: (Model().apply(p, IDS) ** 2).sum(), params, {path: L * 2 * K}


def equinox_embeddings():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), L)
    embed = eqx.filter_vmap(lambda key: eqx.nn.Embedding(V, D, key=key))(keys)
    arrays, rest = eqx.partition(embed, eqx.is_array)
    return eqx, lambda arrays: eqx.combine(arrays, rest), arrays


@model
def equinox_scan():
    _, combined, arrays = equinox_embeddings()

    def layer(x, arrays):
        return jnp.tanh(x + jax.vmap(combined(arrays))(IDS[0])), None

    def loss(arrays):
        return (lax.scan(layer, jnp.zeros((K, D)), arrays)[0] ** 2).sum()

    return loss, arrays, {".weight": L * K}


@model
def equinox_vmap():
    eqx, combined, arrays = equinox_embeddings()
    heads = eqx.filter_vmap(lambda embed, ids: jax.vmap(embed)(ids))

    def loss(arrays):
        return (heads(combined(arrays), LAYER_IDS) ** 2).sum()

    return loss, arrays, {".weight": L * K}


@pytest.fixture(scope="module")
def results():
    """Values and gradients of all models, ours and JAX's, each compiled as one program."""
    losses, params, rows = {}, {}, {}
    for name, make in MODELS.items():
        try:
            losses[name], params[name], rows[name] = make()
        except pytest.skip.Exception:
            continue

    def each(value_and_grad):
        return {
            name: lambda params, name=name, f=f: value_and_grad(f)(params[name])
            for name, f in losses.items()
        }

    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("error", js.DensificationWarning)
        ours = all_at_once(each(js.value_and_grad), params)
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore", js.DensificationWarning)  # of our own lookups
        theirs = all_at_once(each(jax.value_and_grad), params)
    return ours, theirs, rows


@pytest.mark.parametrize("name", MODELS)
def test_a_stacked_model(name, results):
    ours, theirs, rows = results
    if name not in ours:
        pytest.skip("its library is not installed")
    leaves = js.tree.leaves_with_path(ours[name][1])
    slices = {jax.tree_util.keystr(path): x for path, x in leaves if js.is_slices(x)}
    assert {path: x.indices.size for path, x in slices.items()} == rows[name]
    assert all(x.row_axes == len(x.shape) - 1 for x in slices.values())
    assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
