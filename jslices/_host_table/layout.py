"""Layout of records: a row of a table and its rows of the optimizer's state, as words."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jslices import GradientTransformation, InvalidArgumentError
from jslices._typing import State
from jslices.extend import StateOfRows
from jslices.optim.engine.clock import short_logs


class Field(NamedTuple):
    """One array ``[V, *shape]`` in the records, or a value that all rows share."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


#: Steps that the log of a host knows at most. In a file those to come are a hole.
LOG_STEPS = 1 << 22


class Log(NamedTuple):
    """A log of steps among the shared values, of rows that catch up."""

    number: int  #: of it, among these.
    steps: int  #: of the count of its steps, among these.
    last: int  #: of the field that is the last step of a row.

    def first(self, shared: Sequence[np.ndarray]) -> int:
        """The first step that it knows."""
        return max(0, int(shared[self.steps]) + 1 - shared[self.number].shape[1])

    def columns(
        self, shared: Sequence[np.ndarray], most: int | None = None
    ) -> tuple[int, np.ndarray]:
        """The first step, and the columns ``[n, lines]`` from there on."""
        log, first = np.asarray(shared[self.number]), self.first(shared)
        steps = np.arange(first, int(shared[self.steps]) + 1)[:most]
        return first, log[:, steps % log.shape[1]].T

    def lengthened(
        self, shared: Sequence[np.ndarray], log: np.ndarray, first: int
    ) -> np.ndarray:
        """The same log from this step on, with columns of that of all steps."""
        count, (known, columns) = int(shared[self.steps]), self.columns(shared)
        length = 1 << min(count - first, LOG_STEPS - 1).bit_length()
        steps = np.arange(max(0, count + 1 - length), count + 1)
        longer = np.zeros((columns.shape[1], length), columns.dtype)
        longer[:, steps % length] = log[steps % len(log)].T
        longer[:, np.arange(known, count + 1) % length] = columns.T
        return longer

    def shortened(self, shared: Sequence[np.ndarray], length: int) -> np.ndarray:
        """The same log with the last columns only."""
        first, columns = self.columns(shared)
        log = np.zeros((columns.shape[1], length), columns.dtype)
        steps = np.arange(first, first + len(columns))[-length:]
        log[:, steps % length] = columns[-length:].T
        return log


