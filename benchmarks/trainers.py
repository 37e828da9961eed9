"""Trainers of others, as they are and by the blocks of docs/trainers.md.

    python benchmarks/trainers.py                     those that are installed
    python benchmarks/trainers.py --rows 1e4 tunix penzai

A table of 32 numbers a row and a vector, Adam, 512 ids a step, frequent ones often: each
trainer with ``optax.adam``, and its block with ``js.adam(..., untouched="exact")``. Prints
the largest difference of the losses of 20 steps, relative, the milliseconds of a step of
each, by turns in one run, and their ratio.
"""

import argparse
import importlib.metadata
import os
import pathlib
import re
import statistics
import tempfile
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jslices as js

os.environ.setdefault("KERAS_BACKEND", "jax")  # its default is TensorFlow
DIM, IDS, RATE = 32, 512, 1e-2
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "trainers.md"


def block(trainer):
    """The names that the blocks under a heading of the page define."""
    _, rest = PAGE.read_text().split(f"\n## {trainer}\n")
    names = {}
    for code in re.findall(r"^```python\n(.*?)^```", rest.split("\n## ")[0], re.M | re.S):
        exec(code, names)
    return names


def optimizer(rows):
    return js.adam(RATE, untouched="exact") if rows else optax.adam(RATE)


def table_of(height):
    return jnp.asarray(np.random.default_rng(1).normal(size=(height, DIM)), jnp.float32)


def batches(height, steps):
    """Ids, low ones often, and labels."""
    rng = np.random.default_rng(0)
    ids = (height * rng.random((steps, IDS)) ** 3).astype(np.int32)
    return [(x, np.cos(x).astype(np.float32)[:, None]) for x in ids]


def dense_step(loss, params, tx):
    """A step of a program that its users write, with Optax."""

    def step(params, state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, params, tx.init(params)


def in_turn(step, params, state):
    """``run(batch) -> value`` of a step whose parameters and state are donated."""
    held = [params, state]
    jitted = jax.jit(step, donate_argnums=(0, 1))

    def run(*batch):
        *held[:], value = jitted(*held, *batch)
        return value

    return run


def kauldron(height, rows):
    from flax import linen as nn
    from kauldron import kd

    class Model(nn.Module):
        ids: kd.kontext.Key = kd.kontext.REQUIRED

        @nn.compact
        def __call__(self, ids):
            start = lambda *_: table_of(height)  # noqa: E731
            return nn.Dense(1)(nn.Embed(height, DIM, embedding_init=start)(ids))

    kind = block("kauldron")["TrainStep"] if rows else kd.train.TrainStep
    losses = {"l2": kd.losses.L2(preds="preds", targets="batch.labels")}
    step = kind(
        model=Model(ids="batch.ids"),
        optimizer=optimizer(rows),
        rng_streams=kd.train.RngStreams([], seed=0),
        sharding=kd.sharding.ShardingStrategy(),
        init_transform=kd.ckpts.NoopTransform(),
        aux=kd.train.Auxiliaries(losses=losses, metrics={}, summaries={}),
    )
    shapes = {"ids": (IDS,), "labels": (IDS, 1)}
    types = {"ids": np.int32, "labels": np.float32}
    spec = {k: jax.ShapeDtypeStruct(shapes[k], types[k]) for k in shapes}
    held = [step.init(spec)]

    def run(ids, labels):
        batch = kd.sharding.device_put({"ids": ids, "labels": labels}, step.sharding.batch)
        held[0], aux = step.step(held[0], batch, return_losses=True)
        return aux.loss_states["l2"].compute()

    return run


def recml_linen(height, rows):
    from flax import linen as nn
    from recml.core.training import jax as recml_jax

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            start = lambda *_: table_of(height)  # noqa: E731
            return nn.Dense(1)(nn.Embed(height, DIM, embedding_init=start)(ids))

    model = Model()

    def create(batch):
        params = model.init(jax.random.key(0), batch[0])
        return recml_jax.JaxState.create(
            apply=model.apply, params=params, tx=optimizer(rows)
        )

    def loss(params, batch):
        return ((model.apply(params, batch[0]) - batch[1]) ** 2).mean()

    def dense(loss, state, batch):
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        return state.update(grads=grads), value

    step = block("recml")["train_step"] if rows else dense
    return recml_run(create, lambda batch, state: step(loss, state, batch))


def recml_keras(height, rows):
    import keras
    from recml.core.training import jax as recml_jax

    keras.utils.set_random_seed(0)
    embed, out = keras.layers.Embedding(height, DIM), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((), dtype="int32"), embed, out])
    embed.set_weights([np.asarray(table_of(height))])

    def create(batch):
        return recml_jax.KerasState.create(model=model, tx=optimizer(rows))

    def loss_of(state):
        def loss(tvars, batch):
            out, _ = model.stateless_call(tvars, state.ntvars, batch[0])
            return ((out - batch[1]) ** 2).mean()

        return loss

    def dense(loss, state, batch):
        value, grads = jax.value_and_grad(loss)(state.tvars, batch)
        return state.update(grads=grads), value

    step = block("recml")["keras_train_step"] if rows else dense
    return recml_run(create, lambda batch, state: step(loss_of(state), state, batch))


