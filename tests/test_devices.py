"""Devices that are not here: names, programs compiled for them, what is read of these."""

import importlib.util
import os
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import as_users, cost_on, needs_device
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jslices as js
import jslices.testing
from jslices.__main__ import main
from jslices._proof.cost import (
    accessed,
    cost_of,
    kernels,
    offloads,
    table_copies,
)
from jslices._proof.program import Module
from jslices._proof.targets import GPUS, TPUS, target

HERE = pathlib.Path(__file__).parent
V, K = 200_000, 1_000
S = jax.ShapeDtypeStruct
IDS = S((K,), jnp.int32)


def slowly(*devices):
    """These as cases that CI leaves out: it compiles one of each kind."""
    return [pytest.param(device, marks=pytest.mark.slow) for device in devices]


# --- names -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "",
        "v5",
        "V5E",
        "h100:",
        "v5e:4",
        "v5e:2x2x2",
        "v5p:2x2",
        "v5e:0x2",
        "h100:2x4",
        "h100:-1",
    ],
)
def test_bad_names_list_the_good_ones(name):
    with pytest.raises(ValueError, match=f"no device is called '{name}'") as caught:
        js.testing.devices(name)
    for good in [*TPUS, *GPUS, "v5e:16x16", "v5p:4x4x4", "h100:8"]:
        assert re.search(rf"\b{good}\b", str(caught.value))


def test_more_than_a_host_of_gpus_are_whole_hosts():
    with pytest.raises(ValueError, match="'h100:12': more than 8 are whole hosts of 8"):
        js.testing.devices("h100:12")


def test_without_a_compiler_one_line_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r'for v6e:4x2, .* type: pip install "\.\[tpu\]" in a',
    ):
        js.testing.devices("v6e:4x2")
    if importlib.util.find_spec("jax_cuda13_plugin") is not None:
        pytest.skip("the CUDA plugin is installed")
    with pytest.raises(
        ModuleNotFoundError, match=r'for b200:4, .* type: pip install "\.\[gpu\]" in a'
    ):
        js.testing.devices("b200:4")


@pytest.mark.devices
@pytest.mark.parametrize("name", [*TPUS, *GPUS])
def test_every_device_compiles(name):
    needs_device(name)
    x = S((1000, 128), jnp.float32)
    memory = js.testing.assert_in_place(
        lambda x: x * 2, x, donate_argnums=0, min_bytes=1, device=name
    )
    assert memory.alias_bytes == memory.argument_bytes == x.size * 4


@pytest.mark.devices
@pytest.mark.parametrize(
    "name, count",
    [("v5e:4x4", 16), ("v5e:16x16", 256), ("v5p:2x2x2", 8), ("h100:4", 4), ("h100:64", 64)],
)
def test_several_devices(name, count):
    needs_device(name)
    assert len(js.testing.devices(name)) == count


@pytest.mark.devices
def test_a_topology_that_the_compiler_refuses():
    needs_device("v5e")
    with pytest.raises(ValueError, match=r"called 'v5e:3x5' \(.*\). One device: "):
        js.testing.devices("v5e:3x5")


@pytest.mark.devices
def test_the_process_stays_as_it_was(monkeypatch):
    needs_device("v5e")
    monkeypatch.setenv("TPU_WORKER_ID", "7")
    before, devices = dict(os.environ), jax.devices()
    js.testing.devices("v6e:2x2")
    assert dict(os.environ) == before and jax.devices() == devices
    assert (jnp.arange(3) + 1).devices() == {devices[0]}


# --- proofs ------------------------------------------------------------------------


def step_of(tx):
    def step(params, state, ids):
        loss = lambda params: (jnp.tanh(params["table"][ids]) ** 2).sum()  # noqa: E731
        updates, state = tx.update(js.grad(loss)(params), state, params)
        return js.apply_updates(params, updates), state

    return step


@pytest.mark.devices
@pytest.mark.parametrize("device", ["v5e", *slowly("v6e", "h100")])
def test_a_step_is_proved_for_a_device(device):
    needs_device(device)
    tx = js.adagrad(0.1)
    table = S((1_000_000, 128), jnp.float32)
    params = {"table": table}
    args = params, jax.eval_shape(tx.init, params), IDS
    memory = js.testing.assert_in_place(
        step_of(tx), *args, donate_argnums=(0, 1), device=device
    )
    assert 0 <= memory.alias_bytes - 2 * table.size * 4 < 10_000
    js.testing.assert_no_dense_temporary(
        step_of(tx), *args, donate_argnums=(0, 1), device=device
    )


