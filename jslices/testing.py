"""Proofs that a training step works in place, and neither makes nor sends whole tables.

All compile the step and read the program. Nothing is run, and ``jax.ShapeDtypeStruct`` may
replace arrays, so a test can use the real sizes::

    def test_step():
        jslices.testing.assert_in_place(step, params, state, ids, donate_argnums=(0, 1))
        jslices.testing.assert_no_dense_temporary(step, params, state, ids)
        jslices.testing.assert_no_table_on_wire(step, params, state, ids)

A proof on one platform need not hold on another, as XLA decides for each. So name the
device that the step is for; it need not exist here::

    jslices.testing.assert_in_place(step, params, state, ids, device="v5e")
    jslices.testing.assert_in_place(step, params, state, ids, device="h100:64")
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from jslices._proof import cost, dense, in_place, program, wire
from jslices._proof.program import Memory
from jslices._proof.targets import target
from jslices._proof.wire import Collective, Traffic
from jslices._typing import Params, State
from jslices.extend import unboxed
from jslices.optim.engine.clock import RowClock, map_clocks

__all__ = [
    "Collective",
    "Memory",
    "Traffic",
    "assert_in_place",
    "assert_no_dense_temporary",
    "assert_no_table_on_wire",
    "assert_up_to_date",
    "collectives",
    "devices",
    "offloads",
]
__dir__ = __all__.copy

#: Smaller arrays are ignored.
MIN_BYTES = 10**6


def assert_in_place(
    step: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    min_bytes: int | None = None,
    device: str | None = None,
) -> Memory:
    """Asserts that a step writes its results into the arrays that it was given.

    Every donated array of at least ``min_bytes`` must share its memory with a result and
    must not be copied on the way, and no large result may take new memory while an argument
    of its shape and dtype is not donated. By default smaller donated arrays count as well
    if they have as many rows as a table that is looked up (state of one number a row, say),
    unless the optimizer steps all of these rows.

    Args:
      step: the training step, a function or what ``jax.jit`` made of one.
      *args: its arguments: pytrees of arrays or of ``jax.ShapeDtypeStruct``, of any shapes
        and dtypes.
      donate_argnums: as in ``jax.jit``; a step that is jitted already has its own.
      min_bytes: smaller arrays are ignored. The default is an eighth of the largest
        argument, and at least 1 MB: XLA often copies the weights of dense layers, whose
        old values other gradients need; next to a table that costs little.
      device: compiles for this device, which need not exist here: see :func:`devices`. On
        several devices an argument keeps its sharding over a mesh of as many, which may be
        a ``jax.sharding.AbstractMesh``, and is replicated if it has none. The default is
        where the arguments are.

    Returns:
      The :class:`Memory` of the step.

    Raises:
      AssertionError: names each array by its place in ``args``, with the reason why it is
        not updated in place (as far as the program shows it) and what to do.
      ValueError: for ``donate_argnums`` of a step that is jitted already, and for an
        unknown ``device``.
      ModuleNotFoundError: if the compiler for ``device`` is not installed.

    The result does not depend on the ids: not on duplicates, on ids out of range, or on
    how many rows stay untouched.

    Cost: one compilation.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js, jslices.testing
      >>> def step(table, ids):
      ...     grad = js.grad(lambda table: (table[ids] ** 2).sum())(table)
      ...     return js.apply_updates(table, -0.1 * grad)
      >>> table = jax.ShapeDtypeStruct((100_000, 16), jnp.float32)
      >>> ids = jax.ShapeDtypeStruct((64,), jnp.int32)
      >>> memory = js.testing.assert_in_place(step, table, ids, donate_argnums=0)
      >>> memory.alias_bytes == 100_000 * 16 * 4
      True
      >>> js.testing.assert_in_place(step, table, ids)
      Traceback (most recent call last):
      ...
      AssertionError: step does not work in place:
      - args[0] float32[100000,16] (6.4 MB) is not donated, and result, which is like it, is
      new memory. Donate it: jax.jit(step, donate_argnums=0)

    Source: answers what JAX's warning "Some donated buffers were not usable" leaves open.
    """
    compiled = program.compiled(step, args, donate_argnums, device)
    heights: Collection[int] = ()
    if min_bytes is None:
        largest = max((leaf.nbytes for leaf in compiled.leaves), default=0)
        min_bytes = max(MIN_BYTES, largest // 8)
        heights = dense.heights(compiled, min_bytes)
    problems = in_place.problems(compiled, min_bytes, heights)
    _refuse(problems, f"{compiled.name} does not work in place")
    return compiled.memory


def assert_no_dense_temporary(
    step: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    table_bytes: int | None = None,
    min_bytes: int = MIN_BYTES,
    device: str | None = None,
) -> Memory:
    """Asserts that a step makes no temporary as large as a table that it looks up.

    Arguments, results, donated or not, and arrays written in place do not count. No other
    array may have the shape of a table (in any dtype, or transposed), or as many bytes as
    the largest one. A table is an argument with at least two axes and ``min_bytes`` whose
    rows are gathered. If the optimizer steps all rows of a table, because its gradient has
    nearly as many (``print(tx.plan(grads, params))`` says so), that table is left out if
    there are others.

    Args:
      table_bytes: no temporary may have this many bytes, whatever its shape; replaces the
        search for tables.
      min_bytes: smaller arrays are not tables (1 MB by default).

    Returns:
      The :class:`Memory` of the step.

    Raises:
      AssertionError: lists the temporaries, each with the operation and the line of the
        program that makes it, and what to write instead.
      ValueError: if no table is looked up and ``table_bytes`` is not given.

    The other arguments and errors, and the cost, are those of :func:`assert_in_place`. This
    result, too, is the same for all ids.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js, jslices.testing
      >>> def step(table, ids):
      ...     grad = js.grad(lambda table: (table[ids] ** 2).sum())(table)
      ...     return js.apply_updates(table, -0.1 * grad)
      >>> table = jax.ShapeDtypeStruct((100_000, 16), jnp.float32)
      >>> ids = jax.ShapeDtypeStruct((64,), jnp.int32)
      >>> memory = js.testing.assert_no_dense_temporary(step, table, ids)
      >>> memory.temp_bytes < 20_000
      True

    Source: this package's own promise; a step with dense gradients does not keep it.
    """
    compiled = program.compiled(step, args, donate_argnums, device)
    problems = dense.problems(compiled, table_bytes, min_bytes)
    _refuse(problems, f"{compiled.name} makes arrays as large as a table")
    return compiled.memory


def assert_no_table_on_wire(
    step: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    min_bytes: int = MIN_BYTES,
    device: str | None = None,
) -> Traffic:
    """Asserts that what devices send each other does not grow with the tables.

    No collective may have an axis as long as a table that is looked up, or as a device's
    part of it, or be as large as that part. Tables are those of
    :func:`assert_no_dense_temporary`; use some so large that each device holds more
    rows than all devices look up together.

    Returns:
      The :class:`Traffic` of the step.

    Raises:
      AssertionError: lists the collectives, each with its size, the bytes that a device
        receives, the operation and the line of the program, and what to write instead.
      ValueError: if no table is looked up.
      NotImplementedError: for a program whose groups of devices cannot be read.

    The other arguments and errors, and the cost, are those of :func:`assert_in_place`. This
    result, too, is the same for all ids.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js, jslices.testing
      >>> mesh = jax.make_mesh((jax.device_count(),), ("x",))
      >>> def split(shape, dtype):
      ...     by_rows = jax.NamedSharding(mesh, jax.P("x"))
      ...     return jax.ShapeDtypeStruct(shape, dtype, sharding=by_rows)
      >>> def step(table, ids):
      ...     loss = lambda table: (js.embedding_lookup(table, ids) ** 2).sum()
      ...     return js.apply_updates(table, -0.1 * js.grad(loss)(table))
      >>> args = split((64_000, 16), jnp.float32), split((64,), jnp.int32)
      >>> with jax.set_mesh(mesh):
      ...     traffic = js.testing.assert_no_table_on_wire(step, *args)
      >>> traffic.most < 20_000
      True

    Source: this package's own promise for tables on several devices.
    """
    compiled = program.compiled(step, args, donate_argnums, device)
    problems = wire.problems(compiled, min_bytes)
    _refuse(problems, f"{compiled.name} sends whole tables")
    return wire.traffic(compiled.module)


def assert_up_to_date(params: Params, state: State) -> None:
    """Assert that no row of the parameters has missed steps of an exact optimizer.

    Args:
      params: the parameters, tables ``[V, *D]`` among them.
      state: their state, of any optimizer or wrapper. Of a lazy one nothing is behind, and
        rows that are frozen do not move.

    Raises:
      AssertionError: naming each array with rows behind, and how many.

    Cost: reads one number for each row.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx, table = js.adam(0.1, untouched="exact"), jnp.ones((5, 1))
      >>> step, state = js.train_step(lambda t, i: t[i].sum(), tx), tx.init(table)
      >>> table, state, value = step(table, state, jnp.array([1, 2]))
      >>> js.testing.assert_up_to_date(table, state)
      Traceback (most recent call last):
      ...
      AssertionError: rows have missed steps: 3 of 5 of params. Read them by ...
      >>> js.testing.assert_up_to_date(*tx.flush(table, state))

    Source: ours.
    """
    behind: list[str] = []

    def look(clock: Any, count: jax.Array) -> Any:
        leaves, _ = jax.tree_util.tree_flatten_with_path(unboxed(clock.last))
        for (path, last), whole in zip(leaves, clock.whole, strict=False):
            rows = RowClock.of(last, whole, count)
            late = np.asarray(rows.is_late & ~rows.stays)
            if late.any():
                name = f"params{jax.tree_util.keystr(path)}"
                behind.append(f"{late.sum():,} of {late.size:,} of {name}")
        return clock

    map_clocks(look, state)
    if behind:
        raise AssertionError(
            f"rows have missed steps: {', '.join(behind)}. Read them by "
            "jslices.eval_step(fun, tx)(params, state, ...) or tx.now(params, state), or "
            "let all of them catch up, params, state = tx.flush(params, state)"
        )


def collectives(
    step: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    device: str | None = None,
) -> Traffic:
    """The traffic between devices in a step, with the lines of the program: ``print`` it.

    The arguments, their errors and the cost are those of :func:`assert_in_place`.

    Returns:
      The :class:`Traffic`: bytes that each device receives, and every
      :class:`Collective`. One in a loop counts as often as it runs, if that is known.

    Raises:
      NotImplementedError: for a program whose groups of devices cannot be read.

    Example:
      >>> import jax, jax.numpy as jnp, jslices.testing
      >>> x = jax.ShapeDtypeStruct((8, 2), jnp.float32)
      >>> print(jslices.testing.collectives(lambda x: x.sum(0), x))
      each device receives 0 B

    Source: the text of the compiled program; XLA has no such list.
    """
    return wire.traffic(program.compiled(step, args, donate_argnums, device).module)


def offloads(
    step: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    device: str | None = None,
) -> dict[str, int]:
    """How many pieces of work XLA sends to the SparseCores of a TPU, by kind.

    TPUs v5p, v6e and tpu7x have these cores beside the main ones. XLA sends plain
    ``table[ids]`` there by itself, and on tpu7x additions to rows of a table as well, but
    no operation that sets rows.

    The arguments, their errors and the cost are those of :func:`assert_in_place`.

    Returns:
      A dict, the most frequent kind first: ``gather``, ``scatter``, ``copy`` or ``other``;
      empty if nothing is sent, as on every device without SparseCores.

    Example:
      >>> import jax, jax.numpy as jnp, jslices.testing
      >>> args = jax.ShapeDtypeStruct((10**6, 128), "float32"), jnp.arange(10_000)
      >>> jslices.testing.offloads(lambda t, i: t[i], *args, device="v5p")  # doctest: +SKIP
      {'gather': 1}
      >>> jslices.testing.offloads(lambda t, i: t[i], jnp.ones((9, 2)), jnp.arange(3))
      {}

    Source: the text of the compiled program.
    """
    return cost.offloads(program.compiled(step, args, donate_argnums, device).module)


def devices(name: str) -> tuple[jax.Device, ...]:
    """Devices that JAX can compile for without having them, for a mesh of your own.

    They run nothing. ``jax.ShapeDtypeStruct``s that are sharded over them are arguments for
    ``jax.jit(step).lower(...).compile()``, and for the proofs here without ``device=``. On
    one device without a mesh, lower within ``jax.default_device(devices(name)[0])``.

    Args:
      name: ``v5e``, ``v5p``, ``v6e``, ``tpu7x``, ``a100``, ``h100``, ``h200``, ``b200`` or
        ``l4``; several TPUs by the chips along each axis, ``v5e:16x16``, ``v5p:4x4x4``,
        several GPUs by their number, ``h100:8``, in hosts of 8.

    Returns:
      The devices, one for a bare name.

    Raises:
      ValueError: for any other name; lists the good ones.
      ModuleNotFoundError: if the compiler is not installed, which comes with the extra
        ``tpu`` or ``gpu``.

    Cost: the first time for each name, a tenth of a second or so.

    Example:
      >>> import jslices.testing
      >>> jslices.testing.devices("v5e:16x16")  # doctest: +SKIP
      (TPU_0(process=0,(0,0,0,0)), ...
      >>> jslices.testing.devices("v5x")
      Traceback (most recent call last):
      ...
      ValueError: no device is called 'v5x'. One device: v5e, v5p, ...

    Source: ``jax.experimental.topologies``, with the figures that XLA needs for GPUs.
    """
    return target(name).devices


def _refuse(problems: Sequence[str], title: str) -> None:
    if problems:
        raise AssertionError("\n- ".join([f"{title}:", *problems]))
