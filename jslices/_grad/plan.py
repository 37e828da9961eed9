"""The plan of one call: its traced program, its leaves, and which of them are sparse."""

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jslices import _jax
from jslices._devices.exchange import Exchange
from jslices._grad.interpret import Candidate, DenseUse, Plan, Site, plan_lookups
from jslices._jax import flatten

#: What ``sparse=`` says of one array: True insists on rows, False on a dense gradient,
#: None leaves it to the program, and "if_smaller" takes rows where they are fewer bytes.
Wish = bool | Literal["if_smaller"] | None

#: ``sparse=``: one wish for all arrays, a pytree prefix of them, or a function of a leaf.
SparseSpec = Any | Callable[[Any, Any], Wish] | None

#: ``exchange=``: one Exchange for all arrays, or a pytree prefix of them, in which None and
#: what a dict leaves out mean: as the array's type says.
ExchangeSpec = Any | None


class Planned(NamedTuple):
    """A traced call and what was decided about its leaves.

    Attributes:
      program: the traced call; its first inputs are the leaves.
      outputs: how to read its outputs.
      leaves: the differentiated arrays.
      plan: the lookups of the sparse leaves.
      dense: why a leaf that could have been sparse is not.
      looked_up: for every leaf, sparse or not, the places that look up rows of it.
      unread: for dense leaves without any the places that look them up otherwise.
      eager: whether there is no ``jax.jit`` around the call.
    """

    program: _jax.Program
    outputs: "Outputs"
    leaves: list["Leaf"]
    plan: Plan
    dense: dict[int, DenseUse]
    looked_up: dict[int, list[Site]]
    unread: dict[int, list[_jax.Source]]
    eager: bool

    def kind(self, leaf: int) -> str:
        """``"sparse"``, ``"dense"``, or ``"unused"``: nothing asks for its gradient."""
        if leaf in self.dense or not self.leaves[leaf].may_be_sparse:
            return "dense"
        return "sparse" if self.looked_up.get(leaf) else "unused"

    def bytes_of_rows(self, leaf: int) -> int:
        """Of the rows that are looked up, as a gradient with its row numbers."""
        aval, sites = self.leaves[leaf].aval, self.looked_up.get(leaf, [])
        row = math.prod(aval.shape[1:]) * aval.dtype.itemsize
        return sum(site.total * (row + site.index_dtype.itemsize) for site in sites)


def plan_call(
    call: "Call", single: bool, spec: SparseSpec, exchange: ExchangeSpec = None
) -> Planned:
    """Traces a call and decides which of its leaves are sparse.

    Args:
      call: the call.
      single: True where ``argnums`` was one number: ``spec`` then speaks of that argument,
        otherwise of the tuple of arguments.
      spec: ``sparse=``.
      exchange: ``exchange=``.
    """
    leaves = _describe_leaves(call, single, spec, exchange)
    program, outputs = call.trace()
    eager = not _jax.is_staged()

    def planned() -> Planned:
        candidates = {
            i: leaf.candidate for i, leaf in enumerate(leaves) if leaf.may_be_sparse
        }
        decided = plan_lookups(program, candidates, outputs.num_results, eager)
        return Planned(program, outputs, leaves, *decided, eager)

    first = planned()
    larger = [i for i in range(len(leaves)) if _is_to_be_dense(first, i)]
    if not larger:
        return first
    for i in larger:
        leaves[i] = leaves[i]._replace(wish=False)
    return planned()._replace(looked_up=first.looked_up)


def _is_to_be_dense(planned: Planned, leaf: int) -> bool:
    """Whether rows are unwanted where they are not smaller, and they are not."""
    if planned.leaves[leaf].wish != "if_smaller" or planned.kind(leaf) != "sparse":
        return False
    whole = planned.leaves[leaf].num_bytes
    return _jax.definitely(lambda: planned.bytes_of_rows(leaf) >= whole)


# --- the call ---------------------------------------------------------------------------


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
        rest = ([x for i, x in enumerate(args) if i not in chosen], kwargs)
        self._rest, self._rest_tree = flatten(rest)
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

    def trace(self) -> tuple[_jax.Program, "Outputs"]:
        """The traced program (inputs: the arrays), and how to read its outputs."""
        found: list[Outputs] = []

        def flat(*inputs: Any) -> list[Any]:
            given = iter(inputs)
            chosen = self.tree.unflatten([next(given) for _ in self.primals])
            rest, kwargs = self._rest_tree.unflatten(
                next(given) if described else x
                for x, described in zip(self._rest, self._described, strict=True)
            )
            args = list(rest)
            for i, arg in sorted(
                zip(self._chosen, chosen, strict=True), key=lambda x: x[0]
            ):
                args.insert(i, arg)
            out, aux = _split_aux(self._fun(*args, **kwargs), self._has_aux)
            results, out_tree = flatten(out)
            aux_leaves, aux_tree = flatten(aux)
            # Only arrays can leave a traced program; names, None, numbers stay outside.
            arrays = [x for x in aux_leaves if isinstance(x, jax.Array)]
            fixed = [None if isinstance(x, jax.Array) else (x,) for x in aux_leaves]
            found.append(Outputs(out_tree, len(results), aux_tree, fixed))
            return [*results, *arrays]

        described = [x for x, d in zip(self._rest, self._described, strict=True) if d]
        program = jax.make_jaxpr(flat)(*self.primals, *described)
        return program, found[-1]