def logs_among(fields: Sequence[Any], shared: Sequence[Any]) -> tuple[Log, ...]:
    """The logs of steps of rows, by ``(name, dtype, shape)`` of what is kept."""
    rows, values = ([name for name, *_ in part] for part in (fields, shared))
    logs = []
    for number, (name, _, shape) in enumerate(shared):
        state, is_log, _ = f"/{name}".partition("/clock/log/")
        count, last = (f"{state}/{x}"[1:] for x in ("count", "clock/last"))
        if is_log and shape[0] and last in rows:  # not of no parameter
            logs.append(Log(number, values.index(count), rows.index(last)))
    return tuple(logs)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of the records of a table ``[V, *D]`` and its optimizer."""

    tx: GradientTransformation
    dtype: np.dtype[Any]  #: of the table in a step; that of its field may be narrower.
    fields: tuple[Field, ...]  #: the row of the table, then its rows of the state.
    shared: tuple[Field, ...]  #: values kept once for all rows, such as a step count.
    by_row: tuple[bool, ...]  #: for each leaf of the state, whether it is kept row by row.
    tree: Any  #: the structure of the state.
    keyed: str = ""  #: what makes the map of the ids that key the rows.
    width: int = 0  #: of an entry of that map, in 32 bits.

    @property
    def is_narrow(self) -> bool:
        """True if records hold the table in fewer bits than a step computes."""
        return self.fields[0].dtype != self.dtype

    @property
    def word(self) -> np.dtype[Any]:
        """The unsigned integers that records consist of, as wide as the narrowest field.

        Where the table is stored in fewer bits they are as wide as the widest one, and rows
        are padded, as a step takes three times as long on bytes.
        """
        sizes = [field.dtype.itemsize for field in self.fields]
        return np.dtype(f"uint{8 * min(4, (max if self.is_narrow else min)(sizes))}")

    @property
    def words(self) -> int:
        """Words in a record: those of the fields, and one that is 1 once it is written."""
        return sum(self._widths) + 1

    @functools.cached_property
    def logs(self) -> tuple[Log, ...]:
        return logs_among(self.fields, self.shared)

    def column(self, words: np.ndarray, number: int) -> np.ndarray:
        """A field of records ``[n, words]`` in the memory of the host."""
        start, field = sum(self._widths[:number]), self.fields[number]
        column = np.ascontiguousarray(words[:, start : start + self._widths[number]])
        return column.view(field.dtype).reshape(-1, *field.shape)

    @property
    def _widths(self) -> list[int]:
        return [-(-field.nbytes // self.word.itemsize) for field in self.fields]

    def pack(
        self, table: jax.Array, state: State, narrow: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Pack a table ``[n, *D]`` and its state into records ``[n, words]``.

        ``narrow`` rounds the table to the dtype of the records. The values that all rows
        share are returned beside them.

        Raises:
          InvalidArgumentError: for arrays of other shapes or dtypes than the records hold.
        """
        leaves, tree = jax.tree.flatten(state)
        if tree != self.tree:
            raise InvalidArgumentError(
                f"rows.pack(table, state) got a state of the structure {tree}, and this "
                f"table keeps {self.tree}: pass what rows.unpack() or tx.apply returned"
            )
        rows = [x for x, by_row in zip(leaves, self.by_row, strict=True) if by_row]
        rest = [x for x, by_row in zip(leaves, self.by_row, strict=True) if not by_row]
        arrays = [table, *rows]
        height = jnp.shape(table)[0]
        dtypes = [self.dtype, *(field.dtype for field in self.fields[1:])]
        for field, x, dtype in zip(self.fields, arrays, dtypes, strict=True):
            if (jnp.shape(x), x.dtype) != ((height, *field.shape), dtype):
                raise InvalidArgumentError(
                    f"rows.pack(table, state) got {field.name} as {x.dtype}"
                    f"{list(jnp.shape(x))}, and the rows hold it as {dtype}"
                    f"{[height, *field.shape]}: pass what tx.init or tx.apply returned for "
                    "these rows"
                )
        columns = [_as_words(x, self.word) for x in (narrow(table), *rows)]
        written = jnp.ones((height, 1), self.word)
        return jnp.concatenate([*columns, written], axis=1), rest

    def unpack(
        self, words: jax.Array, shared: Sequence[jax.Array]
    ) -> tuple[jax.Array, State]:
        """Unpack records ``[n, words]`` into a table ``[n, *D]`` and its state."""
        columns = jnp.split(words[:, :-1], np.cumsum(self._widths)[:-1], axis=1)
        table, *of_rows = map(_from_words, columns, self.fields)
        rows, rest = iter(of_rows), iter(shared)
        leaves = [next(rows) if by_row else next(rest) for by_row in self.by_row]
        return table.astype(self.dtype), self.tree.unflatten(leaves)


