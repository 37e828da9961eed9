"""One call of the user's function: its arguments, and the program that is traced of it."""

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jslices._grad.changes import arrays_of_models, warn_of_lost_changes
from jslices._jax import Program, flatten

_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Call:
    """One call of the user's function, as a function of the differentiated arrays.

    Attributes:
      primals: those arrays, the leaves of the differentiated arguments.
      tree: the structure of the tuple of these arguments.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        chosen: Sequence[int],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        has_aux: bool,
    ) -> None:
        self._fun, self._chosen, self._has_aux = fun, chosen, has_aux
        self.primals, self.tree = flatten(tuple(args[i] for i in chosen))
        # What is only described (`explain` may be asked about arrays that do not exist)
        # becomes an input of the program; everything else is a constant of it.
        self._others = [x for i, x in enumerate(args) if i not in chosen], kwargs
        self._rest, self._rest_tree = flatten(self._others)
        self._described = [isinstance(x, jax.ShapeDtypeStruct) for x in self._rest]

    def at(self, *args: Any) -> "Call":
        """The same call with other values of the differentiated arguments."""
        new = copy.copy(self)
        new.primals, tree = flatten(args)
        assert tree == self.tree
        return new

    @property
    def is_described(self) -> bool:
        """Whether something besides the differentiated arrays is only described."""
        return any(self._described)

    @property
    def names(self) -> list[str]:
        """What the user calls the differentiated arguments."""
        try:
            parameters = list(inspect.signature(self._fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = [
            p.name
            for p in parameters
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        return [
            positional[i] if i < len(positional) else f"args[{i}]" for i in self._chosen
        ]

    @functools.cached_property
    def paths(self) -> list[tuple[Any, ...]]:
        """The key path of every differentiated array in the tuple of arguments."""
        tree = self.tree.unflatten(self.primals)
        return [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]

    @property
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
            if self.is_described:
                rest, kwargs = self._rest_tree.unflatten(
                    next(left) if described else x
                    for x, described in zip(self._rest, self._described, strict=True)
                )
            args = list(rest)
            for i, arg in sorted(
                zip(self._chosen, chosen, strict=True), key=lambda x: x[0]
            ):
                args.insert(i, arg)
            before = arrays_of_models(self.names, chosen)
            out, aux = split_aux(self._fun(*args, **kwargs), self._has_aux)
            if before:
                warn_of_lost_changes(before, arrays_of_models(self.names, chosen))
            results, out_tree = flatten(out)
            _check_results(results)
            aux_leaves, aux_tree = flatten(aux)
            # Only arrays can leave a traced program; names, None, numbers stay outside.
            arrays = [x for x in aux_leaves if isinstance(x, jax.Array)]
            fixed = [None if isinstance(x, jax.Array) else (x,) for x in aux_leaves]
            structures.append(Outputs(out_tree, len(results), aux_tree, fixed))
            return [*results, *arrays]

        described = [x for x, d in zip(self._rest, self._described, strict=True) if d]
        # JAX's errors name what a function wraps.
        wrapped = {"__wrapped__": _definition(self._fun)}
        vars(flat).update(wrapped, __signature__=inspect.signature(flat))
        try:
            program = jax.make_jaxpr(flat)(*self.primals, *described)
        except _NEEDS_VALUES as error:
            error.add_note(
                "jslices differentiates a function as jax.jit compiles it, traced, without "
                "values: for if, while and int() use jnp.where, jax.lax.cond, while_loop"
            )
            raise
        return program, structures[-1]


class Outputs(NamedTuple):
    """The structure of the user's result and aux in the outputs of the program.

    Attributes:
      tree: the structure of the result.
      num_results: how many of the outputs are the result's; the others are aux's.
      aux_tree: the structure of aux.
      aux_fixed: ``(leaf,)`` for every leaf of aux; None for an array, which is an output.
    """

    tree: jax.tree_util.PyTreeDef
    num_results: int
    aux_tree: jax.tree_util.PyTreeDef
    aux_fixed: list[Any]

    def result(self, flat: Sequence[jax.Array]) -> Any:
        return self.tree.unflatten(flat)

    def aux(self, arrays: Sequence[jax.Array]) -> Any:
        left = iter(arrays)
        leaves = [next(left) if fixed is None else fixed[0] for fixed in self.aux_fixed]
        return self.aux_tree.unflatten(leaves)


def split_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """The result and aux of what the user's function returns."""
    if not has_aux:
        return out, ()
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError(
            "with has_aux=True the function must return a pair (result, aux), got "
            f"{type(out).__name__}"
            + (f" of {len(out)}" if isinstance(out, tuple | list) else "")
        )
    return out[0], out[1]


def _definition(fun: Any) -> Any:
    """What defines a function: the method of an object that can be called, say."""
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


def chosen_arguments(argnums: int | Sequence[int], args: Sequence[Any]) -> tuple[int, ...]:
    """The positions of the differentiated arguments, counted from the front."""
    numbers = np.atleast_1d(np.asarray(argnums)).tolist()
    if not all(isinstance(number, int) for number in numbers):
        advice = ""
        if any(hasattr(x, "filter") for x in numbers):  # a nnx.DiffState
            advice = (
                ", which jslices.grad and value_and_grad take; here split the model, "
                "graph, params, rest = nnx.split(model, nnx.Param, ...), and pass a "
                "function of params"
            )
        raise TypeError(f"argnums must be an integer or several, got {argnums!r}{advice}")
    for number in numbers:
        if not -len(args) <= number < len(args):
            error = TypeError if number >= 0 else ValueError  # as JAX's
            raise error(
                f"argnums={argnums} needs at least "
                f"{max(n + 1 if n >= 0 else -n for n in numbers)} positional "
                f"arguments, got {len(args)}; differentiated arguments cannot be "
                "passed by keyword"
            )
    positions = tuple(number % len(args) for number in numbers)
    if len(set(positions)) < len(positions):
        raise ValueError(f"argnums={argnums} names an argument twice")
    return positions


def is_number(argnums: Any) -> bool:
    """True for one argument, False for several."""
    return np.ndim(argnums) == 0