class Outputs(NamedTuple):
    """How the flat outputs of the traced program make the user's result and aux.

    Attributes:
      tree: the structure of the result.
      num_results: how many of the outputs are the result's; the others are aux's.
      aux_tree: the structure of aux.
      aux_fixed: ``(leaf,)`` for every leaf of aux; None for an array, which is an output.
    """

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


def check_callable(fun: Any) -> None:
    if not callable(fun):
        raise TypeError(f"expected a function to differentiate, got {fun!r}")


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


# --- its leaves -------------------------------------------------------------------------


class Leaf(NamedTuple):
    """One differentiated array.

    Attributes:
      name: what the user calls it, such as ``params['table']``.
      aval: its abstract value.
      wish: what ``sparse=`` says of it.
      exchange: what ``exchange=`` does.
    """

    name: str
    aval: Any
    wish: Wish
    exchange: Exchange | None = None

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.aval, self.name, self.exchange)

    @property
    def has_rows(self) -> bool:
        return self.aval.ndim > 0 and jnp.issubdtype(self.aval.dtype, jnp.inexact)

    @property
    def may_be_sparse(self) -> bool:
        return self.has_rows and self.wish is not False

    @property
    def num_bytes(self) -> int:
        return self.aval.size * self.aval.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} ({self.aval.str_short()})"


def _describe_leaves(
    call: Call, single: bool, spec: SparseSpec, exchange: ExchangeSpec
) -> list[Leaf]:
    """A Leaf for every differentiated array."""
    tree, roots = call.tree.unflatten(call.primals), call.names
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    wishes, ways = _wishes(tree, single, spec), _exchanges(tree, single, exchange)
    leaves = []
    for (path, x), wish, way in zip(paths, wishes, ways, strict=True):
        name = roots[path[0].idx] + jax.tree_util.keystr(path[1:])
        if callable(spec):
            wish = spec(path[1:] if single else path, x)
        if not (wish is None or isinstance(wish, bool) or wish == "if_smaller"):
            raise TypeError(
                "sparse= must give True, False, None or 'if_smaller' for each array, got "
                f"{wish!r} for {name}"
            )
        if not (way is None or isinstance(way, Exchange)):
            raise TypeError(
                "exchange= must give a jslices.Exchange or None for each array, got "
                f"{way!r} for {name}"
            )
        leaves.append(Leaf(name, jax.typeof(x), wish, way))
    return leaves


def _wishes(tree: Any, single: bool, spec: SparseSpec) -> list[Any]:
    """``sparse=`` for every leaf; None where it is a function."""
    if callable(spec):
        spec = None
    if spec is None or isinstance(spec, bool | str):
        return [spec] * len(jax.tree.leaves(tree))
    what = "sparse= must be a bool, 'if_smaller', a function of (path, leaf), or a pytree"
    return _broadcast(tree, (spec,) if single else spec, what)


def _exchanges(tree: Any, single: bool, spec: ExchangeSpec) -> list[Any]:
    """``exchange=`` for every leaf."""
    if spec is None or isinstance(spec, Exchange):
        return [spec] * len(jax.tree.leaves(tree))
    prefix = _filled((spec,) if single else spec, tree)
    return _broadcast(tree, prefix, "exchange= must be a jslices.Exchange, or a pytree")


def _filled(prefix: Any, tree: Any) -> Any:
    """``prefix`` with None for what its dicts do not name."""
    if isinstance(prefix, tuple) and isinstance(tree, tuple) and len(prefix) == len(tree):
        return tuple(map(_filled, prefix, tree))
    if not isinstance(prefix, dict) or not isinstance(tree, dict) or prefix.keys() - tree:
        return prefix
    return {key: _filled(prefix.get(key), tree[key]) for key in tree}


def _broadcast(tree: Any, prefix: Any, what: str) -> list[Any]:
    """What a pytree prefix says of every leaf."""
    said: list[Any] = []

    def add(x: Any, subtree: Any) -> None:
        said.extend([x] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(add, prefix, tree, is_leaf=lambda x: x is None)
    except ValueError as error:
        raise ValueError(
            f"{what} of these whose structure is that of the differentiated argument or a "
            f"prefix of it: {error}"
        ) from None
    return said
