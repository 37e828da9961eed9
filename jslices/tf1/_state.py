"""Variables: the explicit state of a transformed function."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from jslices import is_slices
from jslices.tf1._names import bare_name

#: From the PRNG key of a variable to its initial value.
Initial: TypeAlias = Callable[[jax.Array | None], jax.Array]
#: The value of a variable; if it is only declared, a ShapeDtypeStruct or None.
Value: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class VariableInfo:
    """The static properties of a variable.

    Attributes:
      name: its whole name, without ``:0``.
      trainable: whether it is in the partition that is differentiated.
      collections: the keys of the collections it belongs to.
      position: its place in the order of creation, from 0.
      initial: makes its initial value again; None if only running ``init`` can.
    """

    name: str
    trainable: bool = True
    collections: tuple[str, ...] = ("variables", "trainable_variables")
    position: int = 0
    # Not compared: every run makes a new function, but two states must have one structure.
    initial: Initial | None = dataclasses.field(default=None, compare=False, repr=False)


@jax.tree_util.register_pytree_with_keys_class
class Variables(Mapping[str, Value]):
    """All variables of a transformed function: name -> array, in the order of creation.

    An immutable mapping and a pytree: the arrays are its leaves, :class:`VariableInfo` is
    static.

    Args:
      values: name -> array of any shape; ``"foo/v:0"`` is the same name as ``"foo/v"``.
      infos: static properties of each; variables without any are trainable.

    Example:
      >>> import jax, jslices.tf1 as tf
      >>> def model():
      ...     tf.get_variable("w", [2])
      ...     tf.get_variable("steps", [], trainable=False)
      >>> variables = tf.transform(model).init(jax.random.key(0))
      >>> variables
      Variables(w: float32[2], steps: float32[] not trainable)
      >>> list(variables.trainable), list(variables.non_trainable)
      (['w'], ['steps'])
      >>> (variables.trainable | variables.non_trainable).keys() == variables.keys()
      True
    """

    infos: tuple[VariableInfo, ...]  #: the static properties of each, in order.
    _values: tuple[Value, ...]

    def __init__(
        self, values: Mapping[str, Value], infos: Sequence[VariableInfo] = ()
    ) -> None:
        values = {bare_name(name): value for name, value in values.items()}
        by_name = {info.name: info for info in infos}
        position = 1 + max((info.position for info in infos), default=-1)
        for name in values:
            if name not in by_name:
                by_name[name] = VariableInfo(name, position=position)
                position += 1
        own = (by_name[name] for name in values)
        self.infos = tuple(sorted(own, key=lambda info: info.position))
        self._values = tuple(values[info.name] for info in self.infos)

    # --- mapping ------------------------------------------------------------------

    @functools.cached_property
    def _by_name(self) -> dict[str, Value]:
        return {i.name: v for i, v in zip(self.infos, self._values, strict=True)}

    def __getitem__(self, name: str) -> Value:
        if bare_name(name) not in self._by_name:
            raise KeyError(f"no variable {name!r}; there are: {', '.join(self) or 'none'}")
        return self._by_name[bare_name(name)]

    def __iter__(self) -> Iterator[str]:
        return (info.name for info in self.infos)

    def __len__(self) -> int:
        return len(self.infos)

    def __reduce__(self) -> Any:
        # Functions that make initial values may be closures, which do not pickle.
        infos = [dataclasses.replace(info, initial=None) for info in self.infos]
        return Variables, (dict(self), infos)

    # Arrays are not compared here; a Variables is equal to itself.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    # --- pytree -------------------------------------------------------------------

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[VariableInfo, ...]]:
        keys = (jax.tree_util.DictKey(info.name) for info in self.infos)
        return tuple(zip(keys, self._values, strict=True)), self.infos

    def tree_flatten(self) -> tuple[Any, tuple[VariableInfo, ...]]:
        return self._values, self.infos

    @classmethod
    def tree_unflatten(
        cls, infos: tuple[VariableInfo, ...], values: Sequence[Value]
    ) -> "Variables":
        new = object.__new__(cls)
        new.infos, new._values = infos, tuple(values)
        return new

    # --- parts and unions -----------------------------------------------------------

    @property
    def trainable(self) -> "Variables":
        """The partition to differentiate, and to give to an optimizer."""
        return self.where(lambda info: info.trainable)

    @property
    def non_trainable(self) -> "Variables":
        """The other variables: counters, statistics, frozen tables."""
        return self.where(lambda info: not info.trainable)

    def collection(self, key: str) -> "Variables":
        """The variables in the collection ``key``."""
        return self.where(lambda info: key in info.collections)

    def where(self, keep: Callable[[VariableInfo], bool]) -> "Variables":
        """The variables for whose :class:`VariableInfo` ``keep`` returns True."""
        infos = tuple(info for info in self.infos if keep(info))
        return Variables.tree_unflatten(infos, [self._by_name[i.name] for i in infos])

    def __or__(self, other: Mapping[str, Value]) -> "Variables":
        """The union; for a name that both have, the value of ``other``."""
        if not isinstance(other, Mapping):
            return NotImplemented
        theirs = other.infos if isinstance(other, Variables) else ()
        infos = {info.name: info for info in (*theirs, *self.infos)}
        values = {**self, **{bare_name(name): value for name, value in other.items()}}
        return Variables(values, tuple(infos.values()))

    def replace(self, values: Mapping[str, Value]) -> "Variables":
        """The same variables with other values for some; a KeyError for unknown names."""
        values = {bare_name(name): value for name, value in values.items()}
        unknown = [name for name in values if name not in self._by_name]
        if unknown:
            raise KeyError(
                f"no variables {', '.join(unknown)}; there are: {', '.join(self) or 'none'}"
            )
        return self | values

    def __repr__(self) -> str:
        trainable = {True: "", False: " not trainable"}
        parts = (
            f"{info.name}: {_describe(self[info.name])}{trainable[info.trainable]}"
            for info in self.infos
        )
        return f"Variables({', '.join(parts)})"


def _describe(value: Value) -> str:
    if is_slices(value) or not (hasattr(value, "dtype") and hasattr(value, "shape")):
        return repr(value)
    shape = f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return shape if is_initialized(value) else f"{shape} not initialised"


def is_initialized(value: Value) -> bool:
    """False for variables that are only declared, by a shape and a dtype."""
    return value is not None and not isinstance(value, jax.ShapeDtypeStruct)
