"""Models of other libraries, written without knowing of jslices, give row gradients."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, fast_jit
from jax import lax

import jslices as js

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

V, D = 11, 4
IDS = jnp.array([[3, 0, 3], [10, 7, 0]])


def sparse_paths(grads):
    """The names of the arrays whose gradients are slices."""
    leaves = jax.tree_util.tree_leaves_with_path(grads, is_leaf=js.is_slices)
    return {jax.tree_util.keystr(p) for p, leaf in leaves if js.is_slices(leaf)}


def check(loss, params, *args, sparse, rtol=1e-5):
    """The gradients, which are rows for exactly the named arrays, and right; no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", js.DensificationWarning)
        found = fast_jit(js.value_and_grad(loss))(params, *args)
    assert sparse_paths(found[1]) == set(sparse)
    wanted = fast_jit(jax.value_and_grad(loss))(params, *args)
    assert_close(found, wanted, rtol=rtol, atol=1e-5)
    return found[1]


@pytest.mark.interop
class TestFlaxLinen:
    @pytest.fixture(autouse=True)
    def _library(self):
        self.nn = pytest.importorskip("flax.linen")

    def init_and_loss(self, model):
        params = fast_jit(model.init)(jax.random.key(0), IDS)
        return params, lambda p, ids: (model.apply(p, ids).astype(jnp.float32) ** 2).sum()

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_embed(self, dtype):
        nn = self.nn

        class Model(nn.Module):
            @nn.compact
            def __call__(self, ids):
                rows = nn.Embed(V, D, dtype=dtype, name="embed")(ids)
                return nn.Dense(2, dtype=dtype)(rows)

        params, loss = self.init_and_loss(Model())
        path = "['params']['embed']['embedding']"
        check(
            loss, params, IDS, sparse=[path], rtol=2e-2 if dtype == jnp.bfloat16 else 1e-5
        )

    @pytest.mark.parametrize("remat", [False, True])
    def test_in_a_recurrent_network(self, remat):
        nn = self.nn
        embed = nn.remat(nn.Embed) if remat else nn.Embed

        class Cell(nn.Module):
            @nn.compact
            def __call__(self, carry, ids):
                rows = embed(V, D, name="embed")(ids)
                carry = nn.tanh(nn.Dense(D, name="mix")(carry + rows))
                return carry, carry

        class Model(nn.Module):
            @nn.compact
            def __call__(self, ids):
                scan = nn.scan(
                    Cell,
                    variable_broadcast="params",
                    split_rngs={"params": False},
                    in_axes=1,
                    out_axes=1,
                )
                return scan(name="cell")(jnp.zeros((ids.shape[0], D)), ids)[1]

        params, loss = self.init_and_loss(Model())
        check(loss, params, IDS, sparse=["['params']['cell']['embed']['embedding']"])

    def test_embedding_before_an_rnn(self):
        nn = self.nn

        class Model(nn.Module):
            @nn.compact
            def __call__(self, ids):
                return nn.RNN(nn.GRUCell(D))(nn.Embed(V, D, name="embed")(ids))

        params, loss = self.init_and_loss(Model())
        check(loss, params, IDS, sparse=["['params']['embed']['embedding']"])

    def test_tied_weights_are_dense_with_one_warning_at_the_users_line(self):
        nn = self.nn

        class Model(nn.Module):
            def setup(self):
                self.embed = nn.Embed(9000, D)

            def __call__(self, ids):
                rows = self.embed(ids)
                return self.embed.attend(rows)  # the dense use

        params, loss = self.init_and_loss(Model())
        with pytest.warns(js.DensificationWarning) as caught:
            grads = fast_jit(js.grad(loss))(params, IDS)
        assert len(caught) == 1 and caught[0].filename == __file__
        assert "self.embed.attend(rows)  # the dense use" in str(caught[0].message)
        assert_close(grads, fast_jit(jax.grad(loss))(params, IDS))


@pytest.mark.interop
class TestFlaxNnx:
    def test_split_and_merge(self):
        nnx = pytest.importorskip("flax.nnx")

        class Model(nnx.Module):
            def __init__(self, rngs):
                self.embed = nnx.Embed(V, D, rngs=rngs)
                self.out = nnx.Linear(D, 2, rngs=rngs)

            def __call__(self, ids):
                return self.out(self.embed(ids))

        graph, state = nnx.split(Model(nnx.Rngs(0)))

        def loss(state, ids):
            return (nnx.merge(graph, state)(ids) ** 2).sum()

        grads = fast_jit(js.grad(loss))(state, IDS)
        (path,) = sparse_paths(grads)
        assert "embed" in path
        assert_close(grads, fast_jit(jax.grad(loss))(state, IDS))


