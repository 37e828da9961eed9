"""One call of the user's function: its arguments, and the program that is traced of it.

The arrays by which it is differentiated are its *leaves*.
"""

import copy
import dataclasses
import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jslices._arguments import is_function
from jslices._exchange.plan import Exchange, ExchangePlan, plan_exchange
from jslices._grad.arguments import chosen_arguments, split_aux
from jslices._grad.nnx import lost_changes
from jslices._grad.views import TableView, View, folded
from jslices._jax import Program, broadcast_prefix
from jslices._place.boundary import explicit_mesh, explicit_part
from jslices._rows.access import INT32_MAX, is_below, rows_numbered
from jslices._typing import Aval, PyTree

#: What ``sparse=`` says of one array: True insists on rows, False on a dense gradient,
#: None leaves it to the program, and "if_smaller" takes rows where they are fewer bytes.
SparseMode = bool | Literal["if_smaller"] | None

#: ``sparse=``: one mode for all arrays, a pytree prefix of them, or a function of a leaf.
SparseSpec = Any | Callable[[Any, Any], SparseMode] | None

#: ``exchange=``: one Exchange for all arrays, or a pytree prefix of them. For None, and for
#: arrays that a dict leaves out, the array's type decides.
ExchangeSpec = Any | None

#: Stepping a smaller array whole is as fast as by rows.
SMALL_BYTES = 1 << 16

