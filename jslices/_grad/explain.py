"""``explain``: which gradients are sparse, what they cost, which line made one dense."""

import functools
import html
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jslices import _jax
from jslices._densify import (
    UNKNOWN_LINE,
    DenseUseError,
    UserLine,
    human_bytes,
    raise_at,
    warn_at_line,
)
from jslices._grad.call import ExchangeSpec, LeafSpec, SparseSpec, UserCall
from jslices._grad.exchange_report import ExchangeReport, exchange_reports
from jslices._grad.plan import DenseUse, Planned, Site, plan_call
from jslices._grad.rules import WIDEST_PACKED
from jslices._jax import Source
from jslices._place.hints import PerformanceHint
from jslices._slices import slices_of
from jslices._slices.held import unheld

# Adam reads and writes the parameter and two arrays of state.
_ADAM_ARRAYS = 3


class LookupSite(NamedTuple):
    """One place that looks up rows.

    Attributes:
      line: where, in the user's program (``line.file``, ``line.line``, ``line.text``).
      rows: how many rows it reads in one run, loops multiplied out.
    """

    line: UserLine
    rows: int


class LeafReport(NamedTuple):
    """The report on the gradient of one array.

    Attributes:
      path: the array's name, such as ``params['table']``.
      shape: its shape.
      dtype: its dtype.
      kind: ``"sparse"`` (IndexedSlices), ``"dense"``, or ``"unused"``: no gradient reaches
        it (IndexedSlices without rows).
      lookups: the places that look up its rows, also where the gradient is dense.
      rows: K, the rows read in one run, duplicates counted.
      sparse_bytes: of a gradient of these rows and their int32 indices.
      dense_bytes: of a gradient ``[V, *D]``.
      step_bytes: read and written by one step of ``optimizer``, given this gradient: K
        rows, or all, of the parameter and of its state; without one by a step of Adam.
      dense_line: the first line that needs the whole array; None where nothing does.
      dense_use: the name of the operation on that line.
      suggestion: what to write there instead.
      step: how ``optimizer`` steps the rows, a plan to print; None without one.
      unread: where the gradient is dense, the places that look the array up, but not by
        whole rows.
      exchange: how rows are exchanged between devices, an :class:`ExchangeReport` to print;
        None if they are not, or XLA decides.
      row_axes: how many leading axes number the rows: 2 for ``[L, V, *D]``.
      reads: the places that read rows without a gradient (behind ``stop_gradient``, for an
        auxiliary result, to compare), which catch up too under an exact optimizer.
      whole_line: the first line that needs the whole array where no gradient comes in:
        under an exact optimizer all of its rows then catch up in every step.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    lookups: tuple[LookupSite, ...]
    rows: int
    sparse_bytes: int
    dense_bytes: int
    step_bytes: int
    dense_line: UserLine | None
    dense_use: str | None
    suggestion: str | None
    step: Any = None
    unread: tuple[UserLine, ...] = ()
    exchange: ExchangeReport | None = None
    row_axes: int = 1
    reads: tuple[LookupSite, ...] = ()
    whole_line: UserLine | None = None


class Explanation(NamedTuple):
    """The answer of :func:`explain`; ``print`` it, or read ``leaves``.

    Attributes:
      leaves: a :class:`LeafReport` for every differentiated array, in order.
      optimizer: the name of that whose step is counted.
    """

    leaves: tuple[LeafReport, ...]
    optimizer: str = "Adam"

    @property
    def sparse_bytes(self) -> int:
        """The bytes of all gradients as jslices gives them."""
        return sum(
            x.dense_bytes if x.kind == "dense" else x.sparse_bytes for x in self.leaves
        )

    @property
    def dense_bytes(self) -> int:
        """The bytes of all gradients as ``jax.grad`` gives them."""
        return sum(x.dense_bytes for x in self.leaves)

    def __repr__(self) -> str:
        return str(self)  # as a notebook shows it

    def __str__(self) -> str:
        rows = [self._header, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        # The names get what the other columns leave of a hundred.
        widths[1] = min(widths[1], 26)
        widths[0] = min(widths[0], 100 - sum(widths[1:]) - 2 * (len(widths) - 1))
        lines = [
            "  ".join(
                _clip(cell, width).ljust(width) if i < 3 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines.insert(1, "-" * max(map(len, lines)))
        lines.append(
            f"gradients: {human_bytes(self.sparse_bytes)} with jslices, "
            f"{human_bytes(self.dense_bytes)} with jax.grad"
        )
        for leaf in self._shown():
            lines.extend(_notes(leaf))
        return "\n".join(lines)

    @property
    def _header(self) -> tuple[str, ...]:
        columns = ("array", "shape", "gradient", "rows", "sparse", "dense")
        return (*columns, f"{self.optimizer} moves")

    def _shown(self) -> list[LeafReport]:
        """The arrays that get a line each: one line serves all weights beside tables."""
        tables = [leaf for leaf in self.leaves if leaf.lookups]
        weights = [x for x in self.leaves if x.kind == "dense" and not x.lookups]
        if not tables or len(weights) < 2:
            return list(self.leaves)
        return [leaf for leaf in self.leaves if leaf not in weights]

    def _rows(self) -> list[tuple[str, ...]]:
        shown = self._shown()
        rows = [_cells(leaf) for leaf in shown]
        others = [leaf for leaf in self.leaves if leaf not in shown]
        if others:
            sizes = (sum(x.dense_bytes for x in others), sum(x.step_bytes for x in others))
            name = f"{len(others)} without lookups"
            rows.append((name, "", "dense", "-", "-", *map(human_bytes, sizes)))
        return rows

    def to_markdown(self) -> str:
        """The same as a Markdown table and a list."""
        header = self._header
        rows = [header, ("---",) * len(header), *self._rows()]
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        notes = [note for leaf in self._shown() for note in _notes(leaf, 10_000)]
        items = [f"  - {n[2:]}" if n.startswith("  ") else f"- `{n[:-1]}`" for n in notes]
        return "\n".join([*lines, "", *items])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def explain(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    sparse: SparseSpec = None,
    *,
    has_aux: bool = False,
    optimizer: Any = None,
    exchange: ExchangeSpec = None,
) -> Callable[..., Explanation]:
    """Reports which gradients of ``fun`` are sparse, what they cost, and why not.

    Nothing is computed: the function is traced, and arrays may be described by
    ``jax.ShapeDtypeStruct``, so you can ask about a table of 100 GB.

    Args:
      fun: the function to differentiate.
      argnums: as in :func:`value_and_grad`.
      sparse: as in :func:`value_and_grad`; a violation is reported, not raised.
      has_aux: as in :func:`value_and_grad`.
      optimizer: a :class:`jslices.GradientTransformation`; the report then has the bytes
        that its step moves, and how it steps each sparse array on the default device.
      exchange: as in :func:`value_and_grad`; the report then has the bytes that each device
        receives by either plan, and, for ids with values, how full the fullest pair of
        devices is, and how many ids have no room.

    Returns:
      A function of the same arguments that returns an :class:`Explanation`. ``print`` it
      for a table of at most 100 columns; notebooks show it by themselves.

    Cost: one trace of ``fun``.

    Example:
      >>> import jax, jax.numpy as jnp, jslices as js
      >>> table = jax.ShapeDtypeStruct((1_000_000_000, 128), jnp.float32)
      >>> ids = jax.ShapeDtypeStruct((4096,), jnp.int32)
      >>> report = js.explain(lambda table, ids: (table[ids] ** 2).sum())(table, ids)
      >>> leaf = report.leaves[0]
      >>> leaf.path, leaf.kind, leaf.rows, leaf.sparse_bytes, leaf.dense_bytes
      ('table', 'sparse', 4096, 2113536, 512000000000)

    Source: the question that TensorFlow's "Converting sparse IndexedSlices to a dense
    Tensor" leaves open: which of my lines did this, and what do I write instead?
    """

    @_jax.takes_tables()
    @functools.wraps(fun)
    def explain_fun(*args: Any, **kwargs: Any) -> Explanation:
        args, kwargs = unheld((args, kwargs))
        call = UserCall(fun, argnums, args, kwargs, has_aux)
        planned = plan_call(call, sparse, exchange)
        leaves = [_leaf_report(leaf, planned, n) for n, leaf in enumerate(planned.leaves)]
        for n, report in exchange_reports(planned, call).items():
            leaves[n] = leaves[n]._replace(exchange=report)
        if optimizer is None:
            return Explanation(tuple(leaves))
        leaves = _stepped(optimizer, call, leaves)
        return Explanation(tuple(leaves), str(optimizer).partition("(")[0])

    return explain_fun


def _stepped(
    optimizer: Any, call: UserCall, leaves: Sequence[LeafReport]
) -> list[LeafReport]:
    """The reports, with the optimizer's plan for each sparse leaf and what it moves."""

    def gradient(leaf: LeafReport) -> Any:
        if leaf.kind == "dense":
            return jnp.zeros(leaf.shape, leaf.dtype)
        values = jnp.zeros((leaf.rows, *leaf.shape[leaf.row_axes :]), leaf.dtype)
        return slices_of(values, jnp.zeros((leaf.rows,), jnp.int32), leaf.shape)

    grads = jax.eval_shape(lambda: call.mirror(map(gradient, leaves)))
    params = call.mirror(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    state, tree = jax.eval_shape(optimizer.init, params), _jax.flatten(params)[1]
    plans = tree.flatten_up_to(optimizer.plan(grads, params))

    def parts(x: Any) -> list[Any]:
        """For each parameter its part of a tree that mirrors them, or nothing."""
        try:
            return list(tree.flatten_up_to(x))
        except ValueError:
            return []

    nodes = jax.tree.leaves(state, is_leaf=lambda x: bool(parts(x)))
    columns = zip(*filter(None, map(parts, nodes)), strict=True)
    of_leaves = [jax.tree.leaves(x) for x in columns] or [[]] * len(leaves)
    return [
        leaf._replace(step=plan, step_bytes=_bytes_of_step(leaf, arrays))
        for leaf, plan, arrays in zip(leaves, plans, of_leaves, strict=True)
    ]


def _bytes_of_step(leaf: LeafReport, state: Sequence[Any]) -> int:
    """Read and written by a step with these state arrays; by rows if there are some."""
    if leaf.kind == "sparse":
        rows = leaf.shape[: leaf.row_axes]
        state = [x for x in state if x.shape[: len(rows)] == rows]
    whole = leaf.dense_bytes + sum(x.size * x.dtype.itemsize for x in state)
    return leaf.step_bytes * whole // max(1, _ADAM_ARRAYS * leaf.dense_bytes)


def _leaf_report(leaf: LeafSpec, planned: Planned, number: int) -> LeafReport:
    kind, use, dense_bytes = planned.kind(number), planned.dense.get(number), leaf.num_bytes
    lookups = _by_line(planned.looked_up.get(number, []))
    quiet = [x for x in planned.sites_of(number) if not x.graded]
    whole = planned.no_grad.get(number)
    rows = sum(site.rows for site in lookups)
    moved = min(rows * leaf.row_bytes, dense_bytes) if kind == "sparse" else dense_bytes
    return LeafReport(
        path=leaf.name,
        shape=tuple(leaf.aval.shape),
        dtype=str(leaf.aval.dtype),
        kind=kind,
        lookups=lookups,
        rows=rows,
        sparse_bytes=planned.bytes_of_rows(number),
        dense_bytes=dense_bytes,
        step_bytes=0 if kind == "unused" else 2 * _ADAM_ARRAYS * moved,
        dense_line=None if use is None else _jax.user_line(use.source),
        dense_use=None if use is None else use.what,
        suggestion=None if use is None else instead_of(use),
        unread=_lines(planned.unread.get(number, [])),
        row_axes=leaf.row_axes,
        reads=_by_line(quiet),
        whole_line=None if whole is None else _jax.user_line(whole.source),
    )


def _by_line(sites: Sequence[Site]) -> tuple[LookupSite, ...]:
    rows: dict[UserLine, int] = {}
    for site in sites:
        line = _jax.user_line(site.source)
        rows[line] = rows.get(line, 0) + site.total
    return tuple(LookupSite(*item) for item in rows.items())


def _lines(sources: Sequence[Source]) -> tuple[UserLine, ...]:
    return tuple(dict.fromkeys(map(_jax.user_line, sources)))


# --- the warning and the error ----------------------------------------------------------


def report_dense(planned: Planned, number: int) -> None:
    """Warns that the gradient of a leaf is dense; raises if ``sparse=`` insists on rows."""
    leaf, use = planned.leaves[number], planned.dense.get(number)
    if use is None:
        raise DenseUseError(
            f"sparse= asks for a sparse gradient of {leaf}, but only a floating array with "
            "at least one axis has rows, 2**31 or more by jax_enable_x64; leave it out"
        )
    line = _jax.user_line(use.source)
    if leaf.mode is True:
        message = (
            f"sparse= asks for a sparse gradient of {leaf}, but it is used whole "
            f"({use.what}) at {line}. Instead: {instead_of(use)}"
        )
        raise_at(line, DenseUseError(message))
    sites = planned.looked_up.get(number)
    sources = [site.source for site in sites] if sites else planned.unread[number]
    lookups = ", ".join(map(str, _lines(sources)))
    if sites:
        rows = sum(site.total for site in sites)
        why = (
            f"because it is used whole ({use.what}) at {line}. Its lookups alone "
            f"({lookups}) would give {rows} rows, {human_bytes(rows * leaf.row_bytes)}"
        )
    else:
        why = (
            f"although it is looked up ({lookups}): {use.what} at {line} needs more than "
            "rows of it"
        )
    message = (
        f"the gradient of {leaf} is dense, {human_bytes(leaf.num_bytes)}, {why}. Instead: "
        f"{instead_of(use)}. To accept it: sparse=False"
    )
    warn_at_line(message, line)


def hint_smaller(planned: Planned, number: int) -> None:
    """Hints that the rows of a leaf are many times as large as its dense gradient."""
    leaf, sites = planned.leaves[number], planned.looked_up[number]
    warn_at_line(
        f"the gradient of {leaf} has {sum(site.total for site in sites):,} rows, "
        f"{human_bytes(planned.bytes_of_rows(number))}, and would have "
        f"{human_bytes(leaf.num_bytes)} if it were dense, which is mostly faster. Type "
        f'sparse="if_smaller" in jslices.grad or value_and_grad; to keep the rows: '
        "sparse=True for this array",
        _jax.user_line(sites[0].source),
        PerformanceHint,
    )


# --- what to write instead --------------------------------------------------------------

_REPLICATED = (
    "inside a shard_map let the table differ between devices first, table = "
    "jax.lax.pcast(table, axis, to='varying'), and add the slices up with "
    "jslices.all_reduce_slices(slices, axis, 'sum')"
)
_WHOLE_ROWS = (
    "look up whole rows of a table [V, D], table[ids][..., columns]; single numbers, t[i, "
    "j], of one that is kept flat, as t[i * n + j]; 2**31 rows or more by jax_enable_x64"
)
_AFTER = "apply the function after the lookup, f(table[ids]), not before or around it"
#: Uses that make a gradient dense, by primitive, and what to write instead. Any other
#: primitive without a rule makes it dense as well.
DENSE_USES = {
    "dot_general": "a product with the whole table has a dense gradient: score only "
    "some rows, h @ table[candidates].T, or keep a separate output matrix",
    "one_hot": "look the rows up, and weigh them: weights[..., None] * table[ids] for "
    "(weights[..., None] * jax.nn.one_hot(ids, V)) @ table",
    "transpose": "table.T is mostly the output layer of tied weights: score only some "
    "rows, h @ table[candidates].T, or keep a separate output matrix",
    "custom_jvp_call": _AFTER,
    "custom_vjp_call": f"{_AFTER}; a backward that is not linear then gets the cotangent "
    "of each lookup instead of their sum",
    "gather": _WHOLE_ROWS,
    "dynamic_slice": _WHOLE_ROWS,
    "squeeze": _WHOLE_ROWS,
    "reshape": f"{_WHOLE_ROWS}; a packed table, packed.reshape(V, D)[ids], has at least "
    f"two rows, of at most {WIDEST_PACKED} numbers each",
    "scan": "let the loop's body read the table from outside, instead of carrying it or "
    "looping over its rows",
    "while": "a while loop hides the lookup; jax.lax.fori_loop with a fixed number of "
    "turns, or jax.lax.scan, does not",
    "custom_linear_solve": "look the rows up before the solver is called",
    "cond": "do not return the table from a branch; look the rows up inside it",
    "sort": "sort the rows that were looked up, not the table",
    "pvary": _REPLICATED,
    "pcast": _REPLICATED,
    "shard_map": "call jslices.grad inside the shard_map, not around it",
}
_PENALTY = (
    "penalise the rows that were looked up, (rows**2).sum(), or put "
    "jax.lax.stop_gradient around a mere measurement"
)
_STATISTIC = (
    "a mean, a norm or the like over all rows is a function of each of them: take it of "
    "the rows that were looked up, rows - rows.mean(0), or put jax.lax.stop_gradient "
    "around it"
)
_OTHERWISE = (
    "look up the rows that are needed, table[ids], before this step, or put "
    "jax.lax.stop_gradient around it"
)


def instead_of(use: DenseUse) -> str:
    """A suggestion for a use of a whole table."""
    if use.what.startswith("reduce_") or use.what in ("argmax", "argmin", "cumsum"):
        return _PENALTY if use.to_scalar else _STATISTIC
    return DENSE_USES.get(use.what, _OTHERWISE)


# --- layout ------------------------------------------------------------------------


def _cells(leaf: LeafReport) -> tuple[str, ...]:
    looked_up = bool(leaf.lookups)
    return (
        leaf.path,
        jax.core.ShapedArray(leaf.shape, leaf.dtype).str_short(short_dtypes=True),
        leaf.kind,
        f"{leaf.rows:,}" if looked_up else "-",
        human_bytes(leaf.sparse_bytes) if looked_up else "-",
        human_bytes(leaf.dense_bytes),
        human_bytes(leaf.step_bytes),
    )


def _notes(leaf: LeafReport, width: int = 98) -> list[str]:
    """Where an array is looked up, and what makes its gradient dense."""
    lines = [f"  looked up, {rows:,} rows: {_at_line(line)}" for line, rows in leaf.lookups]
    lines.extend(f"  looked up, but no rows: {_at_line(line)}" for line in leaf.unread)
    lines.extend(
        f"  read without gradient, {rows:,} rows: {_at_line(line)}"
        for line, rows in leaf.reads
    )
    if leaf.whole_line is not None:
        lines.append(f"  used whole without gradient: {_at_line(leaf.whole_line)}")
    if leaf.dense_line is not None:
        lines.append(f"  used whole ({leaf.dense_use}): {_at_line(leaf.dense_line)}")
        # An ordinary weight should have a dense gradient.
        if leaf.lookups or leaf.unread:
            lines.append(f"  instead: {leaf.suggestion}")
    if leaf.kind == "sparse" and leaf.row_axes > 1:
        row = list(leaf.shape[leaf.row_axes :])
        lines.insert(0, f"  rows {row}, numbered by the first {leaf.row_axes} axes")
    if leaf.kind == "unused":
        lines.append("  no gradient comes in: no rows, not stepped")
    if leaf.kind == "sparse" and leaf.sparse_bytes >= leaf.dense_bytes:
        lines.append("  fewer bytes if dense: sparse='if_smaller' makes it so")
    if leaf.exchange is not None:
        lines.append(f"  travels: {leaf.exchange}")
    if leaf.step is not None:
        lines.append(f"  stepped: {leaf.step}")
    if lines:
        lines.insert(0, f"{leaf.path}:")
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent="      ", break_on_hyphens=False
    )
    return [piece for line in lines for piece in wrapper.wrap(line)]


def _at_line(line: UserLine) -> str:
    if line == UNKNOWN_LINE:
        return "the function's result"
    return line.place + (f": {line.text}" if line.text else "")


def _clip(text: str, width: int) -> str:
    """Shorten a name from its beginning, as its end says more."""
    return text if len(text) <= width else "..." + text[3 - width :]
