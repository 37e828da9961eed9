"""Hints that make a program faster, and the memory that a process keeps.

On a CPU under Linux the memory of temporaries can stay from one step to the next.
"""

import collections
import ctypes
import functools
import math
import os
import platform
import re
import warnings
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from jslices import _jax
from jslices._densify import human_bytes, warn_at_line
from jslices._place.boundary import (
    device_of,
    is_row_major,
    is_tall,
    platform_of,
    row_major_p,
)
from jslices._typing import Aval, Leaf

# From glibc's <malloc.h>.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8
#: What a step on a CPU keeps: arrays below 128 MiB, which glibc would map anew from 32 on,
#: or below, by luck of their size; larger tables are mapped, and go when they are freed.
#: A thread has heaps of 64 MiB, and gives an empty one back if there is that much room.
_OF_STEPS = (
    (_MMAP_THRESHOLD, 128 << 20),
    (_TRIM_THRESHOLD, 512 << 20),
    (_TOP_PAD, 64 << 20),
)

#: Larger arrays are hinted at where they are copied or used as a whole.
HINT_BYTES = 16 * 10**6
#: So are gradients of so many bytes: temporaries are twice as large, and those of more than
#: 64 MiB are mapped anew in each step, whatever it keeps (benchmarks/page_faults.py), which
#: then takes 1.6 times as long (the median of 12 cells of docs/speed.md).
UNKEPT_BYTES = 30 * 10**6
#: Rows of a tile on a TPU. Of 16-bit numbers 16 fill one, yet 8 suffice.
TILE_ROWS = 8
#: A TPU lays out by rows what is a multiple of so many numbers long.
LANES = 128
#: TPUs that gather rows by SparseCores, by JAX's names: v5p, v6e, tpu7x.
SPARSE_CORES = {"TPU v5", "TPU v6 lite", "TPU7x"}
#: Smaller tables, in numbers with the padding, XLA may move into fast memory.
LARGE_TABLE = 2**25
#: So many tables of one row shape compile in 1.6 (lazy) and 2.4 (exact) times the time of
#: one array, 26 in 2.2 and 4.5 times (benchmarks/many_tables.py, on a CPU).
MANY_TABLES = 8
#: If 1 in the environment, the import of jslices calls :func:`keep_memory`; if 0, steps
#: leave ``malloc`` as it is.
VARIABLE = "JSLICES_KEEP_MEMORY"

#: Of large steps on a CPU whose memory is not kept.
_MEMORY = "memory"
#: What there was a hint about, or needs none: ("dense", shape), gradients of jslices.
hinted: set[Hashable] = set()


class PerformanceHint(UserWarning):
    """A program is right, but one line would make it faster: the text says which.

    Issued at most once in a process for steps that :func:`jslices.keep_memory` would make
    faster, once for each table for which :func:`jslices.row_major`, other sizes or
    :func:`jslices.grad` would help, once for each row shape of eight tables or more that
    :func:`jslices.tables.stack_tables` would put in one array, once for each table of more
    than 16 MB that a step writes and its program got undonated, or that an exact step uses
    as a whole, once for each split table whose rows an exchange would send, and for a
    function whose step is made anew for each call.
    Silence it: ``warnings.simplefilter("ignore", jslices.PerformanceHint)``.
    """


def hint_once(what: Hashable, message: str) -> None:
    """Issues a hint at the user's line, the first time that it is about ``what``."""
    if what in hinted:
        return
    hinted.add(what)
    warn_at_line(message, category=PerformanceHint)


def hint_many_tables(tables: Iterable[tuple[tuple[int, ...], str]]) -> None:
    """Hints at what many tables take to compile, once for each row shape and dtype."""
    for (row, dtype), count in collections.Counter(tables).items():
        if count >= MANY_TABLES:
            shape = ", ".join(map(str, ("V", *row)))
            hint_once(
                ("tables", row, dtype),
                f"a step of {count} tables {dtype}[{shape}] compiles a lookup, a sort and "
                "a step for each of them, of 26 in two to five times the time. In one "
                "array they are one: stacked, unstack = jslices.tables.stack_tables("
                "params, jslices.explain(loss)(params, *batch)), then train lambda p, "
                "*batch: loss(unstack(p), *batch) with the parameters stacked",
            )