@pytest.mark.interop
class TestEquinox:
    @pytest.fixture(autouse=True)
    def _library(self):
        self.eqx = pytest.importorskip("equinox")

    @pytest.mark.parametrize("ids", [IDS[0], IDS], ids=["one_vmap", "two_vmaps"])
    def test_embedding_under_vmap(self, ids):
        eqx = self.eqx
        key = jax.random.key(0)
        model = {
            "embed": eqx.nn.Embedding(V, D, key=key),
            "out": eqx.nn.Linear(D, 2, key=key),
        }
        arrays, rest = eqx.partition(model, eqx.is_array)

        def loss(arrays, ids):
            model = eqx.combine(arrays, rest)
            one = lambda i: model["out"](model["embed"](i))  # noqa: E731
            for _ in range(ids.ndim):
                one = jax.vmap(one)
            return (one(ids) ** 2).sum()

        check(loss, arrays, ids, sparse=["['embed'].weight"])

    def test_filter_jit(self):
        eqx = self.eqx
        embed = eqx.nn.Embedding(V, D, key=jax.random.key(0))

        @eqx.filter_jit
        def grads(embed, ids):
            return js.grad(lambda e: (jax.vmap(e)(ids) ** 2).sum())(embed)

        slices = grads(embed, IDS[0]).weight
        np.testing.assert_array_equal(slices.indices, IDS[0])


@pytest.mark.interop
class TestHaiku:
    @pytest.mark.parametrize("inside_scan", [False, True])
    def test_embed(self, inside_scan):
        hk = pytest.importorskip("haiku")

        def forward(ids):
            embed = hk.Embed(V, D, lookup_style="ARRAY_INDEX")
            if not inside_scan:
                return hk.Linear(2)(embed(ids))
            embed(ids)  # makes the parameters, outside the loop
            return hk.scan(lambda c, i: (c + embed(i).sum(), c), 0.0, ids.reshape(-1))[1]

        model = hk.without_apply_rng(hk.transform(forward))
        params = fast_jit(model.init)(jax.random.key(0), IDS)
        loss = lambda p, ids: (model.apply(p, ids) ** 2).sum()  # noqa: E731
        check(loss, params, IDS, sparse=["['embed']['embeddings']"], rtol=1e-4)


def test_rows_of_any_rank_and_several_tables():
    rng = np.random.default_rng(0)
    params = {
        "bias": jnp.asarray(rng.normal(size=V), jnp.float32),
        "table": jnp.asarray(rng.normal(size=(V, D)), jnp.float32),
        "matrices": jnp.asarray(rng.normal(size=(V, D, 2)), jnp.float32),
    }

    def loss(params, ids):
        def inner(carry, i):
            row = params["table"][i] @ params["matrices"][i]
            return carry + row.sum() * params["bias"][i], None

        def outer(carry, i):
            return lax.scan(inner, carry, ids[0])[0] + params["table"][i].sum(), None

        return lax.scan(outer, jnp.float32(0), ids[1])[0] ** 2

    sparse = ["['bias']", "['matrices']", "['table']"]
    grads = check(loss, params, IDS, sparse=sparse, rtol=1e-4)
    assert grads["table"].indices.shape == (3 * 3 + 3,)
    assert grads["matrices"].values.shape == (9, D, 2)


def test_a_factorization_machine_over_a_sparse_matrix():
    """Rendle (2010), of BCOO features; their values are differentiated as well."""
    from jax.experimental import sparse

    rng = np.random.default_rng(1)
    shapes = {"weights": (V,), "factors": (V, D)}
    params = {k: jnp.asarray(rng.normal(size=n), jnp.float32) for k, n in shapes.items()}
    params["values"] = jnp.asarray(rng.normal(size=6), jnp.float32)
    indices = jnp.array([[1, 2], [0, 7], [1, 2], [0, 10], [2, 0], [3, V]])  # the last pads

    def loss(params, indices):
        x = sparse.BCOO((params["values"], indices), shape=(3, V))
        square = sparse.BCOO((x.data**2, indices), shape=(3, V))
        pairs = (x @ params["factors"]) ** 2 - square @ params["factors"] ** 2
        scores = x @ params["weights"] + pairs.sum(axis=1) / 2
        return jax.nn.softplus(scores).sum()

    grads = check(loss, params, indices, sparse=["['factors']", "['weights']"])
    np.testing.assert_array_equal(grads["weights"].indices, [2, 7, 2, 10, 0, V])
    assert grads["factors"].values.shape == (2 * 6, D)


def test_an_embedding_by_one_hot_products():
    """As T5X and MaxText have it, with parameters of another dtype."""

    def loss(params, ids):
        counts = lax.iota(jnp.int32, V)
        one_hot = jnp.array(ids[..., None] == counts[None, None], jnp.bfloat16)
        hidden = jnp.dot(one_hot, jnp.asarray(params["embedding"], jnp.bfloat16))
        return (jnp.tanh(hidden @ params["w"]).astype(jnp.float32) ** 2).sum()

    params = {"embedding": jnp.ones((V, D)) / 3, "w": jnp.ones((D, 2), jnp.bfloat16) / 4}
    check(loss, params, IDS, sparse=["['embedding']"], rtol=2e-2)
