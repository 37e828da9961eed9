"""How the variables of a program were computed, where that tells what is read."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jslices import _jax
from jslices._jax import Atom, Equation, Literal, Program
from jslices._rows.access import is_below

#: From numbers to the same numbers in another shape or dtype.
Reshape = Callable[[jax.Array], jax.Array]


class OneHot(NamedTuple):
    """An array of ones where a number is that of a place along an axis, and of zeros."""

    axis: int
    #: The variable with the numbers; None for an array that was scaled, smoothed, masked or
    #: summed since: it is no longer one-hot, but it picks rows as well.
    numbers: Atom | None = None
    #: From the numbers to an array that broadcasts to the one-hot array, and has one
    #: element along ``axis``.
    reshape: Reshape = lambda numbers: numbers


# These cast and move one-hot arrays, which remain one-hot, ...
_SAME = ("convert_element_type", "copy", "stop_gradient", "sharding_constraint")
# ... and these weight them.
_WEIGHTED = ("add", "div", "mul", "select_n", "sub")


@dataclasses.dataclass(eq=False)
class Origins:
    """The origins of the variables of a program."""

    program: Program
    #: Those of its inputs that are one-hot arrays, weighted perhaps.
    weighted: dict[Any, OneHot] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def _makers(self) -> dict[Any, Equation]:
        return {v: eqn for eqn in self.program.eqns for v in eqn.outvars}

    def _maker(self, atom: Atom) -> Equation | None:
        return None if isinstance(atom, Literal) else self._makers.get(atom)

    @functools.cached_property
    def _fixed(self) -> set[Any]:
        fixed: set[Any] = set()
        for eqn in self.program.eqns:
            if all(isinstance(x, Literal) or x in fixed for x in eqn.invars):
                fixed.update(eqn.outvars)
        return fixed

    def is_fixed(self, atom: Atom) -> bool:
        """True for constants such as ``jnp.arange(3)``, which depend on no input."""
        return isinstance(atom, Literal) or atom in self._fixed

    def columns(self, atom: Atom) -> list[Any] | None:
        """The pieces ``[..., 1]`` that an array ``[..., n]`` was concatenated from.

        Indexing joins row numbers and column numbers like this. None for other arrays.
        """
        eqn, last = self._maker(atom), len(atom.aval.shape) - 1
        if eqn is None or eqn.primitive.name != "concatenate":
            return None
        if eqn.params["dimension"] != last or any(
            _jax.shape_of(x)[last] != 1 for x in eqn.invars
        ):
            return None
        return list(eqn.invars)

    def axes(self, atom: Atom) -> set[int]:
        """The axes along which an array may differ: it was not repeated along them."""
        eqn = self._maker(atom)
        name = None if eqn is None else eqn.primitive.name
        if eqn is not None and name == "convert_element_type":
            return self.axes(eqn.invars[0])
        if eqn is not None and name == "broadcast_in_dim":
            inside = self.axes(eqn.invars[0])
            dims = enumerate(eqn.params["broadcast_dimensions"])
            return {axis for i, axis in dims if i in inside}
        return {axis for axis, size in enumerate(_jax.shape_of(atom)) if size != 1}

    # --- one-hot arrays ---

    def one_hot(self, atom: Atom) -> OneHot | None:
        """The numbers of a one-hot array, weighted or not; None for any other array."""
        return None if isinstance(atom, Literal) else self._one_hots.get(atom)

    @functools.cached_property
    def _one_hots(self) -> dict[Any, OneHot]:
        one_hots = dict(self.weighted)
        for eqn in self.program.eqns:
            name = eqn.primitive.name
            if name == "eq":
                made = self._compared(eqn)
            elif name == "jit":
                made = self._called(eqn, one_hots)
            else:
                made = _from_one_hots(eqn, one_hots)
            if made is not None:
                one_hots[eqn.outvars[0]] = made
        return one_hots

    def _compared(self, eqn: Equation) -> OneHot | None:
        """``numbers[..., None] == jnp.arange(V)``."""
        for counts, numbers in (eqn.invars, eqn.invars[::-1]):
            axis = self._counts_along(counts, wraps=True)
            if axis is None or self.is_fixed(numbers) or axis in self.axes(numbers):
                continue
            if self._counts_along(counts) is None:  # of uint8, say: several rows an id
                return OneHot(axis)
            return OneHot(axis, numbers, functools.partial(_one_along, axis))
        return None

    def _counts_along(self, atom: Atom, wraps: bool = False) -> int | None:
        """The axis along which an array is 0, 1, 2, ..., which its dtype can hold.

        With ``wraps`` they may begin anew where it cannot.
        """
        eqn, shape = self._maker(atom), _jax.shape_of(atom)
        if eqn is None or not jnp.issubdtype(atom.aval.dtype, jnp.integer):
            return None
        axis: int | None = None
        name, most = eqn.primitive.name, jnp.iinfo(atom.aval.dtype).max
        if name == "iota":
            axis = eqn.params["dimension"]
        elif name == "convert_element_type":
            axis = self._counts_along(eqn.invars[0], wraps)
        elif name == "broadcast_in_dim":
            inner = self._counts_along(eqn.invars[0], wraps)
            dims = eqn.params["broadcast_dimensions"]
            axis = None if inner is None else int(dims[inner])
        elif name == "reshape" and self._counts_along(eqn.invars[0], wraps) is not None:
            longer = [i for i, size in enumerate(shape) if size != 1]
            inner = len([n for n in _jax.shape_of(eqn.invars[0]) if n != 1])
            axis = longer[0] if len(longer) == inner == 1 else None
        if axis is None:
            return None
        fits = is_below(1, shape[axis]) and (wraps or is_below(shape[axis], most + 1))
        return axis if fits else None

    def _called(self, eqn: Equation, one_hots: dict[Any, OneHot]) -> OneHot | None:
        """``jax.nn.one_hot``, which is a call of a function of JAX's."""
        if len(eqn.outvars) != 1 or not _jax.is_library_call(eqn):
            return None
        body = _jax.body(eqn)
        pairs = list(zip(body.invars, eqn.invars, strict=True))
        weighted = {
            inside: OneHot(one_hots[atom].axis)
            for inside, atom in pairs
            if not isinstance(atom, Literal) and atom in one_hots
        }
        origins = Origins(body, weighted)
        made = origins.one_hot(body.outvars[0])
        if made is None or made.numbers is None:
            return made
        outside = dict(pairs)
        numbers, reshape = made.numbers, made.reshape
        while numbers not in outside:
            maker = origins._maker(numbers)
            if maker is None or len(maker.invars) != 1 or len(maker.outvars) != 1:
                return None
            numbers, reshape = maker.invars[0], _after(maker, reshape)
        if self.is_fixed(outside[numbers]):
            return None
        return OneHot(made.axis, outside[numbers], reshape)


