"""What each of several processes does in ``test_processes.py``; the model, for one too.

    python tests/several_processes.py NUMBER COUNT PORT FUNCTION ARGUMENTS

The function is one of this file, the arguments are JSON, and so is what it prints.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jslices as js

V, D, K = 48, 12, 24
PLACEMENTS = {"replicated": P(), "rows": P("x"), "columns": P(None, "x")}
TX = js.adam(0.1)


# --- the model ------------------------------------------------------------------------


def first_params():
    rng = np.random.default_rng(0)
    return {
        "t": rng.normal(size=(V, D)).astype(np.float32),
        "w": rng.normal(size=D).astype(np.float32),
    }


def batch(step):
    """Ids of which many are equal, some out of range, and what they should give."""
    rng = np.random.default_rng([1, step])
    ids = rng.integers(-2, V // 2, K).astype(np.int32)
    return ids, rng.normal(size=K).astype(np.float32)


def loss(params, ids, wanted):
    rows = js.embedding_lookup(params["t"], ids, mode="clip")
    return ((rows @ params["w"] - wanted) ** 2).mean()


def step_of(**options):
    """One step; the options are those of ``value_and_grad``."""

    @jax.jit
    def step(variables, ids, wanted):
        params, state = variables["params"], variables["state"]
        value, grads = js.value_and_grad(loss, **options)(params, ids, wanted)
        updates, state = TX.update(grads, state, params)
        return {"params": js.apply_updates(params, updates), "state": state}, value

    return step


def on_one_device(steps):
    """The variables and the losses after so many steps."""
    params = jax.tree.map(jnp.asarray, first_params())
    variables, losses, step = {"params": params, "state": TX.init(params)}, [], step_of()
    for number in range(steps):
        variables, value = step(variables, *batch(number))
        losses.append(float(value))
    return variables, losses


# --- a process of several -------------------------------------------------------------


class Run:
    """Training in this process and the others.

    Args:
      placement: how the table lies, a name in ``PLACEMENTS``.
      options: those of ``value_and_grad``.
    """

    def __init__(self, placement, **options):
        self.mesh = jax.make_mesh((jax.device_count(),), ("x",), (AxisType.Auto,))
        self.spec, self.step = PLACEMENTS[placement], step_of(**options)

    def sharding(self, shape):
        """Of an array; the table's state lies as the table."""
        return NamedSharding(self.mesh, self.spec if shape == (V, D) else P())

    def wanted(self):
        """The shapes and shardings of the variables."""
        params = first_params()
        shapes = jax.eval_shape(lambda p: {"params": p, "state": TX.init(p)}, params)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=self.sharding(x.shape)
            ),
            shapes,
        )

    def first(self):
        """The variables before the first step."""
        params = {
            name: jax.make_array_from_callback(
                x.shape, self.sharding(x.shape), x.__getitem__
            )
            for name, x in first_params().items()
        }
        shardings = jax.tree.map(lambda x: x.sharding, self.wanted()["state"])
        return {
            "params": params,
            "state": jax.jit(TX.init, out_shardings=shardings)(params),
        }

    def batch(self, step):
        """Of which this process knows its own part only."""
        size = K // jax.process_count()
        own = slice(jax.process_index() * size, (jax.process_index() + 1) * size)
        sharding = NamedSharding(self.mesh, P("x"))
        return [
            jax.make_array_from_process_local_data(sharding, x[own]) for x in batch(step)
        ]

    def train(self, variables, steps):
        """The variables and the losses after some steps."""
        losses = []
        for number in steps:
            variables, value = self.step(variables, *self.batch(number))
            losses.append(float(value))
        return variables, losses


def error_of(f, *args, **options):
    """What a call raises, as text."""
    try:
        f(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def train_and_save(directory, placements, steps):
    """Trains, saves, and reports the losses."""
    losses = {}
    for placement in placements:
        run = Run(placement)
        variables, losses[placement] = run.train(run.first(), range(steps))
        js.Saver().save(variables, f"{directory}/{placement}")
    return losses


def copy(directory, names):
    """Restores checkpoints onto the devices of this run, and saves them again."""
    for name, placement in names:
        wanted = Run(placement).wanted()
        variables = js.Saver().restore(f"{directory}/{name}", wanted)
        shardings = jax.tree.map(lambda x: x.sharding, variables)
        assert shardings == jax.tree.map(lambda x: x.sharding, wanted)
        js.Saver().save(variables, f"{directory}/{name}-{placement}-{jax.process_count()}")


def all_kinds(directory):
    """Leaves that are no tables: each is written once and comes back as it was."""
    mesh = Run("rows").mesh
    everywhere, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
    number = jax.process_index()

    def spread(x, sharding):
        return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

    devices = 2 * jax.device_count()
    variables = {
        "half": spread(
            np.arange(devices * 3).reshape(devices, 3).astype(jnp.bfloat16), by_rows
        ),
        "step": spread(np.int32(7), everywhere),
        "key": jax.jit(lambda: jax.random.key(5), out_shardings=everywhere)(),
        "keys": jax.jit(
            lambda: jax.random.split(jax.random.key(6), devices), out_shardings=by_rows
        )(),
        "mine": np.full(3, number),
        "local": jnp.full(2, number),
        "epoch": number + 10,
        "name": f"process {number}",
    }
    path = js.Saver().save(variables, f"{directory}/kinds", global_step="step")
    restored = js.Saver().restore(path, variables)
    for name in ("half", "step", "key", "keys"):
        assert restored[name].sharding == variables[name].sharding, name
        assert jax.jit(lambda x, y: (x == y).all())(restored[name], variables[name]), name
    number_of_jax = {"epoch": spread(np.zeros((), np.int8), everywhere)}
    restored["int8"] = js.Saver().restore(path, number_of_jax)["epoch"]
    assert restored["int8"].dtype == np.int8
    shape = jax.ShapeDtypeStruct(
        (3, devices), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "x"))
    )
    restored["reshaped"] = js.Saver(reshape=True).restore(path, {"half": shape})["half"]
    said = {
        n: np.asarray(restored[n]).tolist()
        for n in ("mine", "local", "epoch", "name", "int8")
    }
    return {
        "path": path,
        "reshaped": [
            np.asarray(s.data).tolist() for s in restored["reshaped"].addressable_shards
        ],
        **said,
    }


def main(number, count, port, function, arguments):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(number))
    print(json.dumps(globals()[function](**json.loads(arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])
