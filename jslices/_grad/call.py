"""One call of the user's function, as a traced program of the differentiated arrays."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jslices import _jax
from jslices._jax import flatten


class Call:
    """One call of the user's function, as a function of the differentiated arrays."""

    def __init__(
        self,
        fun: Callable[..., Any],
        chosen: Sequence[int],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        has_aux: bool,
    ) -> None:
        self.fun, self.chosen, self.has_aux = fun, chosen, has_aux
        self.primals, self.tree = flatten(tuple(args[i] for i in chosen))
        # What is only described (`explain` may be asked about arrays that do not exist)
        # becomes an input of the program; everything else is a constant of it.
        rest = ([x for i, x in enumerate(args) if i not in chosen], kwargs)
        self.rest, self.rest_tree = flatten(rest)
        self.described = [isinstance(x, jax.ShapeDtypeStruct) for x in self.rest]

    @property
    def names(self) -> list[str]:
        """What the user calls the differentiated arguments."""
        try:
            parameters = list(inspect.signature(self.fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = [
            p.name
            for p in parameters
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        return [positional[i] if i < len(positional) else f"args[{i}]" for i in self.chosen]

    def trace(self) -> tuple[_jax.Program, "Outputs"]:
        """The traced program (inputs: the arrays), and how to read its outputs."""
        found: list[Outputs] = []

        def flat(*inputs: Any) -> list[Any]:
            given = iter(inputs)
            chosen = self.tree.unflatten([next(given) for _ in self.primals])
            rest, kwargs = self.rest_tree.unflatten(
                next(given) if described else x
                for x, described in zip(self.rest, self.described, strict=True)
            )
            args = list(rest)
            for i, arg in sorted(zip(self.chosen, chosen, strict=True), key=lambda x: x[0]):
                args.insert(i, arg)
            out, aux = _split_aux(self.fun(*args, **kwargs), self.has_aux)
            results, out_tree = flatten(out)
            aux_leaves, aux_tree = flatten(aux)
            # Only arrays can leave a traced program; names, None, numbers stay outside.
            arrays = [x for x in aux_leaves if isinstance(x, jax.Array)]
            fixed = [None if isinstance(x, jax.Array) else (x,) for x in aux_leaves]
            found.append(Outputs(out_tree, len(results), aux_tree, fixed))
            return [*results, *arrays]

        described = [x for x, d in zip(self.rest, self.described, strict=True) if d]
        program = jax.make_jaxpr(flat)(*self.primals, *described)
        return program, found[-1]


def chosen_arguments(argnums: int | Sequence[int], args: Sequence[Any]) -> tuple[int, ...]:
    """The positions of the differentiated arguments, counted from the front."""
    numbers = np.atleast_1d(np.asarray(argnums)).tolist()
    if not all(isinstance(number, int) for number in numbers):
        raise TypeError(f"argnums must be an integer or several, got {argnums!r}")
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise ValueError(
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
    return isinstance(argnums, int | np.integer)


class Outputs(NamedTuple):
    """How the flat outputs of the traced program make the user's result and aux."""

    tree: Any
    num_results: int
    aux_tree: Any
    aux_fixed: list[Any]

    def result(self, flat: Sequence[Any]) -> Any:
        return self.tree.unflatten(flat)

    def aux(self, arrays: Sequence[Any]) -> Any:
        left = iter(arrays)
        leaves = [next(left) if fixed is None else fixed[0] for fixed in self.aux_fixed]
        return self.aux_tree.unflatten(leaves)


def _split_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        return out, ()
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError(
            "with has_aux=True the function must return a pair (result, aux), got "
            f"{type(out).__name__}"
            + (f" of {len(out)}" if isinstance(out, tuple | list) else "")
        )
    return out[0], out[1]
