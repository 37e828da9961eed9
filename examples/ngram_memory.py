"""A language model with a memory of n-grams: tables that are larger than the model.

    python examples/ngram_memory.py                            Python's standard library
    python examples/ngram_memory.py --data folder --rows 1e6   any text
    python examples/ngram_memory.py --host                     tables in host memory
    python examples/ngram_memory.py --directory run            with checkpoints, goes on
    python examples/ngram_memory.py --quick                    seconds, to see it work

Beside each layer of a small transformer stand tables ``[layers, heads, V, D]``. Hashes of
the last two and three tokens say which rows a layer reads; a gate, computed from what the
model makes of the text, says how much of them it takes. Several heads hash the same tokens
differently, so that two n-grams which collide in one table hardly do in all (DeepSeek's
Engram, 2026, arXiv:2601.07372).

A step reads ``layers * heads`` rows a token, of any number of rows. ``--optimizer`` says
what is kept for each of them: two numbers for every number of a row (Adam), or one for a
whole row. A batch depends on the number of its step alone, so that a run that was stopped
goes on to the same bits.
"""

import argparse
import collections
import functools
import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chunked_cross_entropy import cross_entropy
from flax import nnx
from ngram_hashes import hashed_ngrams
from tqdm import tqdm

import jslices as js

# --- The model ------------------------------------------------------------------------


class Sizes(NamedTuple):
    vocabulary: int
    width: int = 64
    layers: int = 2
    heads: int = 4  # of the memory in each layer, and of attention
    rows: int = 2**15  # of each table; 0 for no memory
    dim: int = 32  # of a row

    @property
    def memory(self):
        return self.layers, self.heads, self.rows, self.dim


class Layer(nnx.Module):
    """Memory, attention and dense layers, each added to the stream ``[B, T, width]``."""

    def __init__(self, sizes, rngs):
        width, read = sizes.width, sizes.heads * sizes.dim
        dense = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        if sizes.rows:
            self.key, self.value = dense(read, width), dense(read, width)
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(3)])
        self.attention = nnx.MultiHeadAttention(
            sizes.heads, width, use_bias=False, decode=False, rngs=rngs
        )
        self.up, self.down = dense(width, 4 * width), dense(4 * width, width)

    def __call__(self, x, rows):
        """``rows`` is what a memory holds for each position, ``[heads, B, T, D]``."""
        if rows is not None:
            rows = jnp.moveaxis(rows, 0, 2).reshape(*x.shape[:2], -1).astype(x.dtype)
            match = (self.norms[0](x) * self.key(rows)).sum(axis=-1, keepdims=True)
            x += jax.nn.sigmoid(match / x.shape[-1] ** 0.5) * self.value(rows)
        mask = nnx.make_causal_mask(jnp.zeros(x.shape[:2]))
        x += self.attention(self.norms[1](x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(self.norms[2](x))))


class Model(nnx.Module):
    """Layers that are scanned, from tokens ``[B, T]`` to ``[B, T, width]``."""

    def __init__(self, sizes, length, rngs):
        init = nnx.initializers.normal(0.02)
        self.words = nnx.Embed(sizes.vocabulary, sizes.width, rngs=rngs)
        self.positions = nnx.Param(init(rngs(), (length, sizes.width)))
        layer = functools.partial(Layer, sizes)
        split = nnx.split_rngs(splits=sizes.layers)
        self.layers = split(nnx.vmap(layer))(rngs)
        self.norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.out = nnx.Param(init(rngs(), (sizes.vocabulary, sizes.width)))

    def __call__(self, tokens, rows):
        """``rows`` of all layers, ``[layers, heads, B, T, D]``."""

        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        def scanned(x, layer, rows):
            return layer(x, rows)

        x = self.words(tokens) + self.positions[...]
        return self.norm(scanned(x, self.layers, rows))


