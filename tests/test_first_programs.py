"""The first program of each page has the losses of the program that it replaces."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jslices as js

# The libraries' own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROOT = pathlib.Path(__file__).parent.parent
#: Pages, what they need, and the shapes of ids and labels.
PAGES = {
    "README.md": ("jax", (3,), (3,)),
    "docs/start.md": ("jax", (3, 2), (3,)),
    "docs/coming_from/optax.md": ("jax", (3,), (3,)),
    "docs/coming_from/pytorch.md": ("jax", (3,), (3,)),
    "docs/coming_from/tensorflow.md": ("jax", (3,), (3,)),
    "docs/models/linen.md": ("flax.linen", (3, 2), (3, 1)),
    "docs/models/equinox.md": ("equinox", (3, 2), (3, 1)),
    "docs/models/haiku.md": ("haiku", (3, 2), (3, 1)),
}
STEPS = 12


class Dense(optax.GradientTransformation):
    def now(self, params, state):
        return params

    def flush(self, params, state):
        return params, state


def dense_step(loss, tx):
    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def keras_adam(rate, eps, b1=0.9, b2=0.999):
    """With Keras' place of epsilon, which Optax has not."""

    def update(grads, state, params):
        count, mu, nu = state
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mu, grads)
        nu = jax.tree.map(lambda n, g: b2 * n + (1 - b2) * g**2, nu, grads)
        now = rate * jnp.sqrt(1 - b2 ** (count + 1)) / (1 - b1 ** (count + 1))
        updates = jax.tree.map(lambda m, n: -now * m / (jnp.sqrt(n) + eps), mu, nu)
        return updates, (count + 1, mu, nu)

    def init(params):
        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return jnp.zeros((), jnp.float32), mu, nu

    return Dense(init, update)


class Replaced:
    """jslices, but for the names that stand for others' on a first program's lines."""

    def __init__(self, **names):
        vars(self).update(names)

    def __getattr__(self, name):
        return getattr(js, name)


def adam(rate, untouched, eps=1e-8, eps_hat=False):
    return keras_adam(rate, eps) if eps_hat else Dense(*optax.adam(rate, eps=eps))


DENSE = Replaced(
    train_step=dense_step,
    eval_step=lambda fun, tx: lambda params, state, *batch: fun(params, *batch),
    embedding_lookup=lambda table, ids: table[ids],
    adam=adam,
    adamw=lambda rate, untouched: Dense(*optax.adamw(rate)),
    optim=Replaced(
        chain=lambda *links: Dense(*optax.chain(*links)),
        clip_by_global_norm=optax.clip_by_global_norm,
    ),
)
LAZY = Replaced(
    adam=lambda rate, untouched, **other: js.adam(rate, **other),
    adamw=lambda rate, untouched: js.adamw(rate),
)


def losses(page, library, monkeypatch):
    """Of the page's first program with ``library`` as jslices, on changing rows."""
    _, shape, labels = PAGES[page]
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    first = next(i for i, block in enumerate(blocks) if "js.train_step(" in block)
    names = {"__name__": "page"}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jslices", library)
        for block in blocks[: first + 1]:  # but smaller, and without its own steps
            small = re.sub(r"\b\d+0_000\b", "1_000", block)
            exec(re.split(r"^for ", small, flags=re.M)[0], names)
    step, state, tx = names["step"], names["state"], names["tx"]

    def anew(params):
        rng = np.random.default_rng(0)
        return jax.tree.map(
            lambda x: jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype), params
        )

    is_train_state = hasattr(state, "opt_state")
    if is_train_state:
        params = anew(state.params)
        state = state.replace(params=params, opt_state=tx.init(params))
    else:
        params = anew(names["params"])
        state = tx.init(params)
    rng, values = np.random.default_rng(1), []
    for _ in range(STEPS):
        ids = jnp.asarray(rng.integers(0, 20, shape), jnp.int32)
        batch = ids, jnp.asarray(rng.integers(0, 2, labels), jnp.int32)
        if is_train_state:
            state, value = step(state, *batch, jax.random.key(0))
        else:
            params, state, value = step(params, state, *batch)
        values.append(float(value))
    return values


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_first_program_has_the_losses_of_the_one_it_replaces(page, monkeypatch):
    pytest.importorskip(PAGES[page][0])
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        ours, dense, lazy = (losses(page, x, monkeypatch) for x in (js, DENSE, LAZY))
    np.testing.assert_allclose(ours, dense, rtol=2e-5)
    assert not np.allclose(lazy, dense, rtol=1e-3)  # these batches can tell


def test_no_page_is_left_out():
    pages = [*ROOT.glob("docs/models/*.md"), *ROOT.glob("docs/coming_from/*.md")]
    found = {str(page.relative_to(ROOT)) for page in pages}
    # Run by test_keras.py, test_peers.py, test_coming_from.py and test_model_pages.py.
    others = (
        "keras torchrec graph_embeddings linear_models recommender_programs word_vectors"
    )
    others = {f"docs/coming_from/{name}.md" for name in others.split()}
    assert found - {*PAGES} == {"docs/models/nnx.md", *others}
