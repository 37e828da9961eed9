"""Times of steps with row gradients and with dense ones, which take turns in one run."""

import contextlib
import functools
import multiprocessing
import platform
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jslices as js
from jslices._proof.targets import AXIS, Target
from jslices.bench.sizes import BATCHES, Sizes

WARM, TIMED = 4, 10  # steps a turn
#: The size of each of the two arrays by which the bandwidth is measured.
COPY_BYTES = 1 << 27
COPIES = 4  # one after another, as a GPU makes one in the time of waiting for it
#: The memory of Python and JAX in a process of their own.
PROCESS_BYTES = 400 << 20


class Facts(NamedTuple):
    """Figures of a compiled step; None on backends without them."""

    distinct: float  #: the median of distinct ids in a batch
    compile_seconds: float
    temp_bytes: int | None
    alias_bytes: int | None


class Side:
    """One of the steps that are compared: compiled, its arrays, and its times."""

    def __init__(self, sizes: Sizes, value_and_grad: Callable[..., Any]) -> None:
        tx = sizes.make_optimizer()
        ids = sizes.draw(BATCHES)
        self.times: list[float] = []
        start = time.perf_counter()
        self._run = compile_step(sizes, value_and_grad)
        seconds = time.perf_counter() - start
        memory = self._run.memory_analysis()
        self.facts = Facts(
            statistics.median(len(np.unique(batch)) for batch in ids),
            seconds,
            getattr(memory, "temp_size_in_bytes", None),
            getattr(memory, "alias_size_in_bytes", None),
        )
        self._batches = [jnp.asarray(batch) for batch in ids]
        table = sizes.table_shape()
        self._target = jnp.ones(sizes.ids, table.dtype)
        params = {"table": jnp.zeros(table.shape, table.dtype)}
        params["w"] = jnp.ones(table.shape[1:], table.dtype)
        self._carry: Any = (params, jax.jit(tx.init)(params))
        self._number = 0

    @property
    def median(self) -> float:
        """Seconds a step."""
        return statistics.median(self.times)

    def burst(self, warm: int, timed: int) -> None:
        """Runs some steps without timing them, then some more with it.

        Steps on an accelerator are timed together: as in training, the next one is
        submitted while it works. Waiting for each would double a step of 0.1 ms.
        """
        self._take(warm)
        several = 1 if jax.default_backend() == "cpu" else max(timed, 1)
        for _ in range(timed // several):
            start = time.perf_counter()
            self._take(several)
            self.times += [(time.perf_counter() - start) / several] * several

    def _take(self, steps: int) -> None:
        for _ in range(steps):
            batch = self._batches[self._number % BATCHES]
            *self._carry, _ = self._run(*self._carry, batch, self._target)
            self._number += 1
        jax.block_until_ready(self._carry)


class KeptSide(Side):
    """A :class:`Side` with row gradients in a process that keeps its memory.

    :func:`jslices.keep_memory` must be called before JAX starts, and holds for a process.
    """

    def __init__(self, sizes: Sizes) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, sizes), daemon=True)
        self._process.start()
        other.close()
        self.facts: Facts = self._pipe.recv()
        self.times: list[float] = []

    def burst(self, warm: int, timed: int) -> None:
        self._pipe.send((warm, timed))
        self.times = self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


def _serve(pipe: Any, sizes: Sizes) -> None:
    """The work of the other process, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    js.keep_memory()
    side = Side(sizes, js.value_and_grad)
    pipe.send(side.facts)
    while True:
        try:
            side.burst(*pipe.recv())
        except EOFError:
            return
        pipe.send(side.times)


def can_keep_memory(device: jax.Device) -> bool:
    """Whether :func:`jslices.keep_memory` has an effect here."""
    return device.platform == "cpu" and platform.libc_ver()[0] == "glibc"


def compile_step(
    sizes: Sizes, value_and_grad: Callable[..., Any], target: Target | None = None
) -> jax.stages.Compiled:
    """Compiles a step from shapes, before any array exists.

    On several devices, which must divide rows and ids, the table and its state are divided
    by rows and the batch by ids; an exchange sends rows. The rest is replicated.
    """
    tx = sizes.make_optimizer()
    by_rows = value_and_grad is js.value_and_grad
    several = target is not None and len(target.devices) > 1
    exchange = {"table": js.Exchange(AXIS, overflow="nan")} if several and by_rows else None
    if exchange is not None:
        value_and_grad = functools.partial(value_and_grad, exchange=exchange)

    def loss(params: Any, ids: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.mean((params["table"][ids] @ params["w"] - target) ** 2)

    def step(params: Any, state: Any, ids: jax.Array, target: jax.Array) -> Any:
        if sizes.untouched == "exact":
            step = js.train_step(loss, tx, exchange=exchange)
            return step(params, state, ids, target)
        value, grads = value_and_grad(loss)(params, ids, target)
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state, value

    table = sizes.table_shape()
    params = {"table": table, "w": jax.ShapeDtypeStruct(table.shape[1:], table.dtype)}
    batch = jax.ShapeDtypeStruct((sizes.ids,), jnp.int32)
    labels = jax.ShapeDtypeStruct((sizes.ids,), table.dtype)
    args: Any = (params, jax.eval_shape(tx.init, params), batch, labels)
    with contextlib.ExitStack() as here, warnings.catch_warnings():
        if target is not None:
            here.enter_context(jax.default_device(target.devices[0]))
            if exchange is not None:
                here.enter_context(jax.set_mesh(target.mesh))
            trained = js.row_major(args[:2]) if by_rows else args[:2]
            rows = jax.tree.map(lambda x: x.shape[:1] == table.shape[:1], trained)
            args = (*target.place(trained, rows), *target.place(args[2:], several))
        warnings.simplefilter("ignore", js.PerformanceHint)  # its effect is measured here
        return jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()


def run_in_turns(
    sparse: Sequence[Side], dense: Side | None, steps: int, dense_seconds: float
) -> None:
    """Fills in the times of ``steps`` steps; dense ones stop after ``dense_seconds``."""
    # Several steps at a time: a dense step empties the caches of the processor, and a
    # training loop does not run one between two sparse steps.
    spent = 0.0
    while any(len(side.times) < steps for side in sparse):
        for side in sparse:
            side.burst(WARM, min(TIMED, steps - len(side.times)))
        if dense is not None and spent < dense_seconds:
            start = time.perf_counter()
            if not dense.times:
                dense.burst(1, 0)
            for _ in range(min(TIMED, steps - len(dense.times))):
                dense.burst(0, 1)
                if spent + time.perf_counter() - start > dense_seconds:
                    break
            spent += time.perf_counter() - start


def copy_bandwidth() -> float:
    """Bytes a second that are read and written while a large array is copied."""
    # Into existing memory; negated, as a mere copy would be optimized away.
    copy: Any = functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
    copy = copy(lambda x, y: -x)
    x, y = (jnp.zeros(COPY_BYTES // 4) for _ in range(2))
    times = []
    for _ in range(8):
        start = time.perf_counter()
        for _ in range(COPIES):
            y = copy(x, y)
        y.block_until_ready()
        times.append((time.perf_counter() - start) / COPIES)
    return 2 * COPY_BYTES / statistics.median(times[2:])