def recml_run(create, step):
    """As ``DataParallelPartitioner`` jits them, which itself wants another JAX."""
    mesh = jax.make_mesh((jax.device_count(),), ("batch",))
    place, split = jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(mesh, jax.P("batch"))
    held = [jax.jit(create, out_shardings=place)(batches(2, 1)[0])]
    how = {"in_shardings": (split, place), "out_shardings": (place, None)}
    jitted = jax.jit(step, donate_argnums=1, **how)

    def run(*batch):
        held[0], value = jitted(batch, held[0])
        return value

    return run


def tunix(height, rows):
    from flax import nnx
    from tunix.sft import peft_trainer

    class Model(nnx.Module):
        def __init__(self):
            self.words = nnx.Param(table_of(height))
            self.out = nnx.Linear(DIM, 1, rngs=nnx.Rngs(0))

        def __call__(self, ids):
            return self.out(jnp.take(self.words[...], ids, axis=0))

    kind = block("tunix")["Trainer"] if rows else peft_trainer.PeftTrainer
    config = peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=10**9)
    trainer = kind(Model(), optimizer(rows), config)
    trainer.with_gen_model_input_fn(lambda x: {"ids": x[0], "labels": x[1]})
    trainer.with_loss_fn(lambda model, ids, labels: ((model(ids) - labels) ** 2).mean())
    step, _ = trainer.jit_train_and_eval_step()
    return lambda *batch: step(tuple(map(jnp.asarray, batch)))[0]


def levanter(height, rows):
    import equinox as eqx
    import haliax as hax
    import jmp
    from levanter import trainer as levanter_trainer
    from levanter.tracker import NoopConfig

    vocabulary, width = hax.Axis("vocabulary", height), hax.Axis("width", DIM)
    batch_axis = hax.Axis("batch", IDS)

    class Model(eqx.Module):
        table: hax.NamedArray
        out: hax.NamedArray

    def loss(model, ids, labels, key=None):
        rows_read = model.table.take(vocabulary, ids)
        return hax.mean((hax.dot(rows_read, model.out, axis=width) - labels) ** 2)

    kind = block("Levanter")["Trainer"] if rows else levanter_trainer.Trainer
    config = levanter_trainer.TrainerConfig(
        id="one",
        tracker=NoopConfig(),
        mp=jmp.get_policy("f32"),
        train_batch_size=IDS,
        log_dir=pathlib.Path(tempfile.mkdtemp()),
        require_accelerator=False,
    )
    trainer = kind(config, optimizer(rows), loss, add_default_hooks=False)
    trainer.__enter__()

    def model():
        ones = hax.named(jnp.ones(DIM) / DIM, width)
        return Model(hax.named(table_of(height), (vocabulary, width)), ones)

    held = [trainer.initial_state(jax.random.key(0), model_init=model)]

    def run(ids, labels):
        batch = hax.named(ids, batch_axis), hax.named(labels[:, 0], batch_axis)
        info = trainer.train_step(held[0], *batch)
        held[0] = info.state
        return info.loss

    return run