@pytest.mark.devices
@pytest.mark.parametrize("device", slowly("v5e", "h100"))
def test_a_hidden_layer_reads_no_rows_after_they_are_written(device):
    needs_device(device)
    tx = js.adam(0.1)

    def loss(params, ids):
        rows = params["table"][ids].reshape(-1, 10 * 128)
        return (jax.nn.relu(rows @ params["w"]) @ params["v"]).sum()

    def step(params, state, ids):
        grads = js.grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state

    shapes = {"table": (1_000_000, 128), "w": (1280, 256), "v": (256,)}
    params = {name: S(shape, jnp.float32) for name, shape in shapes.items()}
    args = params, jax.eval_shape(tx.init, params), S((10_000,), jnp.int32)
    js.testing.assert_in_place(step, *args, donate_argnums=(0, 1), device=device)


def add_one(table, ids):
    return table.at[ids].add(1.0)


@pytest.mark.devices
@pytest.mark.parametrize("device", ["v5e", *slowly("v6e")])
def test_tpus_lay_out_short_rows_by_columns(device):
    needs_device(device)
    table = S((1_000_000, 64), jnp.float32)
    wanted = (
        r"args\[0\] float32\[1000000,64\] \(256.0 MB\) is copied, 2 times: the device lays "
        r"it out as \{0,1\}, the step as \{1,0\}, row by row. .*jslices.row_major\(tree\)"
    )
    with pytest.raises(AssertionError, match=wanted):
        js.testing.assert_in_place(add_one, table, IDS, donate_argnums=0, device=device)
    with pytest.raises(AssertionError, match=r"f32\[1000000,64\] \(256.0 MB\) by copy"):
        js.testing.assert_no_dense_temporary(
            lambda table, ids: table[ids], table, IDS, donate_argnums=0, device=device
        )


@pytest.mark.devices
def test_a_struct_keeps_its_layout():
    needs_device("v5e")
    rows = Layout((0, 1))
    here, there = (
        Format(rows, SingleDeviceSharding(device))
        for device in (jax.devices()[0], *js.testing.devices("v5e"))
    )
    table = S((1_000_000, 64), jnp.float32, sharding=here)
    step = jax.jit(add_one, donate_argnums=0, out_shardings=there)
    memory = js.testing.assert_in_place(step, table, IDS, device="v5e")
    assert memory.alias_bytes == 1_000_000 * 128 * 4  # padded to 128 numbers a row
    with pytest.raises(
        AssertionError, match=r"out as \{0,1\}, result as \{1,0\}, row by row"
    ):
        js.testing.assert_in_place(step, S(table.shape, table.dtype), IDS, device="v5e")


@pytest.mark.devices
@pytest.mark.parametrize("device", ["v5e:2x4", "h100:8"])
def test_an_argument_keeps_its_sharding(device):
    needs_device(device)
    axes = {"axis_names": ("data", "model"), "axis_types": (AxisType.Auto,) * 2}
    nowhere = AbstractMesh((2, 4), **axes)
    there = Mesh(np.array(js.testing.devices(device)).reshape(2, 4), **axes)
    memory = []
    for mesh, name in ((nowhere, device), (there, None)):
        table = S((V, 128), jnp.float32, sharding=NamedSharding(mesh, P("model")))
        ids = S((K,), jnp.int32, sharding=NamedSharding(mesh, P()))
        memory.append(
            js.testing.assert_in_place(add_one, table, ids, donate_argnums=0, device=name)
        )
    assert memory[0] == memory[1]
    assert memory[0].alias_bytes == V // 4 * 128 * 4


@pytest.mark.devices
def test_what_has_no_sharding_is_replicated():
    needs_device("h100:8")
    table = np.zeros((1000, 128), np.float32)
    memory = js.testing.assert_in_place(
        add_one, table, IDS, donate_argnums=0, min_bytes=1, device="h100:8"
    )
    assert memory.alias_bytes == table.nbytes


# --- what is read ------------------------------------------------------------------


