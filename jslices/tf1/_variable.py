"""Variable: a handle on a piece of state, inside a transformed function."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

import jslices as js
from jslices import IndexedSlices
from jslices._slices import check_slices
from jslices.tf1 import _arrays
from jslices.tf1._arrays import ArrayOperators, TensorLike, is_array, plain
from jslices.tf1._creation import Request, create, request_of
from jslices.tf1._instead import INSTEAD, check_defaults, missing
from jslices.tf1._names import bare_name
from jslices.tf1._run import Run, current_run, initial_value
from jslices.tf1._state import Value, VariableInfo, is_initialized
from jslices.tf1.dtypes import DType


def _scattering(how: str) -> Callable[..., Array]:
    """A method that changes rows as :func:`jslices.apply_slices` does; see the class."""
    verb = f"scatter_{how}"

    def scatter(
        self: "Variable",
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Array:
        return self._scatter(verb, how, sparse_delta)

    scatter.__name__, scatter.__qualname__ = verb, f"Variable.{verb}"
    scatter.__doc__ = f""":func:`jslices.{verb}` of the rows of IndexedSlices."""
    return scatter


def _scattering_nd(function: Callable[..., Array]) -> Callable[..., Array]:
    """A method that assigns the result of ``function``, its errors naming the variable."""
    verb = function.__name__

    def scatter(
        self: "Variable", indices: ArrayLike, updates: ArrayLike, name: str | None = None
    ) -> Array:
        return self._apply(verb, function, indices, updates)

    scatter.__name__, scatter.__qualname__ = verb, f"Variable.{verb}"
    scatter.__doc__ = f"""Assign what :func:`jslices.{verb}` returns, and return it."""
    return scatter


class Variable(ArrayOperators):
    """A variable of the function that :func:`jslices.tf1.transform` runs.

    Inside that function a handle is used as the array it holds, and can be assigned;
    ``apply`` then returns the new values. Its name is made unique: ``v``, ``v_1``, ...;
    :func:`jslices.tf1.get_variable` shares a variable instead.

    Operators, indexing, ``jax.numpy``, ``jax.nn`` and array methods accept a handle. The
    functions of ``jax.lax`` accept arrays only: pass them ``v.value()``; for a convolution
    there is :func:`jslices.tf1.nn.conv2d`. ``==`` compares handles, not values.

    The methods ``scatter_add``, ``scatter_sub``, ... take IndexedSlices of the variable's
    dtype, whose ``dense_shape`` is ignored unless several axes number the rows. They, and
    ``scatter_nd_add``, ``scatter_nd_sub`` and ``scatter_nd_update``, assign and return what
    the functions of these names do.

    Args:
      initial_value: an array, number or list, the result of
        :func:`jslices.tf1.random_normal` and the like, or a function of nothing or of a
        PRNG key that returns one; its shape is the variable's. Only ``init`` uses it.
      trainable, collections: as for :func:`jslices.tf1.get_variable`.
      validate_shape: changes nothing; here every shape is known.
      name: None means ``"Variable"``; the name scope is put before it.
      dtype: None means that of the value.
      theirs: TensorFlow's other keywords, such as ``caching_device``, if they are None.

    Example:
      >>> import jslices.tf1 as tf
      >>> def count():
      ...     steps = tf.Variable(0, name="steps", trainable=False)
      ...     return steps.assign_add(1)
      >>> model = tf.transform(count)
      >>> model.apply(model.init(None))
      (Array(1, dtype=int32), Variables(steps: int32[] not trainable))

    """

    info: VariableInfo  #: its static properties
    _request: Request
    _run: Run | None  # None for the copy that a JAX transformation put in its place
    _first: Value
    _value: Value

    def __init__(
        self,
        initial_value: TensorLike = None,
        trainable: bool = True,
        collections: Sequence[str] | None = None,
        validate_shape: bool = True,
        name: str | None = None,
        dtype: DTypeLike | None = None,
        **theirs: object,
    ) -> None:
        run = current_run("Variable")
        check_defaults("Variable", theirs)
        if initial_value is None:
            raise ValueError("initial_value must be specified: Variable(jnp.zeros(3))")
        declared = None if dtype is None else _arrays.canonical_dtype(dtype)
        with run.names.released_on_error():
            unique = run.names.unique("Variable" if name is None else name, "Variable")
            request = request_of(unique, initial_value, declared)
            self._begin(
                run,
                dataclasses.replace(request, trainable=trainable, collections=collections),
            )

    @classmethod
    def _new(cls, run: Run, request: Request) -> "Variable":
        """For get_variable, which chooses the name itself."""
        new = object.__new__(cls)
        new._begin(run, request)
        return new

    def _begin(self, run: Run, request: Request) -> None:
        self.info, self._value = create(run, request)
        self._first, self._run, self._request = self._value, run, request
        run.variables[self.info.name] = self

    # --- describing and reading ---------------------------------------------------------

    @property
    def name(self) -> str:
        """The whole name with ``:0``, as in TensorFlow: ``"foo/bar/v:0"``."""
        return f"{self.info.name}:0"

    @property
    def dtype(self) -> DType:
        """That of the value, which the caller of ``apply`` may have cast."""
        return DType(np.dtype(self._value.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return tuple(self._value.shape)

    @property
    def device(self) -> str | None:
        """The device that holds the value; None where it is traced, or spread."""
        value = self.value()
        if isinstance(value, jax.core.Tracer) or len(value.devices()) != 1:
            return None
        return str(*value.devices())

    @property
    def op(self) -> VariableInfo:
        """The same as :attr:`info`: ``v.op.name`` is the name without ``:0``."""
        return self.info

    @property
    def trainable(self) -> bool:
        """Whether it belongs to ``variables.trainable``."""
        return self.info.trainable

    def __getattr__(self, name: str) -> Any:
        if name in INSTEAD:
            raise missing("a Variable", name)
        return super().__getattr__(name)

    def __repr__(self) -> str:
        return f"<tf.Variable '{self.name}' shape={self.shape} dtype={self.dtype}>"

    def value(self) -> Array:
        """The array it holds now; a later assignment does not change that array.

        Raises a FailedPreconditionError if it is only declared, a RuntimeError later.
        """
        if self._run is not None:
            self._check_open(self._run)
            if not is_initialized(self._value):
                raise js.errors.FailedPreconditionError(
                    f"Attempting to use uninitialized value {self.info.name}; these "
                    "variables are only declared: make them with model.init(key, *args)"
                )
        return self._value

    def read_value(self) -> Array:
        """The same as :meth:`value`, by TensorFlow's name for resource variables."""
        return self.value()

    def eval(self, session: object = None) -> np.ndarray:
        """The value as a NumPy array, without a session; a RuntimeError if it is traced."""
        if isinstance(value := self.value(), jax.core.Tracer):
            raise RuntimeError(
                f"eval() of {self.name} wants numbers, and under jit or another "
                "transformation there are none yet; use value()"
            )
        return np.asarray(value)

    def initialized_value(self) -> Array:
        """The value, or the initial one if there is none yet, to compute another's from."""
        if self._run is None or is_initialized(self._value):
            return self.value()
        self._check_open(self._run)
        return initial_value(self._request.make, self._run.key, self.info.name)

    def _check_open(self, run: Run) -> None:
        if not run.is_open():
            raise RuntimeError(
                f"the Variable {self.name} was used outside of the {run.phase} that "
                "made it: a handle leaked out of the transformed function, or into another "
                "thread. Return what is needed from the function, or read variables["
                f"'{self.info.name}'] from what apply returns"
            )

    def sparse_read(self, indices: ArrayLike, name: str | None = None) -> Array:
        """The rows ``v[indices]`` by :func:`jslices.embedding_lookup`, errors included."""
        with jax.named_scope(name or "sparse_read"):
            return js.embedding_lookup(self.value(), plain(indices))

    # --- assigning ----------------------------------------------------------------------

    def assign(
        self,
        value: TensorLike,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Array:
        """Replace the value by one of this shape and dtype, and return the new one.

        Python's numbers and NumPy's 64 bits are converted, nothing is broadcast.
        IndexedSlices become dense, with a warning. Other arguments change nothing.
        """
        what = f"assign to {self.name}"
        return self._write(self._fitting(value, what), what)

    def assign_add(
        self,
        delta: TensorLike,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Array:
        """Add ``delta``, and return the new value; see :meth:`assign`.

        IndexedSlices are added row by row: duplicates add, empty entries are dropped.
        """
        return self._accumulate("add", operator.add, delta)

    def assign_sub(
        self,
        delta: TensorLike,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Array:
        """Subtract ``delta``, and return the new value; see :meth:`assign_add`."""
        return self._accumulate("sub", operator.sub, delta)

    def _accumulate(
        self, how: str, combine: Callable[[Any, Any], Any], delta: TensorLike
    ) -> Array:
        what = f"assign_{how} to {self.name}"
        if js.is_slices(delta):
            return self._scatter(f"assign_{how}", how, delta, whole=True)
        if self.dtype == jnp.bool_:
            raise TypeError(f"{what} wants numbers, the variable is bool")
        fitting = self._fitting(delta, what)
        return self._write(combine(self.value(), fitting), what)

    def _fitting(self, value: TensorLike, what: str) -> Array:
        """``value`` as an array of this very shape and dtype."""
        value = _arrays.as_value(value, self.dtype, what)
        if value.shape != self.shape:
            raise ValueError(
                f"{what} requires both shapes to match: the variable has {self.shape}, the "
                f"value {value.shape}; nothing is broadcast, so pass "
                f"jnp.broadcast_to(value, {self.shape}) if you want that"
            )
        return value

    def _write(self, value: Array, what: str) -> Array:
        """Make ``value`` the value; and return it."""
        if self._run is None:
            raise RuntimeError(
                f"{what} on a copy: the handle went through jit, vmap, grad or another "
                "transformation as an argument. Return the new value from the inner "
                "function, and assign it outside"
            )
        self._check_open(self._run)
        if not self._run.in_own_trace():
            raise RuntimeError(
                f"{what} inside of a scan, cond, while_loop, vmap, jit, grad or checkpoint "
                "that began within the transformed function: the value would leak out of "
                "it. Return the new value from the inner function, and assign it outside"
            )
        self._value = value
        return value

    def count_up_to(self, limit: int) -> Array:
        """Increment an integer scalar below ``limit``, and return what it was before.

        At the limit it raises an OutOfRangeError; under ``jit``, where nothing can
        be raised, and in ``init``, a result of at least ``limit`` says so.
        """
        what = f"count_up_to of {self.name}"
        if not isinstance(limit, int | np.integer) or isinstance(limit, bool):
            raise TypeError(f"{what} wants a Python int as limit, got {limit!r}")
        if not jnp.issubdtype(self.dtype, jnp.integer):
            raise TypeError(f"{what} wants an integer variable, this is {self.dtype}")
        if self.shape:
            raise ValueError(f"{what} wants a scalar variable, this has {self.shape}")
        if not jnp.iinfo(self.dtype).min <= limit <= jnp.iinfo(self.dtype).max:
            raise ValueError(f"{what}: the limit {limit} is no {self.dtype}")
        before = self.value()
        in_init = self._run is not None and self._run.phase == "init"
        if not (in_init or isinstance(before, jax.core.Tracer)) and int(before) >= limit:
            raise js.errors.OutOfRangeError(f"Reached limit of {limit}: {self.name}")
        self._write(jnp.where(before < limit, before + 1, before), what)
        return before

    # --- rows ---------------------------------------------------------------------------

    scatter_add = _scattering("add")
    scatter_sub = _scattering("sub")
    scatter_mul = _scattering("mul")
    scatter_div = _scattering("div")
    scatter_min = _scattering("min")
    scatter_max = _scattering("max")
    scatter_update = _scattering("update")

    def _scatter(
        self, verb: str, how: str, delta: IndexedSlices, whole: bool = False
    ) -> Array:
        what = f"{verb} to {self.name}"
        _check_slices(delta, what)
        if not whole and delta.row_axes == 1:
            # TensorFlow's scatters ignore the shape that the slices claim to have.
            delta = IndexedSlices(delta.values, delta.indices)
        return self._assign(what, js.apply_slices, delta, how)

    # --- elements, by indices given as arrays -------------------------------------------

    scatter_nd_add = _scattering_nd(js.scatter_nd_add)
    scatter_nd_sub = _scattering_nd(js.scatter_nd_sub)
    scatter_nd_update = _scattering_nd(js.scatter_nd_update)

    def batch_scatter_update(
        self,
        sparse_delta: IndexedSlices | tuple[ArrayLike, ArrayLike],
        use_locking: bool = True,
        name: str | None = None,
    ) -> Array:
        """:func:`jslices.batch_scatter_update` of a pair ``(indices, updates)``.

        Or of IndexedSlices, for which it is ``scatter_update``.
        """
        what = "batch_scatter_update"
        if isinstance(sparse_delta, tuple) and len(sparse_delta) == 2:
            indices, updates = sparse_delta
        else:
            advice = ", or as a pair (indices, updates) for a batch"
            _check_slices(sparse_delta, f"{what} to {self.name}", advice)
            indices, updates = sparse_delta.indices, sparse_delta.values
        return self._apply(what, js.batch_scatter_update, indices, updates)

    def _apply(
        self,
        verb: str,
        function: Callable[..., Array],
        indices: ArrayLike,
        updates: ArrayLike,
    ) -> Array:
        what, updates = f"{verb} to {self.name}", plain(updates)
        if not is_array(updates) or _arrays.is_numpys_default(updates):
            updates = _arrays.as_value(updates, self.dtype, what)
        return self._assign(what, function, plain(indices), updates)

    def _assign(self, what: str, function: Callable[..., Array], *args: Any) -> Array:
        """Assign ``function(value, *args)``; its errors name the variable."""
        old = self.value()
        try:
            new = function(old, *args)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{what}: {error}") from None
        return self._write(new, what)


def _check_slices(delta: TensorLike, what: str, advice: str = "") -> None:
    """Raise a ValueError for anything but IndexedSlices, as TensorFlow 1 does."""
    if not js.is_slices(delta):
        raise ValueError(
            f"{what} wants IndexedSlices, got {type(delta).__name__}; make them with "
            f"jslices.IndexedSlices(values, indices){advice}"
        )
    check_slices(delta)


def _unflatten(name: str, children: Sequence[Array]) -> Variable:
    copy = object.__new__(Variable)
    copy.info, copy._run = VariableInfo(bare_name(name)), None
    copy._request = Request(name, lambda key: copy._value)
    copy._first = copy._value = children[0]
    return copy


# So that jnp.sum(v) and jax.jit(f)(v) accept a handle: they see a read-only copy.
jax.tree_util.register_pytree_node(
    Variable, lambda v: ((v.value(),), v.info.name), _unflatten
)
