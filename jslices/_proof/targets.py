"""Compilation targets: devices that JAX compiles for without having them.

The compiler comes with a Python package and needs no device: the compiled program, its
memory, layouts, kernels and collectives are those of the real one.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format
from jax.sharding import AxisType, Mesh, Sharding, SingleDeviceSharding

from jslices._install import install_command

AXIS = "devices"  #: of a target's mesh


class Gpu(NamedTuple):
    """What the compiler needs to know of a GPU; public figures of the makers."""

    title: str
    compute_capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    clock_ghz: float
    threads_per_core: int
    shared_kib_per_core: int
    cache_mib: int
    memory_gib: int
    gigabytes_per_second: int


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 2048, 164, 40, 80, 2039),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 2048, 228, 50, 80, 3352),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 1.98, 2048, 228, 50, 141, 4800),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 128, 1.965, 2048, 228, 126, 180, 8000),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 128, 2.04, 1536, 100, 48, 24, 300),
}
GPUS_A_HOST = 8
#: The chips of the smallest topology that all releases of libtpu know.
TPUS = {"v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "tpu7x": "2x2x1"}
#: Without these libtpu queries the cloud around it, complains if there is none, and serves
#: one process at a time.
TPU_VARIABLES = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
NAMES = (
    f"One device: {', '.join([*TPUS, *GPUS])}. Several: v5e:16x16, v6e:4x4 (chips along "
    "the two axes of a pod), v5p:4x4x4, tpu7x:2x2x1 (three axes), h100:8, h100:64 (GPUs, "
    f"{GPUS_A_HOST} a host)"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices that JAX compiles for."""

    name: str  #: as it was given: ``v5e``, ``h100:8``.
    devices: tuple[jax.Device, ...]  #: JAX's devices, which run nothing.

    @property
    def mesh(self) -> Mesh:
        """All devices along one axis."""
        return Mesh(np.array(self.devices), (AXIS,), axis_types=(AxisType.Auto,))

    def place(self, tree: Any, by_rows: Any = False) -> Any:
        """The tree with each array as a ``ShapeDtypeStruct`` on these devices.

        An array sharded over a mesh of as many devices, abstract ones or others, keeps axes
        and specification. Other arrays are divided along their first axis if ``by_rows``, a
        bool or a tree of bools, says so, else replicated. A struct keeps a layout it names.
        """
        rows = jax.tree.broadcast(by_rows, tree)
        return jax.tree.map(self._placed, tree, rows)

    def _placed(self, x: Any, by_rows: bool) -> Any:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            return x
        sharding = self._sharding(getattr(x, "sharding", None), by_rows)
        layout = x.format.layout if isinstance(x, jax.ShapeDtypeStruct) else None
        placed = sharding if layout is None else Format(layout, sharding)
        weak = getattr(x, "weak_type", False)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed, weak_type=weak)

    def _sharding(self, sharding: Any, by_rows: bool) -> Sharding:
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        mesh = getattr(sharding, "mesh", None)
        if mesh is None or mesh.size != len(self.devices):
            return jax.NamedSharding(self.mesh, jax.P(*[AXIS] * by_rows))
        devices = np.array(self.devices).reshape(mesh.axis_sizes)
        own = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        return jax.NamedSharding(own, sharding.spec)


@functools.cache
def target(name: str) -> Target:
    """The devices of a name: ``v5e``, ``h100``, ``v5e:16x16``, ``h100:8``.

    Raises:
      ValueError: for other names; lists the good ones.
      ModuleNotFoundError: if the compiler is not installed; says what to type.
    """
    kind, colon, size = name.partition(":")
    sides = [int(side) for side in size.split("x")] if _SIDES.fullmatch(size) else []
    if kind in TPUS and (not colon or len(sides) == TPUS[kind].count("x") + 1):
        return Target(name, _tpus(name, f"{kind}:{size or TPUS[kind]}"))
    if kind in GPUS and (not colon or len(sides) == 1):
        return Target(name, _gpus(name, GPUS[kind], *sides or [1]))
    raise _unknown(name)


_SIDES = re.compile(r"[1-9]\d{0,4}(x[1-9]\d{0,4})*")


def _unknown(name: str, why: str = "") -> ValueError:
    return ValueError(f"no device is called {name!r}{why}. {NAMES}")


def _tpus(name: str, topology: str) -> tuple[jax.Device, ...]:
    if importlib.util.find_spec("libtpu") is None:
        raise _missing(name, "libtpu", "tpu")
    jax.devices()  # a TPU that is here starts with the user's own variables
    with _set_for_a_moment(TPU_VARIABLES):
        try:
            description = topologies.get_topology_desc(topology, "tpu")
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("INVALID_ARGUMENT"):
                raise
            raise _unknown(name, f" ({error})") from None
    devices = tuple(description.devices)
    return devices if name == topology else devices[:1]


def _gpus(name: str, gpu: Gpu, count: int) -> tuple[jax.Device, ...]:
    if count > GPUS_A_HOST and count % GPUS_A_HOST:
        raise _unknown(name, f": more than {GPUS_A_HOST} are whole hosts of {GPUS_A_HOST}")
    each = min(count, GPUS_A_HOST)
    options = {"topology": f"1x{count // each}x{each}", "target_config": _description(gpu)}
    try:
        description = topologies.get_topology_desc(platform="cuda", **options)
    except NotImplementedError:
        what = "the CUDA plugin of JAX, which starts without a GPU if JAX_PLATFORMS=cpu"
        raise _missing(name, what, "gpu") from None
    return tuple(description.devices)


def _missing(name: str, what: str, extra: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"to compile for {name}, JAX needs {what}, and does not find it; type: "
        f"{install_command(extra)}"
    )


@contextlib.contextmanager
def _set_for_a_moment(variables: dict[str, str]) -> Iterator[None]:
    """Sets environment variables that the user has not set, and removes them again."""
    new = {key: value for key, value in variables.items() if key not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for key in new:
            os.environ.pop(key, None)


def _description(gpu: Gpu) -> str:
    """The GPU in the text form of XLA's ``GpuTargetConfigProto``."""
    major, minor = gpu.compute_capability
    kib = 1 << 10
    facts = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": gpu.threads_per_core,
        "shared_memory_per_block": 48 * kib,
        # The system uses 1 KiB of each block.
        "shared_memory_per_block_optin": (gpu.shared_kib_per_core - 1) * kib,
        "shared_memory_per_core": gpu.shared_kib_per_core * kib,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.fpus_per_core,
        "clock_rate_ghz": gpu.clock_ghz,
        "l2_cache_size": gpu.cache_mib * kib**2,
        "device_memory_size": gpu.memory_gib * kib**3,
        "memory_bandwidth": gpu.gigabytes_per_second * 10**9,
    }
    lines = "\n".join(f"  {key}: {value}" for key, value in facts.items())
    return (
        f"gpu_device_info {{\n{lines}\n  cuda_compute_capability "
        f"{{ major: {major} minor: {minor} }}\n}}\n"
        f'platform_name: "CUDA"\ndevice_description_str: "{gpu.title}"\n'
        "dnn_version_info { major: 9 minor: 10 patch: 0 }\n"
    )
