"""A step from row gradients: a plan, which is a value that can be printed, and running it.

All plans give the same rows, and leave those that are not named alone. ``choose_plan``
looks at shapes, dtypes and the platform, never at values. ``step_rows`` has the plans of a
CPU and of others in one program, where they differ. ``execute`` sums the entries of each
row, and runs the kernel in one of three ways. Begin with the table in ``choose_plan``, then
``_together``.

Every threshold of the engine stands here, with the measurement that it rests on. Times are
ratios of steps that took turns in one run, on two x86 cores with jax 0.10.2.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial

from jslices import _jax
from jslices._place.boundary import platform_of, row_major_array
from jslices._rows import access
from jslices._rows.sums import Order, add_rows, sum_duplicates, widened
from jslices._slices import IndexedSlices, each_shard, slices_of
from jslices._typing import Change, Leaf, PyTree, Record
from jslices.optim.engine.rule import Kernel

Way = Literal["together", "in chunks", "all rows"]

#: Rows in a chunk: those of Adam's three arrays, 64 elements each, fill 1.5 MB and are
#: still in the cache, and in the table of pages, when they are written back. A fifth off a
#: step of 10,000 Zipf ids in a million rows of 64.
CHUNK_ROWS = 2048
#: So many entries, or entries of so many bytes, are stepped together: in chunks they take
#: 0.74 to 1.7 times as long, 1.2 in the median with uniform ids, 1.04 with Zipf ids (136
#: cells, rows of 1 to 64, 1e5 to 1e7 rows).
TOGETHER_ROWS, TOGETHER_BYTES = 2 * CHUNK_ROWS, 1.5e6
#: All rows are stepped from so many entries for each row of the table on. Below it the pass
#: takes longer than the rows named, and its sums take about four arrays ``[K, D]``.
ENTRIES_PER_ROW = 0.27
#: Rows of fewer bytes cost less in a pass than an entry does in a jump: in proportion,
#: fewer entries suffice.
SHORT_ROW_BYTES = 32
#: In tables of so many bytes, which no cache holds, the pass takes as long as its bytes,
#: and an entry as long as so many bytes of it, up to two entries a row.
LARGE_TABLE_BYTES, ENTRY_BYTES, MOST_ENTRIES_PER_ROW = 16 * 10**6, 192, 2
#: On a TPU a row is read and written with the 8 rows of its tile, a number of a vector with
#: 1,023 others. By the bytes that XLA counts for a v5e (compiled, not timed; V = 1e6), the
#: pass is the cheaper way from so many entries for each row on.
TPU_ENTRIES_PER_ROW, TPU_VECTOR_ENTRIES_PER_ROW, ONE_NUMBER_BYTES = 0.2, 0.002, 4
#: With fewer entries nothing is won by any way but the first.
FEW_ENTRIES = 512
#: A linear rule without state adds each entry by itself, unless rows are shorter than this
#: and each is named more than once: telling empty entries apart then takes as long as they.
SHORT_LINEAR_BYTES, LINEAR_ENTRIES_PER_ROW = 128, 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """The way one table is stepped; ``str(plan)`` says it in words.

    Attributes:
      way: ``"together"``, ``"in chunks"`` or ``"all rows"``.
      entries: K, the entries of the gradient, duplicates counted.
      capacity: U, the rows that there is room for.
      sums: whether the entries of a row are summed first.
      chunk: the rows stepped at a time; for the way in chunks alone.
      why: the reason, in words.
    """

    way: Way
    entries: int
    capacity: int
    sums: bool = True
    chunk: int | None = None
    why: str = dataclasses.field(default="", compare=False)

    @property
    def scope(self) -> str:
        """The name of its operations in a profile."""
        return f"step {_count(self.entries)} entries {self.way}"

    def __str__(self) -> str:
        how = {
            "together": "all together",
            "in chunks": f"in chunks of {self.chunk} distinct rows",
            "all rows": "as one pass over all rows of the table",
        }[self.way]
        duplicates = "duplicates summed first" if self.sums else "each entry by itself"
        return (
            f"{_count(self.entries)} entries are stepped {how}, {duplicates}, with room "
            f"for {_count(self.capacity)} rows: {self.why}"
        )


def choose_plan(
    grad: IndexedSlices,
    arrays: Sequence[jax.ShapeDtypeStruct | jax.Array],
    platform: str = "cpu",
    *,
    linear: bool = False,
    unique: bool = False,
    at_hand: str | None = None,
) -> Plan:
    """Choose the way of a step, by the first line that holds:

    ====================================================  ====================
    a table with enough entries for its rows              all rows
    a linear rule without state                           together, not summed
    not on a CPU (a loop would only launch kernels)       together
    few entries, or of few bytes, or no array to step     together
    bfloat16 state that XLA:CPU would widen for writing   together
    else                                                  in chunks
    ====================================================  ====================

    The shape of the update follows from the first line, and a program may be compiled for
    several platforms: there the platform at hand decides for all. Sizes that ``jax.export``
    leaves open are stepped together.

    Args:
      grad: K entries, of which shapes, dtypes and facts count.
      arrays: shapes and dtypes ``[V, ...]`` of what a step reads and writes by rows.
      platform: what the program is compiled for: ``"cpu"`` or another.
      linear: whether the rule is (:attr:`Rule.linear`).
      unique: whether no row is named twice, and all rows are not to be stepped.
      at_hand: the platform of the process; None: ``platform``.
    """
    entries, axes, num_rows = grad.values.shape[0], grad.row_axes, grad.num_rows
    sums = not (unique or grad.facts.distinct)
    if _jax.is_symbolic(entries) or _jax.is_symbolic(num_rows):
        why = "how many there are is not known yet"
        return Plan("together", entries, entries, sums, why=why)
    capacity = access.room_for_distinct(entries, num_rows) if sums else entries
    row_bytes = _row_bytes(grad.values, 1)
    row_bytes = max(row_bytes, *(_row_bytes(x, axes) for x in arrays), 0)
    adds_up = linear and not arrays and grad.values.dtype.itemsize >= 4
    if num_rows is not None and not unique:
        limit = entries_of_a_pass(num_rows, row_bytes, adds_up, at_hand or platform)
        if entries >= limit:
            why = f"from {limit:,} entries on a pass over {num_rows:,} rows is faster"
            return Plan("all rows", entries, num_rows, sums, why=why)
    if adds_up and entries >= FEW_ENTRIES:
        why = "the update of a sum is the sum of the updates, and there is no state"
        return Plan("together", entries, entries, sums=False, why=why)
    if platform != "cpu":
        why = "one kernel for each operation is fastest but on a CPU"
        return Plan("together", entries, capacity, sums, why=why)
    if not arrays:
        why = "there is no array whose rows a chunk could keep in the cache"
        return Plan("together", entries, capacity, sums, why=why)
    if capacity <= TOGETHER_ROWS or capacity * row_bytes <= TOGETHER_BYTES:
        why = f"at most {TOGETHER_ROWS:,} rows, or {TOGETHER_BYTES / 1e6:g} MB of them"
        return Plan("together", entries, capacity, sums, why=why)
    if _jax.WIDENS_BFLOAT16 and any(x.dtype == jnp.bfloat16 for x in arrays):
        why = "this XLA makes bfloat16 arrays float32 to write, once a step at best"
        return Plan("together", entries, capacity, sums, why=why)
    why = "a chunk's rows are still in the cache when they are written back"
    return Plan("in chunks", entries, capacity, sums, CHUNK_ROWS, why)


def entries_of_a_pass(num_rows: int, row_bytes: int, adds_up: bool, platform: str) -> float:
    """From how many entries on all rows are stepped; ``adds_up``: linear, without state."""
    if platform == "tpu":
        one_number = row_bytes <= ONE_NUMBER_BYTES
        per_row = TPU_VECTOR_ENTRIES_PER_ROW if one_number else TPU_ENTRIES_PER_ROW
        return np.inf if adds_up else max(FEW_ENTRIES, math.ceil(num_rows * per_row))
    if adds_up:
        short = row_bytes <= SHORT_LINEAR_BYTES
        return max(FEW_ENTRIES, LINEAR_ENTRIES_PER_ROW * num_rows) if short else np.inf
    per_row = ENTRIES_PER_ROW * min(row_bytes / SHORT_ROW_BYTES, 1)
    if num_rows * row_bytes >= LARGE_TABLE_BYTES:
        per_row = min(max(per_row, row_bytes / ENTRY_BYTES), MOST_ENTRIES_PER_ROW)
    return max(FEW_ENTRIES, math.ceil(num_rows * per_row))


def _count(n: Any) -> str:
    return str(n) if _jax.is_symbolic(n) else f"{n:,}"


def _row_bytes(x: jax.ShapeDtypeStruct | jax.Array, row_axes: int) -> int:
    return math.prod(x.shape[row_axes:]) * x.dtype.itemsize


# --- Running a plan ---------------------------------------------------------------------


def step_rows(
    kernel: Kernel,
    grad: IndexedSlices,
    p: jax.Array | None,
    state: Record,
    *,
    adds: bool = False,
    linear: bool = False,
    unique: bool = False,
) -> tuple[Any, Record]:
    """Steps the rows that ``grad`` names by the plan for its sizes, on any platform.

    The program may yet be compiled for another platform than the one at hand: where the
    plans differ it holds both, of which JAX lowers one.

    Args:
      kernel: see :data:`Kernel`; arrays that it gathers from are the arguments of a
        ``jax.tree_util.Partial``.
      grad: of an array ``[V, *D]``, K entries; or of ``[L, V, *D]`` whose rows L and V
        number, and then all arrays have these axes.
      p: the parameter ``[V, *D]``, or None if the kernel does not read it.
      state: arrays ``[V, ...]``. Rows of those that the kernel returns are written.
      adds: whether the update is added to the parameter, or returned.
      linear: whether the update of a sum is the sum of the updates.
      unique: whether no row is named twice, and all rows are not to be stepped.

    Returns:
      ``(p, state)``, the new arrays; or ``(update, state)``: IndexedSlices in which
      each row appears once (unless the plan sums nothing), its other entries empty and
      zero. It is what would have been added.
    """
    if grad.facts.placement is not None:

        def step_shard(grad: Leaf, p: Any, state: Record, kernel: Kernel) -> Any:
            how = {"adds": adds, "linear": linear, "unique": unique}
            return step_rows(kernel, grad, p, state, **how)

        shared = kernel if isinstance(kernel, Partial) else Partial(kernel)
        return each_shard(step_shard, grad, p, state, shared=(shared,))  # type: ignore[no-any-return]
    every, shape = jax.tree.leaves((p, state)), grad.dense_shape
    sizes = None if shape is None else shape[: grad.row_axes]
    distinct = unique or grad.facts.distinct
    by_rows = every if state or not linear else ()
    at_hand = platform_of(grad.values, *every)
    cpu, other = (
        choose_plan(grad, by_rows, x, linear=linear, unique=unique, at_hand=at_hand)
        for x in ("cpu", "gpu")
    )
    run = functools.partial(execute, kernel, sizes, adds=adds, distinct=distinct)
    operands = grad.indices, grad.values, p, state
    if cpu == other:
        result = run(cpu, *operands)
    else:
        here = functools.partial(run, cpu, on_cpu=True)
        elsewhere = functools.partial(run, other, on_cpu=False)
        result = lax.platform_dependent(*operands, cpu=here, default=elsewhere)
    indices, first, new = result
    new = jax.tree.map(row_major_array, new)
    if adds:
        return row_major_array(first), new
    shape = None if sizes is None else (*sizes, *first.shape[1:])
    distinct |= cpu.sums or cpu.way == "all rows"
    named = grad.values.shape[0]
    facts = grad.facts.lasting._replace(at_now=False, distinct=distinct, named=named)
    return slices_of(first, indices, shape, facts), new


def execute(
    kernel: Kernel,
    sizes: tuple[int, ...] | None,
    plan: Plan,
    indices: jax.Array,
    values: jax.Array,
    p: jax.Array | None,
    state: Record,
    *,
    adds: bool = False,
    distinct: bool = False,
    on_cpu: bool | None = None,
) -> tuple[jax.Array, jax.Array, Record]:
    """Runs ``kernel`` on the rows that ``indices`` name, as ``plan`` says.

    Args:
      kernel: see :data:`Kernel`.
      sizes: ``(V,)``, of all axes that number rows; None where V is not known, and there
        are no arrays then.
      plan: any plan for these sizes; all give the same rows.
      indices: ``[K]`` of any integer dtype: duplicates, and empty entries out of range.
      values: ``[K, *D]``, the gradient.
      p: as in :func:`step_rows`, as are ``state`` and ``adds``.
      state: see ``p``.
      adds: see ``p``.
      distinct: whether no row is named twice.
      on_cpu: whether a CPU will run it, if that is known.

    Returns:
      ``(indices, update, state)``: indices ``[U]``, canonical; update ``[U, ...]``, zero in
      empty entries, or the array that it was added to; and the new state.
    """
    with jax.named_scope(plan.scope):
        arrays, tree = _jax.flatten((indices, values, p, state))
        indices, values, p, state = tree.unflatten(_jax.as_varying_as(arrays, *arrays))
        if plan.way == "all rows":
            assert sizes is not None
            return _all_rows(plan, kernel, sizes, indices, values, p, state, adds)
        num_rows = None if sizes is None else math.prod(sizes)
        if plan.sums:
            order: Order = "packed" if plan.way == "in chunks" else "any"
            values, indices, present = sum_duplicates(
                values, indices, num_rows, plan.capacity, order=order, on_cpu=on_cpu
            )
        else:
            if not distinct:  # else they are what a sum gave, or each_shard
                indices = access.canonical_indices(indices, num_rows)
            here = jnp.arange(1, indices.shape[0] + 1, dtype=jnp.int32)
            empty = access.empty_index(num_rows, indices.dtype)
            present = jnp.max(jnp.where(indices < empty, here, 0), initial=0)
        if plan.way == "together":
            distinct |= plan.sums
            return indices, *_together(
                kernel, sizes, indices, values, p, state, adds, distinct
            )
        assert plan.chunk is not None and sizes is not None
        chunks = present, plan.chunk
        return indices, *_in_chunks(kernel, sizes, indices, values, p, state, adds, *chunks)


def _together(
    kernel: Kernel,
    sizes: tuple[int, ...] | None,
    indices: jax.Array,
    values: jax.Array,
    p: jax.Array | None,
    state: Record,
    adds: bool,
    distinct: bool = True,
) -> Change:
    """Gather, step, scatter."""
    row_axes = 1 if sizes is None else len(sizes)
    num_rows = None if sizes is None else math.prod(sizes)
    empty = access.empty_index(num_rows, indices.dtype)
    arrays, tree = _jax.flatten((p, state))
    rows = [read_rows(x, indices, row_axes) for x in arrays]
    if indices.shape[0] == 1:  # a slice, which XLA reads anew wherever it is used
        rows = access.at_once(rows)
    update, changed = kernel(derivable(indices < empty, values), *tree.unflatten(rows))
    new = dict(state)
    for name, x in changed.items():
        new[name] = access.set_rows(state[name], indices, x.astype(state[name].dtype))
    if adds:
        assert p is not None
        return add_rows(p, indices, update, distinct), new
    # XLA gathers the gradient as [K, 1, D]. In this shape the update overwrites it;
    # another would keep a second array of that size.
    tall = update.reshape(indices.shape[0], 1, math.prod(update.shape[1:]))
    # As "the first so many elements", which LLVM vectorizes for a CPU: with a bool for each
    # row, steps of Adagrad and RMSProp in short rows take 1.3 times as long.
    stop = jnp.where(indices < empty, tall.shape[2], 0)[:, None, None]
    inside = lax.broadcasted_iota(stop.dtype, tall.shape, 2) < stop
    tall = jnp.where(inside, tall, jnp.zeros((), tall.dtype))
    return tall.reshape(update.shape), new


@jax.custom_jvp
def _derivable(named: jax.Array, rows: jax.Array) -> jax.Array:
    del named
    return rows


@_derivable.defjvp
def _(primals: PyTree, tangents: PyTree) -> tuple[jax.Array, jax.Array]:
    (named, rows), (_, tangent) = primals, tangents
    zero, one = jnp.zeros((), tangent.dtype), jnp.ones((), rows.dtype)
    return access.where_rows(named, rows, one), access.where_rows(named, tangent, zero)


def derivable(named: jax.Array, rows: jax.Array) -> jax.Array:
    """``rows``, for a kernel whose results are dropped where a row is not named.

    Where the kernel is differentiated, rows not named are ones: what it has an infinite
    derivative at (the root of a moment that is zero, say) would come out as NaN, although
    the cotangent of what is dropped is zero. Otherwise this takes no time.
    """
    inexact = jnp.issubdtype(rows.dtype, jnp.inexact)
    result: jax.Array = _derivable(named, rows) if inexact else rows
    return result


# Traced once for all arrays of one shape, and anew for another default device.
@functools.partial(jax.jit, static_argnums=2)
def read_rows(x: jax.Array, indices: jax.Array, row_axes: int) -> jax.Array:
    """Rows ``[U, ...]`` of an array ``[V, ...]``, for a kernel: see :func:`derivable`.

    Empty entries read the last row.
    """
    num_rows = access.rows_numbered(x.shape, row_axes)
    near = jnp.minimum(indices, 0 if num_rows == 0 else num_rows - 1)
    rows = access.take_rows(x, near, mode="promise_in_bounds", row_axes=row_axes)
    return derivable(indices < num_rows, rows)


def _in_chunks(
    kernel: Kernel,
    sizes: tuple[int, ...],
    indices: jax.Array,
    values: jax.Array,
    p: jax.Array | None,
    state: Record,
    adds: bool,
    present: jax.Array,
    chunk: int,
) -> Change:
    """The same for a chunk of rows at a time, as many chunks as hold rows.

    How often the loop runs depends on values, so it has no reverse derivative of its own;
    it is given that of stepping the rows together. A custom_jvp must be handed what its
    function closes over (a learning rate that is itself learned, say), and a converted
    function has fixed shapes, hence two: of all entries, and of a chunk of them.
    """
    like = lambda count: _like((values, p, state), len(sizes), count)  # noqa: E731
    whole, whole_consts = jax.closure_convert(kernel, *like(len(indices)))
    part, part_consts = jax.closure_convert(kernel, *like(chunk))
    height = math.prod(sizes)

    def together(consts: PyTree, values: jax.Array, p: Any, state: Record) -> Any:
        kernel = lambda *x: whole(*x, *consts[0])  # noqa: E731
        return _together(kernel, sizes, indices, values, p, state, adds)

    @jax.custom_jvp
    def step(consts: PyTree, values: jax.Array, p: Any, state: Record) -> Any:
        kernel = lambda *x: part(*x, *consts[1])  # noqa: E731
        last = len(indices) - chunk

        def body(carry: PyTree) -> Any:
            done, first, state = carry
            # The last chunk begins early, so that it ends with the last entry.
            start = jnp.minimum(done, last)
            fresh = start + jnp.arange(chunk, dtype=jnp.int32) >= done
            cut = lambda x: lax.dynamic_slice_in_dim(x, start, chunk)  # noqa: E731
            ids = jnp.where(fresh, cut(indices), height)
            now = first if adds else p
            new, state = _together(kernel, sizes, ids, cut(values), now, state, adds)
            if not adds:
                new = access.where_rows(fresh, new, cut(first))
                new = lax.dynamic_update_slice_in_dim(first, new, start, 0)
            return done + chunk, new, state

        if adds:
            first = p
        else:  # in the kernel's own dtype, which need not be that of the gradient
            shape = jax.eval_shape(kernel, *like(chunk))[0]
            first = access.late_zeros((len(indices), *shape.shape[1:]), shape.dtype, values)
            (first,) = _jax.as_varying_as(jax.tree.leaves((values, p, state)), first)
        start = jnp.zeros((), jnp.int32), first, state
        return lax.while_loop(lambda x: x[0] < present, body, start)[1:]

    step.defjvp(lambda primals, tangents: jax.jvp(together, primals, tangents))
    return step((whole_consts, part_consts), values, p, state)  # type: ignore[no-any-return]


def _like(operands: PyTree, row_axes: int, count: int) -> Any:
    """Zeros as ``count`` rows of ``[K, *D]``, the first, and of each array ``[V, ...]``.

    They vary as these do inside a ``shard_map``.
    """
    rows, tree = _jax.flatten(operands)
    shapes = ((count, *x.shape[row_axes if i else 1 :]) for i, x in enumerate(rows))
    zeros = map(jnp.zeros, shapes, (x.dtype for x in rows))
    return tree.unflatten(_jax.as_varying_as(rows, *zeros))


def _all_rows(
    plan: Plan,
    kernel: Kernel,
    sizes: tuple[int, ...],
    indices: jax.Array,
    values: jax.Array,
    p: jax.Array | None,
    state: Record,
    adds: bool,
) -> tuple[jax.Array, jax.Array, Record]:
    """One pass over the table; what it did to rows not named is dropped."""
    num_rows = math.prod(sizes)
    indices = access.canonical_indices(indices, num_rows)
    wide = widened(values)
    sums = jnp.zeros((*sizes, *values.shape[1:]), wide.dtype)
    sums = add_rows(sums, indices, wide, distinct=not plan.sums).astype(values.dtype)
    at = jnp.zeros(sizes, bool).at[access.places(indices, sizes, len(sizes))]
    named = at.set(True, mode="drop", wrap_negative_indices=False)
    update, new = _keeping_unnamed(kernel, named, sums, p, state)
    if "last" in state and platform_of(*state.values()) == "cpu":
        # The update reads state, which XLA:CPU would copy to write it before (jax 0.12).
        update, new = lax.optimization_barrier((update, new))
    new = {**state, **new}
    every = jnp.arange(num_rows, dtype=indices.dtype)
    every = jnp.where(named.reshape(-1), every, num_rows)
    if adds:
        assert p is not None
        return every, (p + update).astype(p.dtype), new
    return every, update.reshape(num_rows, *update.shape[len(sizes) :]), new


def _keeping_unnamed(
    kernel: Kernel,
    named: jax.Array,
    sums: jax.Array,
    p: jax.Array | None,
    state: Record,
) -> Change:
    """``kernel(sums, p, state)``, whose new state keeps the rows that are not named.

    Each keeps them as soon as it is computed, and the rest of the kernel reads the result;
    in the rows named that is the same. Were they selected after the kernel, its rest would
    read arrays that are being overwritten, which XLA:CPU copies for that (jax 0.10.2 and
    0.12): a step of Adam on 100,000 rows of 64 takes 2 to 3 times as long.
    """
    operands = jax.tree.map(lambda x: derivable(named, x), (sums, p, state))
    program, (_, shapes) = jax.make_jaxpr(kernel, return_shape=True)(*operands)
    names = sorted(shapes)
    old_arrays = [state[name] for name in names]
    _, *new = program.jaxpr.outvars
    computed = {var for eqn in program.jaxpr.eqns for var in eqn.outvars}
    early = [
        not isinstance(var, _jax.Literal) and var in computed and new.count(var) == 1
        for var in new
    ]
    old_of = dict(itertools.compress(zip(new, old_arrays, strict=True), early))
    selected: dict[Any, jax.Array] = {}

    def select(var: Any, x: jax.Array) -> jax.Array:
        if var not in old_of:
            return x
        selected[var] = access.where_rows(named, x, old_of[var].astype(x.dtype))
        return derivable(named, selected[var])

    changed, *outputs = _jax.evaluate(program, jax.tree.leaves(operands), select)
    results = (
        selected[var] if is_early else access.where_rows(named, x, old.astype(x.dtype))
        for is_early, var, x, old in zip(early, new, outputs, old_arrays, strict=True)
    )
    kept = {k: x.astype(state[k].dtype) for k, x in zip(names, results, strict=True)}
    return access.where_rows(named, changed, jnp.zeros((), changed.dtype)), kept