def read(memory, rows):
    """Rows ``[layers, heads, B, T, D]`` of all tables."""
    layer, head = np.ogrid[: rows.shape[0], : rows.shape[1]]
    return memory[layer[..., None, None], head[..., None, None], rows]


def entropy(model, rows, tokens):
    """The mean of ``-log p`` of each token after the first; tokens ``[B, T + 1]``."""
    hidden = model(tokens[:, :-1], rows)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    return cross_entropy(hidden, model.out[...], tokens[:, 1:].reshape(-1), 2048).mean()


def loss(graph, sizes, params, tokens):
    """The entropy of a model whose tables are parameters, too."""
    rows = None
    if sizes.rows:
        numbers = hashed_ngrams(tokens[:, :-1], *sizes.memory[:3])
        rows = read(params["memory"], numbers)
    return entropy(nnx.merge(graph, params["model"]), rows, tokens)


# --- Text -----------------------------------------------------------------------------


class Text(NamedTuple):
    """Tokens of a text, int32; what is no frequent word is token 0."""

    words: list
    train: np.ndarray
    held_out: np.ndarray


def read_text(path, most, files=None):
    """A Text of the ``most`` frequent words, signs and line ends of Python files or others.

    Every tenth file is held out.
    """
    root = Path(path or sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "__pycache__"}
    names = sorted(
        p
        for p in ([root] if root.is_file() else root.rglob("*.py" if path is None else "*"))
        if p.is_file() and skipped.isdisjoint(p.relative_to(root).parts)
    )[:files]
    train, other = [], []
    for number, name in enumerate(names):
        pieces = re.findall(r"\w+|[^\w\s]|\n\s*", name.read_text("utf-8", errors="ignore"))
        (other if number % 10 == 9 else train).extend(pieces)
    if not other:  # a few files, or one
        cut = -(-len(train) // 10)
        train, other = train[:-cut], train[-cut:]
    frequent = collections.Counter(train).most_common(most - 1)
    words = ["", *(word for word, _ in frequent)]
    number = {word: i for i, word in enumerate(words)}
    tokens = (
        np.array([number.get(w, 0) for w in part], np.int32) for part in (train, other)
    )
    return Text(words, *tokens)


def batch_of(tokens, options, *numbers):
    """Windows ``[B, T + 1]`` of a text, the same for the same numbers."""
    rng = np.random.default_rng(numbers)
    first = rng.integers(0, len(tokens) - options.length, (options.batch, 1))
    return tokens[first + np.arange(options.length + 1)]


# --- Training -------------------------------------------------------------------------


class Run(NamedTuple):
    """All that a checkpoint holds, but for tables on the host."""

    params: dict  #: ``{"model": ..., "memory": [layers, heads, V, D]}``.
    state: tuple  #: of the optimizer.
    step: jax.Array  #: int32 ``[]``, the steps done.


def falling(rate, steps):
    """A learning rate that rises for a twentieth of all steps, and falls to a tenth."""
    rise = max(1, steps // 20)

    def at(count):
        part = jnp.clip((count - rise) / max(1, steps - rise), 0, 1)
        return rate * jnp.minimum((count + 1) / rise, 0.55 + 0.45 * jnp.cos(np.pi * part))

    return at


#: Optimizers of the memory, and their rates beside the model's.
OPTIMIZERS = {
    "dense_adam": (js.adam, 30.0),
    "lazy_adam": (js.adam, 30.0),
    "exact_adam": (functools.partial(js.adam, untouched="exact"), 30.0),
    "rowwise_adagrad": (js.rowwise_adagrad, 100.0),
    "partial_rowwise_adam": (js.partial_rowwise_adam, 30.0),
}


def optimizers(options):
    """``(for the memory, for the model)``."""
    make, times = OPTIMIZERS[options.optimizer]
    rate = options.memory_rate or times * options.learning_rate
    rates = falling(rate, options.steps), falling(options.learning_rate, options.steps)
    return make(rates[0]), js.adam(rates[1])


def sparse(optimizer, path, _):
    """Which gradients are rows.

    That of the softmax is dense by nature; that of the words where a batch has more tokens
    than there are words, over many devices.
    """
    name = jax.tree_util.keystr(path)
    if "memory" in name:
        return optimizer != "dense_adam"
    return False if "'out'" in name else "if_smaller"


class OnDevice:
    """Training with the tables in the memory of the device, or with none."""

    def __init__(self, sizes, options, graph, model):
        params = {"model": model}
        if sizes.rows:
            params["memory"] = jnp.zeros(sizes.memory, options.dtype)
        memory, other = optimizers(options)
        self.tx = js.optim.partition(
            {"memory": memory, "model": other}, {name: name for name in params}
        )
        self.run = Run(params, self.tx.init(params), jnp.zeros((), jnp.int32))
        self.saver, self.seed = js.Saver(), options.seed
        self.sparse = functools.partial(sparse, options.optimizer)

        self.loss = functools.partial(loss, graph, sizes)
        self._step = jax.jit(self.stepped, donate_argnums=0)
        self._held_out = jax.jit(self.loss)

    def stepped(self, run, tokens):
        """The run after a step, and its loss before."""
        params, state = run.params, run.state
        if self.tx.catches_up:
            rows = js.lookup_ids(self.loss)(params, tokens)
            params, state = self.tx.catch_up(params, state, rows)
        grad = js.value_and_grad(self.loss, sparse=self.sparse)
        value, grads = grad(params, tokens)
        key = jax.random.fold_in(jax.random.key(self.seed), run.step)
        params, state = self.tx.apply(grads, state, params, key)
        return Run(params, state, run.step + 1), value

    def step(self, tokens):
        self.run, value = self._step(self.run, tokens)
        return value

    def held_out(self, batches):
        params, _ = self.tx.flush(self.run.params, self.run.state)
        return np.mean([self._held_out(params, tokens) for tokens in batches])

    def save(self, path, number):
        self.saver.save(self.run, path / "model", number)

    def restore(self, file):
        self.run = self.saver.restore(file, self.run)


class OnHost:
    """Training with the tables in host memory: a step gets the rows that it reads.

    Hashes need nothing but tokens, so while a step runs on the device the rows of the next
    one are computed, and fetched.
    """

    def __init__(self, sizes, options, graph, model):
        self.sizes = sizes
        memory, other = optimizers(options)
        layers, heads, num_rows, dim = sizes.memory
        stored = None if options.dtype == "float32" else options.dtype
        shape, most = (layers * heads * num_rows, dim), layers * heads * options.batch
        self.table = js.HostTable(
            shape, memory, stored=stored, size=most * options.length, overlap=True
        )
        self.run = Run({"model": model}, other.init(model), jnp.zeros((), jnp.int32))
        self.saver, self.seed = js.Saver(), options.seed

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def stepped(rows, run, places, tokens):
            def loss(params):
                return entropy(
                    nnx.merge(graph, params["model"]), params["memory"][places], tokens
                )

            table, table_state = rows.unpack()
            params = {**run.params, "memory": table}
            which = functools.partial(sparse, options.optimizer)
            value, grads = js.value_and_grad(loss, sparse=which)(params)
            table, table_state = memory.apply(grads["memory"], table_state, table)
            model, state = other.apply(grads["model"], run.state, params["model"])
            key = jax.random.fold_in(jax.random.key(self.seed), run.step)
            rows = rows.pack(table, table_state, *([key] if stored else []))
            return rows, Run({"model": model}, state, run.step + 1), value

        self._step = stepped
        self._held_out = jax.jit(
            lambda model, rows, tokens: entropy(nnx.merge(graph, model), rows, tokens)
        )

    def numbers(self, tokens):
        """Rows of the one table, ``[layers, heads, B, T]``."""
        layers, heads, num_rows, _ = self.sizes.memory
        tables = np.arange(layers * heads).reshape(layers, heads, 1, 1)
        return tables * num_rows + hashed_ngrams(tokens[:, :-1], layers, heads, num_rows)

    def step(self, tokens):
        rows, places = self.table.fetch(self.numbers(tokens))
        rows, self.run, value = self._step(rows, self.run, places, tokens)
        self.table.store(rows)
        return value

    def held_out(self, batches):
        model = self.run.params["model"]
        return np.mean(
            [
                self._held_out(model, self.table.read(self.numbers(tokens)), tokens)
                for tokens in batches
            ]
        )

    def save(self, path, number):
        self.table.save(path / f"memory-{number}.rows")
        self.saver.save(self.run, path / "model", number)

    def restore(self, file):
        self.run = self.saver.restore(file, self.run)
        self.table.restore(Path(file).parent / f"memory-{int(self.run.step)}.rows")


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, help="a file or folder (default: the standard library)")
    add("--files", type=int, help="of it, the first to read (default: all)")
    add(
        "--vocabulary", type=int, default=4096, help="the most frequent words to tell apart"
    )
    add("--rows", type=float, default=2**15, help="of each table; 0 for no memory")
    add("--dim", type=int, default=32, help="numbers of a row")
    add("--width", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--batch", type=int, default=16, help="windows of text")
    add("--length", type=int, default=64, help="tokens of a window")
    add("--steps", type=int, default=1000, help="in all, those of earlier runs included")
    add("--stop", type=int, help="the step to stop at; the rate falls over all --steps")
    add("--optimizer", choices=OPTIMIZERS, default="rowwise_adagrad", help="of the memory")
    add("--learning-rate", type=float, default=3e-3, help="of the model")
    add("--memory-rate", type=float, help="(default: as suits the optimizer)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the memory")
    add("--host", action="store_true", help="tables in the memory of the host")
    add("--directory", type=Path, help="for checkpoints; goes on from the last one")
    add("--every", type=int, default=200, help="steps from one checkpoint to the next")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="small sizes")
    options = parser.parse_args(arguments)
    if options.quick:
        small = dict(files=40, vocabulary=512, rows=512, dim=8, width=32, batch=4)
        parser.set_defaults(**small, length=32, steps=40, every=20)
        options = parser.parse_args(arguments)
    options.rows = int(options.rows)
    if options.host and (options.optimizer == "dense_adam" or not options.rows):
        parser.error("--host wants rows, and an optimizer that steps some of them")
    return options


def main(arguments=None):
    """Trains; returns the training, and ``{step: loss on held-out text}``."""
    options = parsed(arguments)
    text = read_text(options.data, options.vocabulary, options.files)
    if (tokens := min(map(len, text[1:]))) <= options.length:
        raise ValueError(f"windows of {options.length + 1} tokens from a text of {tokens}")
    sizes = Sizes(
        vocabulary=len(text.words),
        width=options.width,
        layers=options.layers,
        rows=options.rows,
        dim=options.dim,
    )
    model = Model(sizes, options.length, nnx.Rngs(options.seed))
    training = (OnHost if options.host else OnDevice)(sizes, options, *nnx.split(model))
    if options.directory:
        options.directory.mkdir(parents=True, exist_ok=True)
        if last := js.checkpoint.latest_checkpoint(options.directory):
            training.restore(last)
            print(f"goes on after step {int(training.run.step)}")

    held_out = [batch_of(text.held_out, options, number) for number in range(16)]
    losses = {}
    first, last = int(training.run.step), options.stop or options.steps
    with tqdm(total=last, initial=first, unit="step") as bar:
        for number in range(first, last):
            value = training.step(batch_of(text.train, options, options.seed, number))
            bar.update()
            if (done := number + 1) % options.every == 0 or done == last:
                losses[done] = float(training.held_out(held_out))
                tqdm.write(
                    f"step {done}: loss {float(value):.4f}, held out {losses[done]:.4f}"
                )
                if options.directory:
                    training.save(options.directory, done)
    return training, losses


if __name__ == "__main__":
    main()