def _from_one_hots(eqn: Equation, one_hots: dict[Any, OneHot]) -> OneHot | None:
    """The output of a step that makes a one-hot array, weighted or not, of another."""
    operands = [x for x in eqn.invars if not isinstance(x, Literal) and x in one_hots]
    if not operands:
        return None
    name, made = eqn.primitive.name, one_hots[operands[0]]
    shape, new = _jax.shape_of(operands[0]), _jax.shape_of(eqn.outvars[0])
    if name in _SAME:
        return made
    if name == "transpose":
        order = tuple(eqn.params["permutation"])
        moved = lambda x: jax.lax.transpose(made.reshape(x), order)  # noqa: E731
        return made._replace(axis=order.index(made.axis), reshape=moved)
    if name == "reshape" and made.axis == len(shape) - 1 and new[-1:] == shape[-1:]:

        def reshaped(x: jax.Array) -> jax.Array:
            numbers = jnp.broadcast_to(made.reshape(x), (*shape[:-1], 1))
            return numbers.reshape(*new[:-1], 1)

        return made._replace(axis=len(new) - 1, reshape=reshaped)
    if name in _WEIGHTED and new == shape:
        return OneHot(made.axis)
    if name == "reduce_sum" and made.axis not in eqn.params["axes"]:
        return OneHot(made.axis - sum(x < made.axis for x in eqn.params["axes"]))
    return None


def _one_along(axis: int, numbers: jax.Array) -> jax.Array:
    """``numbers``, repeated along an axis, once."""
    if jnp.ndim(numbers) and numbers.shape[axis] != 1:
        return jax.lax.slice_in_dim(numbers, 0, 1, axis=axis)
    return jnp.asarray(numbers)


def _after(eqn: Equation, reshape: Reshape) -> Reshape:
    """``reshape`` after an equation of one operand."""
    return lambda numbers: reshape(_jax.bind(eqn, [numbers])[0])