def program(name):
    return Module((HERE / "programs" / f"{name}.hlo").read_text())


def test_a_program_that_copies_on_another_core():
    module = program("sparse_core")
    copies = {each.name: each for each in module.run() if module.copied(each)}
    assert sorted(copies) == ["copy-start", "copy.1", "copy.2"]
    # One runs on another core, two calls deep; the other copies what was written into it.
    for name in ("copy.1", "copy.2"):
        assert module.origin(copies[name])[0].name == "table"
    written = module.computations["main"].instructions["written"]
    assert module.maker(written)[0].name == "copy.1"
    assert table_copies(module) == 2
    assert kernels(module) == {"copy": 2, "copy-start": 1, "fusion": 1}
    assert offloads(module) == {"copy": 1}
    # Columns as rows, and back: [64, 1000 padded to 1024], [1000, 64 padded to 128]. The
    # rows are moved to fast memory, read, and read and written in the table.
    relaid, rows, ids = (64 * 1024 + 1000 * 128) * 4, 16 * 128 * 4, 128 * 4
    assert accessed(module) == 2 * relaid + 2 * rows + 3 * rows + ids


def test_a_program_that_moves_a_table_into_fast_memory_in_pieces():
    module = program("fast_memory")
    copies = {each.name: each for each in module.run() if module.copied(each)}
    assert sorted(copies) == ["copy-start", "joined"]
    for each in copies.values():
        assert module.origin(each)[0].name == "table"
    assert table_copies(module) == 2
    assert kernels(module) == {"slice-start": 2, "fusion": 1, "copy-start": 1}
    assert accessed(module) == 4 * 1000 * 128 * 4 + 3 * 16 * 128 * 4 + 128 * 4


def test_the_cost_of_a_program_that_runs_here():
    x = S((1000, 256), jnp.float32)
    cost = cost_of(as_users(lambda x: x * 2 + 1, donate_argnums=0).lower(x).compile())
    assert cost.argument_bytes == x.size * 4 and cost.temp_bytes == 0
    assert cost.accessed_bytes == 2 * x.size * 4
    assert cost.kernels == {"fusion": 1} and not cost.copies
    assert not cost.loops and not cost.collectives

    def rows(x, ids):
        return jax.lax.fori_loop(0, 3, lambda _, x: x.at[ids].add(x[ids]), x)

    cost = cost_of(as_users(rows, donate_argnums=0).lower(x, S((8,), jnp.int32)).compile())
    assert len(cost.loops) == 1 and not cost.copies
    assert 8 * 256 * 4 < cost.accessed_bytes < 20 * 8 * 256 * 4


def cast(table, ids):
    return table.astype(jnp.bfloat16)[ids]


def scaled(table, ids):
    return jax.nn.relu(table * 3)[ids]


@pytest.mark.parametrize(("look_up", "itemsize"), [(cast, 2), (scaled, 4)])
@pytest.mark.parametrize("device", [None, pytest.param("h100", marks=pytest.mark.devices)])
def test_rows_of_what_is_made_of_a_table_where_they_are_read(look_up, itemsize, device):
    """And all of it if all is needed as well."""
    table, ids = S((100_000, 64), jnp.float32), S((16,), jnp.int32)

    def accessed(step):
        if device is not None:
            return cost_on(device, step, table, ids).accessed_bytes
        return cost_of(as_users(step).lower(table, ids).compile()).accessed_bytes

    assert accessed(look_up) == 16 * 64 * (4 + itemsize) + 16 * 4
    both = accessed(lambda *args: (look_up(*args), (args[0] * 3 + 1).sum()))
    assert both - accessed(look_up) > table.size * 4
    written = accessed(lambda table, ids: (table * 3).at[ids].add(1.0))
    assert written >= 2 * table.size * 4


