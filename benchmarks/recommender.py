"""The recommender of examples/dlrm.py with jslices, Optax and PyTorch, in one run.

    python benchmarks/recommender.py            some minutes
    python benchmarks/recommender.py --quick    four small tables, a few steps
    taskset -c 0 python benchmarks/recommender.py    on one core, where others are at work

26 tables of at most ``--rows`` rows, bags of one to three ids, float32, Adagrad. With
jslices and with Optax the tables stand in one array, and apart; PyTorch has 26
``EmbeddingBag`` layers with sparse gradients. All begin with the same parameters and see
the same clicks; their first losses must be equal. Prints the median seconds to trace and
compile a step, and the median time of a step, taken in turns: believe only the ratios.
PyTorch is left out if it is not installed.
"""

import argparse
import functools
import pathlib
import random
import statistics
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jslices as js

sys.path.append(str(pathlib.Path(__file__).parent.parent / "examples"))
import dlrm

RATE, PAUSE = 0.02, 0.2  # seconds between turns, in which threads of others fall asleep


# --- JAX ------------------------------------------------------------------------------


def loss(tables, stacked, params, clicks):
    if stacked:
        x = dlrm.logits(tables, params, clicks, jnp.float32)
    else:
        bags = [
            js.embedding_lookup_sparse(
                params["tables"][name], (clicks.ids[:, i], clicks.mask[:, i])
            )
            for i, name in enumerate(tables.names)
        ]
        x = dlrm.interact(params, clicks.counts, jnp.stack(bags, axis=1), jnp.float32)
    return dlrm.entropy(x, clicks.clicked)


class WithJax:
    """A step with jslices' gradients and Adagrad, or with JAX's and Optax'."""

    def __init__(self, ours, stacked, tables, params, batches):
        tx = (js if ours else optax).adagrad(RATE)
        grad = (js if ours else jax).value_and_grad
        apply = js.apply_updates if ours else optax.apply_updates
        of = functools.partial(loss, tables, stacked)

        def step(params, state, clicks):
            value, grads = grad(of)(params, clicks)
            updates, state = tx.update(grads, state, params)
            return apply(params, updates), state, value

        if not stacked:
            params = {**params, "tables": tables.split(params["tables"])}
        self.step, self.batches = step, jax.tree.map(jnp.asarray, batches)
        self.params = jax.tree.map(jnp.copy, params)
        self.state = tx.init(self.params)

    def compile(self):
        """Seconds to trace and compile the step."""
        jax.clear_caches()
        jitted = jax.jit(self.step, donate_argnums=(0, 1))
        start = time.perf_counter()
        lowered = jitted.lower(self.params, self.state, self.batches[0])
        self.compiled = lowered.compile()
        return time.perf_counter() - start

    def __call__(self, number):
        clicks = self.batches[number % len(self.batches)]
        self.params, self.state, value = self.compiled(self.params, self.state, clicks)
        return float(value)


# --- PyTorch --------------------------------------------------------------------------


class WithTorch:
    def __init__(self, tables, params, batches):
        import torch

        self.torch = torch
        weights = tables.split(params["tables"]).values()
        tensor = lambda x: torch.from_numpy(np.array(x))  # noqa: E731
        self.bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(*w.shape, mode="mean", sparse=True, _weight=tensor(w))
            for w in weights
        )
        self.bottom, self.top = (
            self._layers(params[name], tensor) for name in ("bottom", "top")
        )
        everything = [self.bags, self.bottom, self.top]
        self.tx = torch.optim.Adagrad(
            [p for part in everything for p in part.parameters()],
            RATE,
            initial_accumulator_value=0.1,
            eps=1e-7,
        )
        self.pairs = torch.tril_indices(len(self.bags) + 1, len(self.bags) + 1, -1)
        self.batches = [self._tensors(clicks) for clicks in batches]

    def _layers(self, params, tensor):
        made = []
        for w, b in params:
            layer = self.torch.nn.Linear(*w.shape)
            layer.weight.data, layer.bias.data = tensor(w.T), tensor(b)
            made += [layer, self.torch.nn.ReLU()]
        return self.torch.nn.Sequential(*made[:-1])

    def _tensors(self, clicks):
        """Bags as PyTorch has them: the ids that count, and where each bag begins."""
        tensor = self.torch.from_numpy
        bags = []
        for i in range(len(self.bags)):
            ids, mask = clicks.ids[:, i], clicks.mask[:, i]
            starts = np.cumsum(mask.sum(1)) - mask.sum(1)
            bags.append((tensor(ids[mask].astype("int64")), tensor(starts.astype("int64"))))
        clicked = tensor(clicks.clicked.astype("float32"))
        return tensor(np.log1p(clicks.counts)), bags, clicked

    def __call__(self, number):
        counts, bags, clicked = self.batches[number % len(self.batches)]
        self.tx.zero_grad()
        x = self.bottom(counts)
        found = [bag(*ids) for bag, ids in zip(self.bags, bags, strict=True)]
        features = self.torch.stack([x, *found], dim=1)
        products = features @ features.transpose(1, 2)
        pairs = products[:, self.pairs[0], self.pairs[1]]
        out = self.top(self.torch.cat([x, pairs], dim=1))[:, 0]
        value = self.torch.nn.functional.binary_cross_entropy_with_logits(out, clicked)
        value.backward()
        self.tx.step()
        return value.item()


