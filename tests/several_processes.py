"""What each of several processes does in ``test_processes.py``; the model, for one too.

Each calls :func:`be_one` with the name of a function, whose arguments and what it prints
are JSON.
"""

import contextlib
import faulthandler
import functools
import io
import json
import os
import pathlib
import re
import resource
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jslices as js
import jslices.checkpoint
from jslices import dynamic

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


@functools.cache
def step_of(plan=None):
    """One step, of rows that travel by the plan of an ``Exchange``; None for none."""
    options = {} if plan is None else {"exchange": {"t": js.Exchange("x", plan)}}

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
      plan: that of an ``Exchange``; None for none.
    """

    def __init__(self, placement, plan=None):
        self.mesh = jax.make_mesh((jax.device_count(),), ("x",), (AxisType.Auto,))
        self.spec, self.step = PLACEMENTS[placement], step_of(plan)

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


def train_and_save(directory, ways, steps):
    """Trains and saves in several ways, placement and plan, and reports the losses."""
    losses = {}
    for placement, plan in ways:
        run, name = Run(placement, plan), f"{placement}-{plan}"
        variables, losses[name] = run.train(run.first(), range(steps))
        js.Saver().save(variables, f"{directory}/{name}")
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


def keyed(steps):
    """The rows of ids that come and go, and who owns rows at last, here and elsewhere."""
    mesh, rows = Run("rows").mesh, []
    by_rows = NamedSharding(mesh, P("x"))
    ids = dynamic.id_map(32, devices=4, sharding=by_rows)
    assert sum(x.data.size for x in ids.low.addressable_shards) < ids.low.size
    admit = jax.jit(lambda ids, batch: ids.admit(batch, exchange=js.Exchange("x")))
    size, own = K // jax.process_count(), jax.process_index()
    for step in range(steps):
        wide = dynamic.wide_ids(keyed_batch(step)[own * size :][:size])
        place = functools.partial(jax.make_array_from_process_local_data, by_rows)
        ids, out = admit(ids, jax.tree.map(place, wide))
        rows.append(multihost_utils.process_allgather(out.rows, tiled=True).tolist())
    refused = error_of(ids.export)
    ids = multihost_utils.process_allgather(ids, tiled=True)
    return {"rows": rows, "owners": [x.tolist() for x in ids.export()], "refused": refused}


def keyed_batch(step):
    return np.random.default_rng(step).zipf(1.3, K).astype(np.int64) % 2**20 * 2**40 + step


def page(directory):
    """What docs/sharding.md says, up to another number of steps each time."""
    text = pathlib.Path(__file__).parent.parent.joinpath("docs", "sharding.md").read_text()
    first, *others = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    names = {}
    for block in [first.split("\nids, labels =")[0], *others[-3:]]:
        exec(block, names)
    said = []
    for steps in (2, 4):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            names["train"](directory, steps, every=2)
        said += [float(line.split()[1]) for line in printed.getvalue().splitlines()]
    state = js.adam(1e-3).init({"table": jnp.zeros((8_000, 64), device=names["by_rows"])})
    assert {x.sharding for x in jax.tree.leaves(state) if x.ndim} == {names["by_rows"]}
    return {"losses": said}


# --- what goes wrong ------------------------------------------------------------------


@contextlib.contextmanager
def full_disk():
    """What is written in this process ends after a few bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def failing(directory, other):
    """What is raised where one process fails, and what each of them sees afterwards."""
    run, own = Run("rows"), jax.process_index()
    variables, _ = run.train(run.first(), range(1))
    everywhere = NamedSharding(run.mesh, P())
    variables["key"] = jax.jit(lambda: jax.random.key(5), out_shardings=everywhere)()
    w, path, saver = variables["params"]["w"], f"{directory}/m", js.Saver(max_to_keep=1)
    saver.save(variables, path, 0)
    (last,) = saver.last_checkpoints
    saves = {  # what one process saves, and where
        "an unsaveable leaf": ({"a": object(), **variables}, path),
        "no such directory": (variables, f"{other}/missing/m"),
        "a path that is taken": (variables, f"{other}/m"),
        "another directory": (variables, f"{other}/elsewhere/m"),
        "another name": (variables, f"{directory}/n"),
        "one variable more": ({"a": 1, **variables}, path),
        "another shape": ({**variables, "key": w}, path),
        "a full disk": (variables, path),
    }
    said, seen = {}, []
    for name, odd in saves.items():
        for number in range(jax.process_count()):
            tree, where = odd if own == number else (variables, path)
            is_full = own == number and name == "a full disk"
            with full_disk() if is_full else contextlib.nullcontext():
                said[f"{name}, {number}"] = error_of(saver.save, tree, where, 1)
            seen.append(sorted(os.listdir(directory)))
            assert saver.last_checkpoints == [last]
    js.Saver(max_to_keep=0).save({**variables, "local": "x" * (own + 1) * 9999}, path, 2)
    for name, odd in {"no checkpoint": None, "another one": f"{path}-2"}.items():
        for number in range(jax.process_count()):
            error = error_of(saver.restore, odd if own == number else last, variables)
            said[f"{name}, {number}"] = error
    if own == 0:
        file = pathlib.Path(f"{path}-2-00001-of-00002")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    saver.restore(last, variables)
    said["a damaged shard, 1"] = error_of(saver.restore, f"{path}-2", variables)
    saver.save(variables, path, 3)
    return {"said": said, "seen": seen, "at last": sorted(os.listdir(directory))}


def meet(fate):
    """What becomes of this process, at once or in the next save."""

    def end(*_):
        print(json.dumps({"met": time.time()}), flush=True)
        if fate == "asleep":
            time.sleep(1000)
        os.kill(os.getpid(), signal.SIGSTOP if fate == "stopped" else signal.SIGKILL)

    def rename_and_end(*paths):
        replace(*paths)
        end()

    if fate == "killed as it writes":
        os.pwrite = end
    elif fate == "killed as it renames":  # after the first of three files
        replace, os.replace = os.replace, rename_and_end
    else:
        end()


def resume(directory, plan, until, fate=None, process=0, step=0, patience=None):
    """Trains from the last checkpoint on, saves every step, and prints the losses.

    Args:
      directory: of the checkpoints.
      plan: as for ``Run``.
      until: the number of steps.
      fate: what a process meets in a step: ``"killed"``, ``"stopped"`` or ``"asleep"``; or,
        in the save after it, ``"killed as it writes"`` or ``"killed as it renames"``.
      process: its number.
      step: that step.
      patience: seconds for a step, after which a process ends itself.
    """
    run, saver = Run("rows", plan), js.Saver()
    last = js.checkpoint.latest_checkpoint(directory)
    if last is None:
        tree = {"step": 0, "variables": run.first()}
    else:
        tree = saver.restore(last, {"step": 0, "variables": run.wanted()})
    for number in range(tree["step"], until):
        if patience is not None:
            faulthandler.dump_traceback_later(patience, exit=True)
        if fate is not None and (jax.process_index(), number) == (process, step):
            meet(fate)
        variables, losses = run.train(tree["variables"], [number])
        print(json.dumps({"step": number, "loss": losses[0]}), flush=True)
        tree = {"step": number + 1, "variables": variables}
        saver.save(tree, f"{directory}/m", "step")


def be_one(number, count, port, function, arguments, options):
    """One of so many processes; the options are those of ``initialize``."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, number, **options)
    report = globals()[function](**arguments)
    if report is not None:
        print(json.dumps(report))