def numpyro(height, rows):
    import numpyro as pyro
    from numpyro import distributions as dist
    from numpyro.infer import SVI, Trace_ELBO

    def model(ids, labels):
        table = pyro.param("table", lambda _: table_of(height))
        w = pyro.param("w", lambda _: jnp.ones((DIM, 1)) / DIM)
        with pyro.plate("rows", IDS):
            pyro.sample("y", dist.Normal((table[ids] @ w)[:, 0], 1.0), obs=labels[:, 0])

    tx, key = optimizer(rows), jax.random.key(0)
    given = optax.sgd(0.0) if rows else tx  # for the first parameters
    svi = SVI(model, lambda *_: None, pyro.optim.optax_to_numpyro(given), Trace_ELBO())
    first = svi.init(key, *batches(height, 1)[0])
    if rows:
        params = svi.optim.get_params(first.optim_state)
        step = block("NumPyro")["svi_step"](svi, tx)
        one = in_turn(step, params, tx.init(params))
        return lambda *batch: one(key, *batch)
    held, update = [first], jax.jit(svi.update, donate_argnums=0)

    def run(*batch):
        held[0], value = update(held[0], *batch)
        return value

    return run


def penzai(height, rows):
    from penzai import pz

    @pz.pytree_dataclass
    class Model(pz.nn.Layer):
        table: pz.Parameter
        out: pz.Parameter

        def __call__(self, ids, **_):
            found = self.table.value.untag("vocabulary", "width").unwrap()[ids]
            return found @ self.out.value.untag("width").unwrap()

    def parameter(name, x, *axes):
        return pz.Parameter(value=pz.nx.wrap(x).tag(*axes), label=name)

    model = Model(
        parameter("table", table_of(height), "vocabulary", "width"),
        parameter("out", jnp.ones(DIM) / DIM, "width"),
    )

    def loss(model, ids, labels):
        return ((model(ids) - labels[:, 0]) ** 2).mean()

    if rows:
        return in_turn(*block("penzai")["penzai_step"](model, loss, optimizer(rows)))
    from penzai.toolshed import basic_training

    def loss_of(model, rng, state, ids, labels):
        value = loss(model, ids, labels)
        return value, state, value

    trainer = basic_training.StatefulTrainer.build(
        jax.random.key(0), model, optimizer(rows), loss_of, donate_states=True
    )
    return lambda ids, labels: trainer.step(ids=ids, labels=labels)


TRAINERS = {
    "kauldron": (kauldron, "kauldron"),
    "recml_linen": (recml_linen, "recml"),
    "recml_keras": (recml_keras, "recml"),
    "tunix": (tunix, "tunix"),
    "levanter": (levanter, "levanter"),
    "numpyro": (numpyro, "numpyro"),
    "penzai": (penzai, "penzai"),
}


def compared(make, height, steps=20, turns=0):
    """The largest relative difference of losses, and the seconds of a step of each."""
    given = batches(height, steps)
    runs = [make(height, rows) for rows in (False, True)]
    losses = [[float(run(*batch)) for batch in given] for run in runs]
    dense, ours = map(np.array, losses)
    times = [[], []]
    for _ in range(turns):
        for run, each in zip(runs, times, strict=True):
            start = time.perf_counter()
            for batch in given:
                value = run(*batch)
            jax.block_until_ready(value)
            each.append((time.perf_counter() - start) / steps)
    medians = [statistics.median(each) for each in times if each]
    return float(np.max(np.abs(ours / dense - 1))), medians


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trainers", nargs="*", metavar="trainer", help=", ".join(TRAINERS))
    parser.add_argument("--rows", type=float, default=3e5)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    if unknown := {*args.trainers} - {*TRAINERS}:
        parser.error(f"there are {', '.join(TRAINERS)}, got {', '.join(unknown)}")
    warnings.simplefilter("ignore")
    print(f"jax {jax.__version__}, {args.rows:,.0f} rows of {DIM}")
    for name in args.trainers or TRAINERS:
        make, library = TRAINERS[name]
        try:
            importlib.import_module(library)
        except ImportError:
            print(f"{name:12} not installed")
            continue
        difference, (dense, ours) = compared(make, int(args.rows), turns=args.turns)
        version = importlib.metadata.version(
            {"tunix": "google-tunix"}.get(library, library)
        )
        print(
            f"{name:12} {version:12} losses {difference:.0e} apart, {1e3 * dense:7.2f} ms "
            f"and {1e3 * ours:6.2f} ms, {dense / ours:5.1f} x"
        )


if __name__ == "__main__":
    main()
