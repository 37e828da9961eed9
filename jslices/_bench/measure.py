"""Times of steps with row gradients and with dense ones, in turn in one run."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jslices as js
from jslices._bench.memory import BATCHES, COPY_BYTES
from jslices._bench.sizes import Sizes

WARM, TIMED = 4, 10  # steps a turn


class Side:
    """One of the steps that are compared: compiled, its arrays, and its times."""

    def __init__(self, sizes: Sizes, value_and_grad: Callable[..., Any]) -> None:
        tx = sizes.make_optimizer()
        ids = sizes.draw(BATCHES)
        self.sizes = sizes
        self.distinct = statistics.median(len(np.unique(batch)) for batch in ids)
        self.times: list[float] = []
        table = sizes.table_shape()
        params = {"table": table, "w": jax.ShapeDtypeStruct(table.shape[1:], table.dtype)}
        state = jax.eval_shape(tx.init, params)
        batch = jax.ShapeDtypeStruct((sizes.ids,), jnp.int32)
        target = jax.ShapeDtypeStruct((sizes.ids,), table.dtype)
        step = jax.jit(_step(value_and_grad, tx), donate_argnums=(0, 1))
        start = time.perf_counter()
        # From shapes, so that nothing is in memory yet.
        self._run = step.lower(params, state, batch, target).compile()
        self.compile_seconds = time.perf_counter() - start
        # None on backends that do not tell.
        self.analysis = self._run.memory_analysis()
        self._batches = [jnp.asarray(batch) for batch in ids]
        self._target = jnp.ones(target.shape, target.dtype)
        made = {"table": jnp.zeros(table.shape, table.dtype)}
        made["w"] = jnp.ones(table.shape[1:], table.dtype)
        self._carry: Any = (made, jax.jit(tx.init)(made))
        self._number = 0

    @property
    def median(self) -> float:
        """Seconds a step."""
        return statistics.median(self.times)

    def step(self, timed: bool) -> None:
        batch = self._batches[self._number % BATCHES]
        start = time.perf_counter()
        out = jax.block_until_ready(self._run(*self._carry, batch, self._target))
        if timed:
            self.times.append(time.perf_counter() - start)
        self._carry = out[:2]
        self._number += 1


def _step(value_and_grad: Callable[..., Any], tx: Any) -> Callable[..., Any]:
    def loss(params: Any, ids: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.mean((params["table"][ids] @ params["w"] - target) ** 2)

    def step(params: Any, state: Any, ids: jax.Array, target: jax.Array) -> Any:
        value, grads = value_and_grad(loss)(params, ids, target)
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state, value

    return step


def run_in_turns(
    sparse: Sequence[Side], dense: Side | None, steps: int, dense_seconds: float
) -> None:
    """Fills in the times.

    Args:
      sparse: each is run for ``steps`` timed steps.
      dense: as many, but none more once it has taken ``dense_seconds``.
      steps: how many.
      dense_seconds: the limit.
    """
    # Several steps at a time: a dense step empties the caches of the processor, and a
    # training loop does not run one between two sparse steps.
    spent = 0.0
    while any(len(side.times) < steps for side in sparse):
        for side in sparse:
            _burst(side, WARM, min(TIMED, steps - len(side.times)))
        if dense is not None and spent < dense_seconds:
            start = time.perf_counter()
            if not dense.times:
                dense.step(timed=False)
            for _ in range(min(TIMED, steps - len(dense.times))):
                dense.step(timed=True)
                if spent + time.perf_counter() - start > dense_seconds:
                    break
            spent += time.perf_counter() - start


def _burst(side: Side, warm: int, timed: int) -> None:
    for position in range(warm + timed):
        side.step(timed=position >= warm)


def copy_bandwidth() -> float:
    """Bytes a second that are read and written while a large array is copied."""
    # Into memory that is there already. The sign, as a mere copy would be optimized away.
    copy: Any = functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
    copy = copy(lambda x, y: -x)
    x, y = (jnp.zeros(COPY_BYTES // 4) for _ in range(2))
    times = []
    for _ in range(8):
        start = time.perf_counter()
        y = jax.block_until_ready(copy(x, y))
        times.append(time.perf_counter() - start)
    return 2 * COPY_BYTES / statistics.median(times[2:])