def layout_of(
    shape: tuple[int, ...],
    dtype: DTypeLike,
    tx: GradientTransformation,
    stored: DTypeLike | None = None,
) -> Layout:
    """Find out from ``tx.init`` what is kept for a table of this shape.

    State arrays that grow with the number of rows belong to the rows.

    Raises:
      InvalidArgumentError: where a row cannot be stepped by itself, or ``tx.init`` takes
        tables of one size only.
    """
    V, *row = shape
    leaves, tree = _state(tx, shape, dtype)
    more, taller = _state(tx, (V + 1, *row), dtype)
    if tree != taller:
        raise InvalidArgumentError(
            "HostTable wants an optimizer whose state of some rows is that of a table of "
            "these rows; that of this one names the rows of the whole table, as "
            "multi_steps does: accumulate gradients with jslices.accumulate_gradients"
        )
    by_row = tuple(x.shape != y.shape for (_, x), (_, y) in zip(leaves, more, strict=True))
    narrower = shape if not row else (V, *row[:-1], row[-1] - 1 or 2)
    less, _ = _state(tx, narrower, dtype)
    fields = [Field("table", np.dtype(dtype if stored is None else stored), tuple(row))]
    shared: list[Field] = []
    for is_by_row, (path, x), (_, y) in zip(by_row, leaves, less, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise InvalidArgumentError(
                f"HostTable cannot keep {name} of the optimizer's state, which is "
                f"{x.dtype}; use raw keys: jax.random.key_data"
            )
        if not is_by_row and x.shape != y.shape:
            raise InvalidArgumentError(
                "HostTable wants an optimizer that steps each row by itself; this one "
                f"keeps {name} {list(x.shape)} for all rows together. In adafactor, type "
                "factored=False"
            )
        field = Field(name, np.dtype(x.dtype), x.shape[1:] if is_by_row else x.shape)
        (fields if is_by_row else shared).append(field)
    _refuse_hidden_row_numbers(tx, jax.ShapeDtypeStruct((V, *row), dtype))
    return Layout(tx, np.dtype(dtype), tuple(fields), tuple(shared), by_row, tree)


def _refuse_hidden_row_numbers(tx: GradientTransformation, table: Any) -> None:
    """Refuse what goes by row numbers in a combinator of Optax."""

    def step(x: jax.Array) -> Any:
        rows = StateOfRows((), jnp.zeros(len(x), jnp.int32), len(x))
        how = "optax.chain in a HostTable, or the like,"
        return tx.of_rows(rows).update(x, tx.init(x), x, without_numbers=how)

    with contextlib.suppress(TypeError):  # it wants more than a gradient
        jax.eval_shape(step, table)


def _state(tx: GradientTransformation, shape: Sequence[int], dtype: DTypeLike) -> Any:
    """Paths and abstract values of the state of a table, and its structure."""
    try:
        with short_logs():
            state = jax.eval_shape(tx.of_rows().init, jax.ShapeDtypeStruct(shape, dtype))
    except ValueError as error:
        raise InvalidArgumentError(
            f"HostTable asks tx.init for the state of tables of several sizes, and for one "
            f"of shape {list(shape)} it said: {error}"
        ) from error
    return jax.tree_util.tree_flatten_with_path(state)


def _as_words(x: jax.Array, word: np.dtype[Any]) -> jax.Array:
    """Reinterpret the bits of ``[n, *shape]`` as words ``[n, k]``."""
    if x.dtype == bool:
        x = x.astype(np.uint8)
    if (per_word := word.itemsize // x.dtype.itemsize) > 1:
        x = x.reshape(x.shape[0], -1)
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % per_word)))
        x = x.reshape(x.shape[0], -1, per_word)
    return lax.bitcast_convert_type(x, word).reshape(x.shape[0], -1)


def _from_words(words: jax.Array, field: Field) -> jax.Array:
    """Reinterpret words ``[n, k]`` as ``[n, *shape]``."""
    dtype = np.dtype(np.uint8) if field.dtype == bool else field.dtype
    if words.dtype.itemsize > dtype.itemsize:
        x = lax.bitcast_convert_type(words, dtype).reshape(words.shape[0], -1)
        return x[:, : math.prod(field.shape)].reshape(-1, *field.shape).astype(field.dtype)
    parts = dtype.itemsize // words.dtype.itemsize
    shape = (words.shape[0], *field.shape, *((parts,) if parts > 1 else ()))
    x = lax.bitcast_convert_type(words.reshape(shape), dtype)
    return x.astype(field.dtype)