def keep_memory() -> None:
    """Lets this process keep memory that it has freed, so that large steps run faster.

    XLA:CPU allocates the temporaries of a program at each execution, and where glibc's
    ``malloc`` asks the operating system for memory every time, the step waits for thousands
    of page faults. A step that is traced for a CPU lets the process keep up to 512 MiB by
    itself, which is enough for temporaries below 64 MiB. For larger ones, gradients of 30
    MB and more, call this: the process then keeps all memory that it has freed and, from
    the first dozen steps on, uses it again. At V = 488,281, D = 128 and 80,125 ids a step
    of AdamW makes 20,190 page faults without it and none with it.

    Call it once, at the start of the program, before JAX computes anything. It affects the
    whole process, NumPy and other libraries included: until it ends, the process keeps the
    most memory that it ever used.

    To get the same without changing the program, run it with
    ``JSLICES_KEEP_MEMORY=1 python train.py``, which the import of jslices reads; or, for a
    process that does not import it, with larger pages:
    ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1``. ``JSLICES_KEEP_MEMORY=0`` leaves ``malloc``
    as it is.

    Raises:
      RuntimeError: if JAX has started its devices, whose threads then have their memory
        already; or if the allocator is not glibc's.

    Example:
      >>> import jslices as js
      >>> js.keep_memory()  # doctest: +SKIP
      >>> import jax.numpy as jnp

    Source: the parameters of ``mallopt`` in the manual of glibc. TensorFlow and PyTorch
    bring allocators of their own for this.
    """
    if platform.libc_ver()[0] != "glibc":
        raise RuntimeError(
            f"keep_memory() sets glibc's malloc, which this {platform.system()} does not "
            "have; leave it out"
        )
    if _jax.has_started_devices():
        raise RuntimeError(
            "keep_memory() came after JAX had started its devices; call it at the start of "
            "the program, before the first array is made"
        )
    mallopt = ctypes.CDLL(None).mallopt
    # Arrays are not mapped one by one, no memory is returned, and all threads share one
    # heap: the heaps of threads are limited to 64 MB, and larger arrays mapped again.
    for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1)):
        if not mallopt(parameter, value):
            raise RuntimeError(f"mallopt({parameter}, {value}) was refused")
    hinted.add(_MEMORY)


@functools.cache
def keep_memory_of_steps() -> None:
    """Let this process keep the memory of steps on a CPU, once one of them is traced.

    Without an effect where the allocator is not glibc's or refuses, and where
    :func:`keep_memory` keeps more already.
    """
    is_off = os.environ.get(VARIABLE) == "0" or _MEMORY in hinted
    if not is_off and platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in _OF_STEPS:
            mallopt(parameter, value)


def keep_memory_if_set() -> None:
    """Calls :func:`keep_memory` if the environment says so; warns if it has no effect."""
    value = os.environ.get(VARIABLE, "")
    if value in ("", "0"):
        return
    if value != "1":
        raise ValueError(f"{VARIABLE} is {value!r}; set it to 1, or to 0 for the default")
    try:
        keep_memory()
    except RuntimeError as error:
        warnings.warn(
            f"{VARIABLE}=1 has no effect: {error}; or import jslices there",
            PerformanceHint,
            stacklevel=2,
        )


def hint_large_step(values: Aval) -> None:
    """Hints, once in a process, at what a large step on a CPU loses without kept memory.

    ``values`` are those of its gradient, of ``UNKEPT_BYTES`` or more.
    """
    if _MEMORY in hinted or platform_of(values) != "cpu":
        return
    large_pages = re.search(r"malloc\.hugetlb=[12]", os.environ.get("GLIBC_TUNABLES", ""))
    if large_pages or platform.libc_ver()[0] != "glibc":
        return
    hint_once(
        _MEMORY,
        f"this step has a gradient of {values.nbytes / 1e6:.0f} MB, and the operating "
        "system maps the temporaries of such a step anew each time: it takes about half as "
        "long again as it could (1.2 to 2.0 times). Call jslices.keep_memory() at the "
        f"start of the program, or run it with {VARIABLE}=1 in the environment",
    )