@pytest.mark.devices
@pytest.mark.parametrize("device", ["v5e:2x4", "h100:8", *slowly("v6e:2x4")])
def test_collectives_of_a_device(device):
    needs_device(device)
    several = target(device)
    (name,) = several.mesh.axis_names

    def exchange(x):  # [64, 512] on each of 8 devices
        return (
            jax.lax.psum(x, name),
            jax.lax.all_gather(2 * x, name),
            jax.lax.psum_scatter(3 * x, name, tiled=True),
            jax.lax.all_to_all(4 * x, name, 0, 0, tiled=True),
            jax.lax.ppermute(5 * x, name, [(n, n ^ 1) for n in range(8)]),
        )

    spread = jax.shard_map(
        exchange, mesh=several.mesh, in_specs=P(name), out_specs=P(name), check_vma=False
    )
    x = several.place(S((8 * 64, 512), jnp.float32), by_rows=True)
    own = 64 * 512 * 4
    found = cost_of(jax.jit(spread).lower(x).compile()).collectives
    assert sorted((each.kind, each.nbytes, each.received) for each in found) == [
        ("all-gather", 8 * own, 7 * own),
        ("all-reduce", own, 2 * own * 7 // 8),
        ("all-to-all", own, own * 7 // 8),
        ("collective-permute", own, own),
        ("reduce-scatter", own // 8, own * 7 // 8),
    ]


@pytest.mark.devices
def test_kernels_of_a_gpu():
    table, rows = S((V, 64), jnp.float32), S((K, 64), jnp.float32)
    one = cost_on("h100", lambda x: jnp.tanh(x) * 2, table, donate_argnums=0)
    assert sum(one.kernels.values()) == 1 and one.accessed_bytes == 2 * V * 64 * 4
    assert one.seconds is None and one.xla_accessed_bytes is None

    def add(x, ids, rows):
        return x.at[ids].add(rows, unique_indices=True)

    added = cost_on("h100", add, table, IDS, rows, donate_argnums=0)
    assert sum(added.kernels.values()) == 1 and not added.copies
    assert added.accessed_bytes == 3 * K * 64 * 4 + K * 4


@pytest.mark.devices
def test_the_estimate_of_a_tpu():
    table = S((V, 128), jnp.float32)
    cost = cost_on("v5e", lambda x: x * 2, table)
    # 2 * 102.4 MB at 819 GB/s are 0.25 ms.
    assert cost.xla_accessed_bytes == cost.accessed_bytes == 2 * table.size * 4
    assert 0.2e-3 < cost.seconds < 0.4e-3


@pytest.mark.devices
def test_the_page_of_accelerators():
    page = (HERE.parent / "docs" / "accelerators.md").read_text()
    placed, block, compiled = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    names = {}
    exec(placed, names)
    assert names["state"].mu["table"].shape == (10_000, 64)
    exec(block, names)
    for device in re.findall(r'device="(\w+)"', block):
        needs_device(device)
    names["test_step"]()
    exec(compiled, names)
    table = jax.ShapeDtypeStruct((10**6, 16), jnp.float32)
    args = {"table": table}, jax.eval_shape(names["tx"].init, {"table": table}), IDS
    assert names["bytes_of_temporaries"](js.testing.devices("v5e")[0], *args) < 10**6


# --- bench -------------------------------------------------------------------------


@pytest.fixture
def bench(capsys):
    def run(*arguments):
        code = main(["bench", *arguments])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def figures(out):
    """``{name: [row gradients, dense gradients, ratio]}``."""
    lines = (re.split(r"  +", line) for line in out.splitlines())
    return {cells[0]: cells[1:] for cells in lines if len(cells) == 4}


def test_bench_for_a_device_that_there_is_not(bench):
    code, out, err = bench("--device", "v5")
    assert (
        code == 2
        and not out
        and err.startswith("error: no device is called 'v5'. One device")
    )


def test_bench_of_an_optimizer_without_an_exact_form(bench):
    code, out, err = bench("--optimizer", "adafactor", "--untouched", "exact")
    assert code == 2 and not out and "there is no exact form" in err


@pytest.mark.devices
@pytest.mark.parametrize("device", ["v5e", *slowly("h100")])
def test_bench_for_a_device(bench, device):
    needs_device(device)
    code, out, err = bench(
        *("--rows", "1e6", "--dim", "128", "--ids", "1e3"),
        *("--optimizer", "adagrad", "--device", device),
    )
    assert code == 0, err
    assert f"compiled for {device} (" in out and "; nothing was run" in out
    table = figures(out)
    assert table["arguments"][:2] == ["1.0 GB", "1.0 GB"]  # 2 * 1e6 * 128 * 4 bytes
    assert table["table-sized copies"][:2] == ["0", "0"]
    assert float(table["bytes accessed"][2]) > 10
    rows, dense = (int(x) for x in table["kernels"][:2])
    kinds = re.findall(r"gradients: kernels: (.*)", out)
    assert [sum(map(int, re.findall(r"\d+", x))) for x in kinds] == [rows, dense]
    assert (table["ms by XLA's estimate"] == ["-"] * 3) == (device == "h100")


@pytest.mark.devices
def test_bench_for_several_devices(bench):
    needs_device("h100:8")
    sizes = ("--rows", "100001", "--dim", "64", "--ids", "1e3", "--optimizer", "sgd")
    code, out, err = bench(*sizes, "--device", "h100:8")
    assert code == 0, err
    assert "table 100,008 x 64" in out and "on each of 8 devices 12,501 rows" in out
    assert figures(out)["arguments"][0] == "3.2 MB"  # 100,008 / 8 * 64 * 4 bytes
    count = int(figures(out)["collectives"][0])
    shown = re.search(r"row gradients: collectives: (.*)", out)[1]
    assert sum(int(x) for x in re.findall(r"(\d+) [a-z]", shown)) == count > 0


@pytest.mark.devices
@pytest.mark.parametrize("untouched", ["exact", *slowly("lazy")])
def test_bench_for_several_devices_sends_rows_to_their_owners(bench, untouched):
    needs_device("v5e:2x4")
    sizes = ("--rows", "1e5", "--dim", "128", "--ids", "1e3", "--untouched", untouched)
    code, out, err = bench(*sizes, "--device", "v5e:2x4")
    assert code == 0, err
    assert "125 of the ids" in out and 'jslices.Exchange("devices", overflow="nan")' in out
    # Room for 32 ids of each pair: 7 * 32 * (4 + 2 * 512) bytes, and the weights' gradient.
    received = figures(out)["a device receives"][0]
    assert received.endswith(" KB") and 230 < float(received[:-3]) < 240


@pytest.mark.devices
@pytest.mark.parametrize(
    "device, sent", [("v5p", {"gather": 1}), ("tpu7x", {"gather": 1, "scatter": 1})]
)
def test_what_is_sent_to_sparse_cores(device, sent):
    """Reading and adding rows, by itself; never what sets them."""
    needs_device(device)

    def add(table, ids, rows):
        return table[ids], table.at[ids].add(rows)

    def write(table, ids, rows):
        return table.at[ids].set(rows)

    args = S((10**6, 128), "float32"), S((10**4,), "int32"), S((10**4, 128), "float32")
    assert js.testing.offloads(add, *args, device=device) == sent
    assert js.testing.offloads(write, *args, device=device) == {}


@pytest.mark.devices
def test_bench_of_what_does_not_fit(bench):
    needs_device("v5e")
    sizes = ("--rows", "2e7", "--dim", "128", "--ids", "1e3", "--optimizer", "sgd")
    code, out, err = bench(*sizes, "--device", "v5e")
    assert code == 0, err
    assert "dense gradients: cannot be compiled: RESOURCE_EXHAUSTED" in out
    assert figures(out)["table-sized copies"] == ["0", "-", "-"]


def test_tables_in_memory_of_the_host_are_refused_with_what_to_type():
    """And by JAX where a user indexes them, as docs/devices.md says."""
    where = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    table = jax.device_put(jnp.ones((9, 2)), where)
    wanted = r"float32\[9, 2\] in memory of the host.*jslices\.HostTable\(shape, tx\)"
    for tx in (js.adam(0.1), js.adam(0.1, untouched="exact"), js.rowwise_adagrad(0.1)):
        with pytest.raises(ValueError, match=rf"tx\.init\(params\): .*'t'.*{wanted}"):
            tx.init({"t": table})
    look_up = lambda table: js.embedding_lookup(table, [1, 2])  # noqa: E731
    for call in (look_up, jax.jit(look_up), js.grad(lambda t: look_up(t).sum())):
        with pytest.raises(ValueError, match=rf"embedding_lookup.*{wanted}"):
            call(table)
    with pytest.raises(ValueError, match="memory_space of all inputs"):
        table[jnp.array([1, 2])]
    back = jax.device_put(table, jax.memory.Space.Device)
    assert look_up(back).shape == (2, 2) and js.adam(0.1).init(back).mu.shape == (9, 2)