_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class UserCall:
    """One call of the user's function, as a function of the differentiated arrays."""

    primals: list[Any]  # the differentiated arrays
    tree: Any  # the structure of the tuple of their arguments
    _rest_tree: Any

    def __init__(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        has_aux: bool,
        inputs: Sequence[int] = (),
    ) -> None:
        self._fun, self._has_aux = fun, has_aux
        self._chosen = chosen = chosen_arguments(argnums, args)
        #: True where ``argnums`` is one number, and gradients mirror that argument.
        self.single = np.ndim(argnums) == 0
        self.primals, self.tree = jax.tree.flatten(tuple(args[i] for i in chosen))
        # Arrays that are only described (`explain` accepts ones that do not exist), and the
        # arguments `inputs`, become inputs of the program; all else is a constant of it.
        self._others = [None if i in chosen else x for i, x in enumerate(args)], kwargs
        paths, self._rest_tree = jax.tree_util.tree_flatten_with_path(self._others)
        self._rest = [x for _, x in paths]
        described = [isinstance(x, jax.ShapeDtypeStruct) for x in self._rest]
        #: True if something besides the differentiated arrays is only described.
        self.is_described = any(described)
        of_inputs = [path[0].idx == 0 and path[1].idx in inputs for path, _ in paths]
        self._is_input = list(map(operator.or_, described, of_inputs))
        self.inputs = list(itertools.compress(self._rest, self._is_input))

    def at(self, arguments: PyTree, inputs: PyTree) -> "UserCall":
        """The same call with other values of the differentiated argument, and inputs."""
        new = copy.copy(self)
        new.primals = self.tree.flatten_up_to((arguments,))
        new.inputs = jax.tree.leaves(inputs)
        return new

    def mirror(self, leaves: Iterable[Any]) -> Any:
        """The differentiated argument, or the tuple of them, with other leaves."""
        arguments = self.tree.unflatten(leaves)
        return arguments[0] if self.single else arguments

    @functools.cached_property
    def names(self) -> list[str]:
        """What the user calls the differentiated arguments."""
        try:
            parameters = list(inspect.signature(self._fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = (x for x in parameters if x.kind <= x.POSITIONAL_OR_KEYWORD)
        names = {i: x.name for i, x in enumerate(positional)}
        return [names.get(i, f"args[{i}]") for i in self._chosen]

    @functools.cached_property
    def paths(self) -> list[tuple[Any, ...]]:
        """The key path of every differentiated array in the tuple of arguments."""
        tree = self.tree.unflatten(self.primals)
        return [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]

    @functools.cached_property
    def leaf_names(self) -> list[str]:
        """What the user calls every differentiated array."""
        roots = self.names
        return [roots[x[0].idx] + jax.tree_util.keystr(x[1:]) for x in self.paths]

    def trace(self) -> tuple[Program, "Outputs"]:
        """The traced program (inputs: the arrays), and how to read its outputs."""
        structures: list[Outputs] = []

        def flat(*inputs: Any) -> list[Any]:
            left = iter(inputs)
            chosen = self.tree.unflatten([next(left) for _ in self.primals])
            rest, kwargs = self._others  # the objects themselves: they may be changed
            if self.inputs:
                rest, kwargs = self._rest_tree.unflatten(
                    next(left) if is_input else x
                    for x, is_input in zip(self._rest, self._is_input, strict=True)
                )
            args = list(rest)
            for i, arg in zip(self._chosen, chosen, strict=True):
                args[i] = arg
            with lost_changes(self.names, chosen):
                out, aux = split_aux(self._fun(*args, **kwargs), self._has_aux)
            results, out_tree = jax.tree.flatten(out)
            _check_results(results)
            aux_leaves, aux_tree = jax.tree.flatten(aux)
            # Only arrays can leave a traced program; names, None, numbers stay outside.
            arrays = [x for x in aux_leaves if isinstance(x, jax.Array)]
            fixed = [None if isinstance(x, jax.Array) else (x,) for x in aux_leaves]
            structures.append(Outputs(out_tree, len(results), aux_tree, fixed))
            return [*results, *arrays]

        # JAX's errors name what a function wraps.
        wrapped = {"__wrapped__": _definition(self._fun)}
        vars(flat).update(wrapped, __signature__=inspect.signature(flat))
        try:
            program = jax.make_jaxpr(flat)(*self.primals, *self.inputs)
        except _NEEDS_VALUES as error:
            error.add_note(
                "jslices differentiates a function as jax.jit compiles it, traced, without "
                "values: for if, while and int() use jnp.where, jax.lax.cond, while_loop"
            )
            raise
        return program, structures[-1]


class Outputs(NamedTuple):
    """The structure of the user's result and aux in the outputs of the program."""

    tree: jax.tree_util.PyTreeDef
    num_results: int  # the other outputs belong to aux
    aux_tree: jax.tree_util.PyTreeDef
    #: ``(leaf,)`` for every leaf of aux; None for an array, which is an output.
    aux_fixed: list[Any]

    def aux(self, arrays: Sequence[jax.Array]) -> Any:
        left = iter(arrays)
        leaves = [next(left) if fixed is None else fixed[0] for fixed in self.aux_fixed]
        return self.aux_tree.unflatten(leaves)


def _definition(fun: Any) -> Any:
    """The definition behind a function: the method of a callable object, say."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return fun if hasattr(fun, "__name__") else type(fun).__call__


def _check_results(results: Sequence[Any]) -> None:
    for x in results:
        try:
            jax.typeof(x)
        except TypeError:
            raise TypeError(
                f"the function must return arrays, got {x!r} of type {type(x).__name__}; "
                "return the rest as an auxiliary part, (result, aux) with has_aux=True"
            ) from None


def check_callable(fun: Any) -> None:
    if not callable(fun):
        raise TypeError(f"expected a function to differentiate, got {fun!r}")


def check_inputs(call: UserCall, holomorphic: bool, allow_int: bool) -> None:
    """Raises TypeError for an argument that JAX does not differentiate either."""
    for i, x in enumerate(call.primals):
        dtype = getattr(x, "dtype", None)
        if dtype is None:
            if not isinstance(x, int | float | complex | np.generic):
                raise TypeError(
                    f"cannot differentiate {call.leaf_names[i]}, {x!r} of type "
                    f"{type(x).__name__}: the differentiated arguments must consist of "
                    f"arrays. {_SPLIT}, or pass the rest as another argument"
                )
            dtype = jnp.result_type(x)
        if holomorphic and not jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(
                f"holomorphic=True wants complex inputs, got {dtype} for "
                f"{call.leaf_names[i]}"
            )
        if not (allow_int or jnp.issubdtype(dtype, jnp.inexact)):
            raise TypeError(
                f"cannot differentiate {call.leaf_names[i]}, an array of dtype {dtype}; "
                f"pass it as another argument. {_SPLIT}, or set allow_int=True (its "
                "gradient is then of dtype float0)"
            )


_SPLIT = (
    "Split a model that holds more than parameters: nnx.split(model, nnx.Param, ...) or "
    "argnums=nnx.DiffState(0, nnx.Param), eqx.partition(model, eqx.is_inexact_array)"
)


# --- leaves -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """One differentiated array, and what the user says of its gradient."""

    name: str  # such as ``params['table']``
    aval: Aval
    mode: SparseMode
    exchange: Exchange | None = None
    row_axes: int = 1  # how many leading axes number its rows, if it has rows
    caught_up: bool = False  # whether no row of it has missed steps

    @functools.cached_property
    def may_be_sparse(self) -> bool:
        """Whether there are rows, not unwanted, and integers hold their numbers."""
        has_rows = self.aval.ndim > 0 and jnp.issubdtype(self.aval.dtype, jnp.inexact)
        if not has_rows or self.mode is False:
            return False
        wide = jax.config.read("jax_enable_x64")
        return wide or not is_below(INT32_MAX, self.table_shape[0])

    @functools.cached_property
    def table_shape(self) -> tuple[int, ...]:
        """Its shape with one axis of rows, ``(V, *D)``."""
        shape, axes = tuple(self.aval.shape), self.row_axes
        return (rows_numbered(shape, axes), *shape[axes:])

    def view(self, number: int, array: jax.Array | None = None) -> View:
        """The view of it, as the leaf with this number."""
        shape, dtype = self.table_shape, self.aval.dtype
        table = TableView(shape, dtype, number, array, caught_up=self.caught_up)
        return folded(table, tuple(self.aval.shape[: self.row_axes]))

    @property
    def is_small(self) -> bool:
        """Too small for sparse or dense to matter."""
        return is_below(self.num_bytes, SMALL_BYTES)

    @property
    def num_bytes(self) -> int:
        return self.aval.size * self.aval.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return math.prod(self.aval.shape[self.row_axes :]) * self.aval.dtype.itemsize

    def exchange_of(self, count: int) -> ExchangePlan | None:
        """The exchange of a read of ``count`` rows; None if XLA decides."""
        return plan_exchange(self.aval, self.exchange, self.name, count, self.row_axes)

    def sharding(self, exchange: ExchangePlan | None) -> NamedSharding | None:
        """The sharding of the gradient's values on a mesh of Explicit axes; else None."""
        if explicit_mesh(self.aval) is None:
            return None
        rows = None if exchange is None else exchange.placement.rows or None
        mesh, spec = self.aval.sharding.mesh, self.aval.sharding.spec
        return explicit_part(mesh, PartitionSpec(rows, *spec[self.row_axes :]))

    def __str__(self) -> str:
        return f"{self.name} ({self.aval.str_short()})"


def describe_leaves(
    call: UserCall, spec: SparseSpec, exchange: ExchangeSpec
) -> list[LeafSpec]:
    """A LeafSpec for every differentiated array."""
    tree = call.mirror(call.primals)
    of_these = "or a pytree of these that is a prefix of the differentiated argument"
    modes = broadcast_prefix(
        None if is_function(spec) else spec,
        tree,
        f"sparse= must be a bool, 'if_smaller', a function of (path, leaf), {of_these}",
    )
    exchanges = broadcast_prefix(
        _fill_prefix(exchange, tree),
        tree,
        f"exchange= must be a jslices.Exchange, {of_these}",
    )
    leaves = []
    columns = call.leaf_names, call.paths, call.primals, modes, exchanges
    for name, path, x, mode, exchange in zip(*columns, strict=True):
        if is_function(spec):
            mode = spec(path[1:] if call.single else path, x)
        if not (mode is None or isinstance(mode, bool) or mode == "if_smaller"):
            raise TypeError(
                "sparse= must give True, False, None or 'if_smaller' for each array, got "
                f"{mode!r} for {name}"
            )
        if not (exchange is None or isinstance(exchange, Exchange)):
            raise TypeError(
                "exchange= must give a jslices.Exchange or None for each array, got "
                f"{exchange!r} for {name}"
            )
        leaves.append(LeafSpec(name, jax.typeof(x), mode, exchange))
    return leaves


def _fill_prefix(prefix: PyTree, tree: PyTree) -> PyTree:
    """``prefix`` with None for what its dicts do not name."""
    if isinstance(prefix, tuple) and isinstance(tree, tuple) and len(prefix) == len(tree):
        filled = map(_fill_prefix, prefix, tree)
        return type(prefix)(*filled) if hasattr(prefix, "_fields") else tuple(filled)
    if not isinstance(prefix, dict) or not isinstance(tree, dict) or prefix.keys() - tree:
        return prefix
    return {key: _fill_prefix(prefix.get(key), tree[key]) for key in tree}