def hint_dense(grads: Sequence[Any]) -> None:
    """Hints, once for its shape, at the largest of gradients of which none is rows."""
    size = lambda x: 0 if _jax.is_symbolic(x.size) else x.nbytes  # noqa: E731
    x = max((x for x in grads if getattr(x, "ndim", 0) > 1), key=size, default=None)
    if x is not None and size(x) > HINT_BYTES:
        hint_once(
            ("dense", x.shape),
            f"no gradient came as rows, one as an array, {x.dtype}{list(x.shape)}, as from "
            f"jax.grad: a step moves all {human_bytes(x.nbytes)}, as Optax's. For tables "
            "type jslices.value_and_grad; in Keras jslices.keras.row_gradients(model)",
        )


def hint_rows(place: str, shape: tuple[int, ...], row_axes: int, *x: Aval) -> None:
    """Hints, once for each table, at what its rows cost on a TPU. ``x``: arrays on it."""
    length, size = math.prod(shape[row_axes:]), math.prod(shape[:row_axes])
    if _jax.is_symbolic(size):
        return
    kind = getattr(device_of(*x) or jax.devices()[0], "device_kind", "")
    large = kind in SPARSE_CORES and size * LANES >= LARGE_TABLE
    if large and 1 < length <= LANES // 4:
        hint_once(
            ("short rows", place, shape),
            f"the table{place} of shape {shape} has rows of {length} numbers, which a TPU "
            f"pads to {LANES}, in its state as well, and by XLA's count a step on a {kind} "
            "moves as much as a dense one, or more. Packed tables move less than half of "
            f"that: store it as [V * {length} / {LANES}, {LANES}], and look up "
            f"packed.reshape(V, {length})[ids]",
        )
    # ``[L, V, D]`` is stored in tiles of 8 rows of one table. Unless these are full,
    # XLA:TPU cannot treat it as ``[L * V, D]``, and copies it to write some thousand rows.
    num_rows = shape[row_axes - 1]
    if row_axes == 1 or len(shape) != row_axes + 1 or num_rows % TILE_ROWS == 0:
        return
    hint_once(
        ("tiles", place, shape),
        f"the table{place} of shape {shape} has {num_rows} rows along axis {row_axes - 1}, "
        f"which the {TILE_ROWS} rows of a TPU's tile do not divide: each step of more than "
        "a few rows copies all of it, there and back. Give it "
        f"jslices.padded_rows({num_rows}, {TILE_ROWS}) = "
        f"{-(-num_rows // TILE_ROWS) * TILE_ROWS}; on a mesh, {TILE_ROWS} for each device "
        "that divides them",
    )


def _hint_elsewhere(context: Any, x: Any) -> list[Any]:
    """Lowering of ``row_major`` on a TPU that was not known at trace time."""
    (aval,) = context.avals_in
    if aval.shape[-1] % LANES:
        hint_once(
            ("elsewhere", aval.shape, aval.dtype),
            f"this program is compiled for a TPU but was traced for a {platform_of(aval)}: "
            f"the TPU returns its table of shape {aval.shape} by columns, and copies it to "
            "rows and back for that. Lower it within jax.default_device(tpu), as only the "
            "types of arrays on a mesh name their devices",
        )
    return [x]


mlir.register_lowering(row_major_p, _hint_elsewhere, platform="tpu")


def warn_of_columns(place: str, x: Leaf) -> None:
    """Hints, once for each table, at the cost of a layout by columns."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        return
    # JAX has an error for deleted arrays.
    if x.is_deleted() or is_row_major(x) or not is_tall(x):
        return
    hint_once(
        (place, x.shape, x.dtype),
        f"the table{place}, {x.dtype}{list(x.shape)}, is laid out by columns: each lookup, "
        f"and each step, copies all of it, {human_bytes(x.nbytes)}, to rows and back. "
        "Type params = jslices.row_major(params) before tx.init(params)",
    )
