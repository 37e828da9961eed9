"""MaxText with its table by rows: exact AdamW, by its own schedule, equal to its own AdamW.

    pip install "maxtext[tpu]==0.2.5" .                # ran with jax 0.12.0.1, on a CPU
    JAX_PLATFORMS=cpu python examples/maxtext_rows.py --vocabulary 50000

Trains a small decoder twice for 20 steps, on MaxText's synthetic tokens: as it is, and
with ``optimizers.get_optimizer`` and ``train_step`` replaced. Table and head are untied: a
head is used as a whole, and its gradient is dense; the rows of the table move alone. Prints
the largest difference of the losses, relative, and the milliseconds of a step of each.
"""

import argparse
import pathlib
import statistics
import tempfile
import time

import jax
import maxtext
from flax import nnx
from flax.linen import partitioning
from maxtext.configs import pyconfig
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train
from maxtext.utils import sharding, train_utils

import jslices as js


def adamw(config, schedule, model=None, mesh=None):
    """Exact for the table; what is used as a whole never waits, and needs no clock."""
    given = {
        "b1": config.adam_b1,
        "b2": config.adam_b2,
        "eps": config.adam_eps,
        "eps_root": config.adam_eps_root,
        "weight_decay": config.adam_weight_decay,
        "weight_decay_mode": "all",
    }
    exact = js.adamw(schedule, untouched="exact", **given)
    parts = {"table": exact, "rest": js.adamw(schedule, **given)}

    def labels(params):
        return jax.tree.map_with_path(
            lambda path, _: (
                "table" if "token_embedder" in jax.tree_util.keystr(path) else "rest"
            ),
            params,
        )

    return js.optim.partition(parts, labels)


def step_by_rows(model, config, shardings, params_shardings, state, data, rng=None):
    state = nnx.merge(model, state)
    nnx.pop(state.model, nnx.Intermediate)
    graph, params, rest = nnx.split(state.model, nnx.Param, ...)

    def loss(params, rest):
        local = nnx.merge(graph, params, rest, copy=True)
        value, _ = train.loss_fn(local, config, data, None, None, is_train=True)
        return value, nnx.state(local, nnx.Not(nnx.Any(nnx.Param, nnx.Intermediate)))

    optimizer = state.optimizer
    one = js.train_step(loss, optimizer.tx, has_aux=True)
    params, opt_state, value, rest = one(params, nnx.as_pure(optimizer.opt_state), rest)
    nnx.update(state.model, params, rest)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
    optimizer.step[...] += 1
    metrics = {"scalar": {"learning/loss": value}, "scalars": {}}
    return nnx.state(state, nnx.Not(nnx.Intermediate)), metrics


def settings(vocabulary, steps):
    base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    own = {
        "run_name": "rows",
        "base_output_directory": tempfile.mkdtemp(),
        "enable_checkpointing": False,
        "enable_goodput_recording": False,
        "skip_jax_distributed_system": True,
        "dataset_type": "synthetic",
        "steps": steps,
        "learning_rate": 1e-3,
        "warmup_steps_fraction": 0.2,
        "vocab_size": vocabulary,
        "logits_via_embedding": False,
        "gradient_clipping_threshold": 0,
        "base_emb_dim": 32,
        "base_num_query_heads": 2,
        "base_num_kv_heads": 2,
        "head_dim": 16,
        "base_mlp_dim": 64,
        "base_num_decoder_layers": 2,
        "max_target_length": 32,
        "per_device_batch_size": 2,
        "attention": "dot_product",
        "dtype": "float32",
    }
    return pyconfig.initialize(["", str(base), *(f"{k}={v}" for k, v in own.items())])


def trained(config, step):
    """The losses of all steps, and the seconds of a step."""
    _, _, shardings, _, mesh, _, tokens, _, _, _, state = train_utils.setup_train_loop(
        config, None
    )
    graph, state = nnx.split(state)
    of_params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    jitted, _ = train_utils.jit_train_and_eval_step(
        config, graph, mesh, state, shardings, step, params_shardings=of_params
    )
    losses, seconds = [], []
    with jax.set_mesh(mesh), partitioning.axis_rules(config.logical_axis_rules):
        for _ in range(config.steps):
            batch = next(tokens)
            start = time.perf_counter()
            state, metrics = jitted(state, batch)
            losses.append(float(metrics["scalar"]["learning/loss"]))
            seconds.append(time.perf_counter() - start)
    return losses, statistics.median(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    config = settings(args.vocabulary, args.steps)
    wanted, dense = trained(config, train.train_step)
    optimizers.get_optimizer = adamw
    losses, ours = trained(config, step_by_rows)
    apart = max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True))
    print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}, {apart:.0e} from MaxText's")
    print(f"{1e3 * dense:.1f} ms a step as it is, {1e3 * ours:.1f} ms by rows")


if __name__ == "__main__":
    main()