# --- The step of the example ----------------------------------------------------------


def example_and_dense(tables, params, clicks):
    """The step of examples/dlrm.py, and the same with dense gradients and Optax."""
    tx = dlrm.optimizer(params, RATE)
    dense = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition(
            {"tables": optax.adagrad(10 * RATE), "layers": optax.adam(RATE)},
            {name: "tables" if name == "tables" else "layers" for name in params},
        ),
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, average, clicks):
        def add(total, part):
            new = jax.value_and_grad(functools.partial(dlrm.loss, tables))(params, part)
            return jax.tree.map(jnp.add, total, new), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
        total, _ = jax.lax.scan(add, zeros, clicks)
        value, grads = jax.tree.map(lambda x: x / len(clicks.clicked), total)
        updates, state = dense.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, optax.incremental_update(params, average, 0.01), value

    ours = dlrm.make_step(tables, tx, 0.99), (dlrm.start(params, tx), clicks)
    return ours, (step, (params, dense.init(params), params, clicks))


def seconds_to_compile(step, arguments):
    jax.clear_caches()
    start = time.perf_counter()
    step.lower(*arguments).compile()
    return time.perf_counter() - start


# --- In turns -------------------------------------------------------------------------


def contenders(tables, params, batches):
    made = {
        "jslices": WithJax(True, True, tables, params, batches),
        "jslices, tables apart": WithJax(True, False, tables, params, batches),
        "Optax": WithJax(False, True, tables, params, batches),
        "Optax, tables apart": WithJax(False, False, tables, params, batches),
    }
    try:
        made["PyTorch"] = WithTorch(tables, params, batches)
    except ImportError as error:
        print(f"left out: PyTorch ({error})")
    return made


def measure(everyone, options):
    """Median seconds to compile, and of a step, for each contender."""
    built = {name: [] for name, one in everyone.items() if isinstance(one, WithJax)}
    for _ in range(options.compilations):
        for name, seconds in built.items():
            seconds.append(everyone[name].compile())
    first = {name: one(0) for name, one in everyone.items()}
    same = np.allclose(list(first.values()), first["jslices"], rtol=1e-4, atol=0)
    assert same, f"these are different models: {first}"
    steps, order = {name: [] for name in everyone}, random.Random(0)
    for _ in range(options.rounds):
        for name in order.sample(list(everyone), len(everyone)):
            time.sleep(PAUSE)
            for number in range(options.steps + 2):
                start = time.perf_counter()
                everyone[name](number)
                if number > 1:
                    steps[name].append(time.perf_counter() - start)
    median = lambda x: statistics.median(x) if x else float("nan")  # noqa: E731
    return {name: (median(built.get(name)), median(steps[name])) for name in everyone}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e5, help="the most of a table")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--compilations", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed in each round")
    parser.add_argument("--keep-memory", action="store_true", help="js.keep_memory() first")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.keep_memory:  # of the process, hence for all
        js.keep_memory()
    warnings.simplefilter("ignore", js.DensificationWarning)  # Optax is meant to be dense
    if options.quick:
        options.rows, options.batch = 1e3, 128
        options.compilations, options.rounds, options.steps = 1, 1, 2
    tables = dlrm.of_criteo(int(options.rows), options.dim)
    if options.quick:
        sizes = dict(zip(tables.names[:4], tables.sizes, strict=False))
        tables = js.tables.StackedTables(
            {name: (n, options.dim) for name, n in sizes.items()}
        )
    params = dlrm.init(jax.random.key(0), tables, (64, 32), (128, 64))
    draw = dlrm.synthetic(tables, 0)
    batches = [draw(options.batch, number) for number in range(4)]
    pair = example_and_dense(tables, params, dlrm.in_parts(batches[0], 2))
    built = [[seconds_to_compile(*x) for x in pair] for _ in range(options.compilations)]
    ours, dense = (statistics.median(x) for x in zip(*built, strict=True))
    print(
        f"examples/dlrm.py: {ours:.2f} s to compile its step, {dense:.2f} s for the same "
        f"with dense gradients and Optax: {ours / dense:.2f} times as long",
        flush=True,
    )
    found = measure(contenders(tables, params, batches), options)
    compiling, stepping = found["Optax"][0], found["jslices"][1]
    print(
        f"{len(tables.names)} tables, {tables.num_rows:,} rows of {options.dim} in all, "
        f"batches of {options.batch}, jax {jax.__version__}"
    )
    print(f"{'':>22}{'compile s':>10}{'of Optax':>9}{'step ms':>10}{'of jslices':>11}")
    for name, (build, step) in found.items():
        print(
            f"{name:>22}{build:>10.2f}{build / compiling:>9.2f}{step * 1e3:>10.2f}"
            f"{step / stepping:>11.1f}"
        )


if __name__ == "__main__":
    main()
