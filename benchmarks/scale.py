"""What a step of a table that is split over devices sends, on paper and compiled.

    pip install ".[tpu,gpu]"
    python benchmarks/scale.py
    python benchmarks/scale.py --devices cpu:8 --rows 1e6

For each way of a step, the bytes that a device receives by formula, those that the compiled
program says, and the memory of a device. ``cpu:8`` are 8 fake devices of this machine; of
the others none need be here, and nothing is run. Every device looks up ``--ids`` ids.
"""

import argparse
import math
import os
import time
import warnings

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import jslices as js
from jslices._densify import human_bytes
from jslices._proof.cost import cost_of
from jslices._proof.targets import target

# Devices, rows, their length and dtype, and an optimizer whose state they have room for.
CASES = [
    ("cpu:8", 2e6, 128, "float32", "adam"),
    ("v5e:16x16", 1e9, 128, "float32", "adam"),
    ("v5e:16x16", 1e10, 128, "bfloat16", "rowwise_adagrad"),
    ("h100:64", 1e9, 128, "float32", "adam"),
    ("h100:64", 1e10, 32, "float32", "adam"),
]
IDS = 1024
INT32_MAX = 2**31 - 1


def ways(axis):
    """How the gradient of a step is made: by ``js.grad`` with an exchange, or otherwise."""

    def exchanged(plan, overflow):
        exchange = {"t": js.Exchange(axis, plan, overflow=overflow)}
        return lambda loss: js.grad(loss, exchange=exchange)

    return {
        "all_to_all": exchanged("all_to_all", "nan"),
        "all_to_all, or gather": exchanged("all_to_all", "gather"),
        "gather": exchanged("gather", "gather"),
        "no exchange": js.grad,
        "dense gradients": jax.grad,
    }


def on_paper(devices, ids, row, index, state, capacity=2.0):
    """What a device receives in a step, at least and at most, for each way.

    It looks up ``ids`` ids of ``index`` bytes, their rows have ``row`` bytes, and what the
    optimizer keeps for one has ``state``. With an exchange an id travels once, a row once
    and its gradient once, and a pair of devices has room for C ids. Without one XLA sums
    what each device has of all rows that are looked up, which takes two passes round the
    ring, and so it does with the state of these.
    """
    others, room = devices - 1, min(ids, math.ceil(capacity * ids / devices))
    swapped, gathered = (others * n * (index + 2 * row) for n in (room, ids))
    summed = others * ids * (index + 3 * row)
    return {
        "all_to_all": (swapped, swapped),
        "all_to_all, or gather": (swapped, gathered),
        "gather": (gathered, gathered),
        "no exchange": (summed + others * ids * (index + 2 * state),) * 2,
        "dense gradients": (summed, summed),
    }


def loss(params, ids):
    return (js.embedding_lookup(params["t"], ids).astype(jnp.float32) ** 2).mean()


def compiled(name, params, optimizer, ids, grad):
    """The cost of a step on devices ``name``, by a ``grad`` of those in :func:`ways`."""
    devices, mesh = place(name)
    rows = params["t"].shape[0]

    def step(params, state, ids):
        return optimizer.apply(grad(loss)(params, ids), state, params)

    def split(x):
        spec = jax.P(mesh.axis_names) if x.ndim else jax.P()
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    given = jax.ShapeDtypeStruct((ids * devices,), "int64" if rows > INT32_MAX else "int32")
    state = jax.eval_shape(optimizer.init, params)
    arguments = jax.tree.map(split, (params, state, given))
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return cost_of(jitted.lower(*arguments).compile())


def place(name):
    """How many devices there are, and their mesh."""
    if name.startswith("cpu"):
        count = int(name.partition(":")[2] or 1)
        kinds = {"axis_types": (jax.sharding.AxisType.Auto,)}
        mesh = jax.make_mesh((count,), ("x",), devices=jax.devices()[:count], **kinds)
        return count, mesh
    found = target(name)
    return len(found.devices), found.mesh


def lines(name, rows, dim, dtype, optimizer, ids):
    """The lines of a case, one for each way."""
    devices, mesh = place(name)
    rows = js.padded_rows(int(rows), devices)
    params = {"t": jax.ShapeDtypeStruct((rows, dim), dtype)}
    tx = getattr(js, optimizer)(0.1)
    table, state = bytes_of(params), bytes_of(jax.eval_shape(tx.init, params))
    index = 8 if rows > INT32_MAX else 4
    formula = on_paper(devices, ids, table // rows, index, state // rows)
    (axis,) = mesh.axis_names
    for way, grad in ways(axis).items():
        start = time.perf_counter()
        try:
            with jax.enable_x64(rows > INT32_MAX):
                cost = compiled(name, params, tx, ids, grad)
        except jax.errors.JaxRuntimeError as error:
            cells = [str(error).partition("\n")[0][:60], "", ""]
        else:
            cells = [
                between(cost.traffic.least, cost.traffic.most),
                human_bytes(cost.argument_bytes),
                human_bytes(cost.temp_bytes),
            ]
        case = [name, f"{rows:.1e}", f"{dtype}[{dim}], {optimizer}", way]
        took = f"{time.perf_counter() - start:.0f}"
        yield [*case, between(*formula[way]), *cells, took]


def bytes_of(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def between(least, most):
    least, most = human_bytes(least), human_bytes(most)
    return least if least == most else f"{least} to {most}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--devices", nargs="+", help="only these of the cases")
    add("--rows", type=float, nargs="+", help="instead of those of the cases")
    add("--ids", type=int, default=IDS, help="that each device looks up")
    options = parser.parse_args()
    warnings.simplefilter("ignore", js.DensificationWarning)
    warnings.simplefilter("ignore", js.PerformanceHint)
    heading = ["devices", "V", "rows", "way", "received, by formula", "compiled"]
    heading += ["table and state", "temporaries", "compiled in, s"]
    print(f"| {' | '.join(heading)} |", f"|{'---|' * len(heading)}", sep="\n")
    for name, rows, *rest in CASES:
        if options.devices and name not in options.devices:
            continue
        for count in options.rows or [rows]:
            for cells in lines(name, count, *rest, options.ids):
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
