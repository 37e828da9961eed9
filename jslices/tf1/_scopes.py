"""Variable scopes, and ``get_variable``, which creates a variable once and shares it."""

import contextlib
import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jslices.tf1 import _creation
from jslices.tf1._arrays import canonical_dtype, dtype_of
from jslices.tf1._collections import GraphKeys, get_collection
from jslices.tf1._creation import InitializerLike, PartialShape, Regularizer
from jslices.tf1._instead import check_defaults, missing
from jslices.tf1._names import check_name, join
from jslices.tf1._run import Run, current_run
from jslices.tf1._variable import Variable


class _AutoReuse(enum.Enum):
    """The type of :data:`jslices.tf1.AUTO_REUSE`: share what exists, create the rest."""

    AUTO_REUSE = 1

    def __repr__(self) -> str:
        return "AUTO_REUSE"


AUTO_REUSE = _AutoReuse.AUTO_REUSE
#: Whether get_variable shares (True), creates (False), or does what is possible.
Reuse = bool | _AutoReuse


@dataclasses.dataclass(eq=False, repr=False)
class VariableScope:
    """A scope, as :func:`jslices.tf1.variable_scope` yields it and can open it again.

    Attributes:
      name: the whole path, ``"foo/bar"``; ``""`` for the outermost.
      reuse: True, False or AUTO_REUSE.
      initializer, regularizer, dtype: the defaults of :func:`jslices.tf1.get_variable`.
      original_name_scope: the name scope that the scope had when it was opened by name:
        ``"foo_1/"``. ``tf.name_scope(scope.original_name_scope)`` enters it again.
    """

    name: str
    reuse: Reuse = False
    initializer: InitializerLike = None
    dtype: DTypeLike = jnp.float32
    regularizer: Regularizer | None = None
    original_name_scope: str = ""

    caching_device = custom_getter = partitioner = None  #: of TensorFlow only

    def reuse_variables(self) -> None:
        """Let get_variable in this scope share, and never create, from here on."""
        self.reuse = True

    def set_initializer(self, initializer: InitializerLike) -> None:
        """Set the default initializer of new variables."""
        self.initializer = initializer

    def set_regularizer(self, regularizer: Regularizer | None) -> None:
        """Set the default regularizer of new variables."""
        self.regularizer = regularizer

    def set_dtype(self, dtype: DTypeLike) -> None:
        """Set the default dtype of new variables."""
        self.dtype = dtype

    def get_collection(self, name: str) -> list[Any]:
        """The part of the collection ``name`` in this scope, in the order of creation."""
        return get_collection(name, f"{self.name}/" if self.name else None)

    def global_variables(self) -> list[Variable]:
        """The variables in this scope."""
        return self.get_collection(GraphKeys.GLOBAL_VARIABLES)

    def trainable_variables(self) -> list[Variable]:
        """The variables in this scope that are trained."""
        return self.get_collection(GraphKeys.TRAINABLE_VARIABLES)

    def __getattr__(self, name: str) -> NoReturn:
        raise missing("a VariableScope", name)

    def __repr__(self) -> str:
        return f"VariableScope({self.name!r}, reuse={self.reuse})"


def current_scope(run: Run) -> VariableScope:
    """The innermost scope; the outermost is created when it is first needed."""
    if not run.scopes:
        run.scopes.append(VariableScope(""))
    return run.scopes[-1]


def get_variable_scope() -> VariableScope:
    """The scope that :func:`jslices.tf1.variable_scope` opened last, at first ``""``."""
    return current_scope(current_run("get_variable_scope"))


@contextlib.contextmanager
def variable_scope(
    name_or_scope: str | VariableScope | None,
    reuse: Reuse | None = None,
    initializer: InitializerLike = None,
    dtype: DTypeLike | None = None,
    regularizer: Regularizer | None = None,
    *,
    default_name: str | None = None,
    auxiliary_name_scope: bool = True,
    **theirs: object,
) -> Iterator[VariableScope]:
    """Put a prefix before the names of variables, and set defaults for them.

    Yields the :class:`VariableScope`. Settings on it last until the end of the block.

    Args:
      name_or_scope: a name, opened within the current scope (``"a/b"`` is ``b`` in ``a``),
        or a scope that was opened before, whose whole path then replaces the current one.
      reuse: True shares existing variables only, AUTO_REUSE also creates missing ones;
        False and None inherit from ``name_or_scope`` or the enclosing scope.
      initializer, dtype, regularizer: the defaults within; None inherits.
      default_name: with ``name_or_scope=None``, a name to make unique: ``d``, ``d_1``, ...
      auxiliary_name_scope: False opens no name scope for :class:`jslices.tf1.Variable`.
      theirs: as for :func:`jslices.tf1.get_variable`.

    Example:
      >>> import jslices.tf1 as tf
      >>> def model():
      ...     with tf.variable_scope("foo", initializer=tf.constant_initializer(0.5)):
      ...         v = tf.get_variable("v", [1])
      ...     with tf.variable_scope("foo", reuse=True):
      ...         print(tf.get_variable_scope(), tf.get_variable("v") is v)
      >>> tf.transform(model).init(None)
      VariableScope('foo', reuse=True) True
      Variables(foo/v: float32[1])

    The order of arguments is that of TensorFlow's first releases.
    """
    run = current_run("variable_scope")
    check_defaults("variable_scope", theirs)
    _check_flags(reuse, auxiliary_name_scope)
    outer, names = current_scope(run), run.names
    reopened = isinstance(name_or_scope, VariableScope)
    if isinstance(name_or_scope, VariableScope):
        base, path = name_or_scope, name_or_scope.name
        name = path.rpartition("/")[2]
    else:
        base, name = outer, _scope_name(name_or_scope, default_name, reuse)
        path = join(outer.name, name)
        if name_or_scope is None:
            path = _unopened(run, path)
    scope = VariableScope(
        path,
        reuse or base.reuse,
        base.initializer if initializer is None else initializer,
        base.dtype if dtype is None else dtype,
        base.regularizer if regularizer is None else regularizer,
    )
    with contextlib.ExitStack() as stack:
        if not auxiliary_name_scope:
            scope.original_name_scope = names.opened
        elif name:
            opened = names.scope(name, "variable_scope")
            scope.original_name_scope = stack.enter_context(opened)
        if reopened:
            scope.original_name_scope = base.original_name_scope
        stack.enter_context(_counted(run, path, reopened))
        run.scopes.append(scope)
        stack.callback(run.scopes.pop)
        yield scope


def _check_flags(reuse: object, auxiliary_name_scope: object) -> None:
    if reuse is not None and not isinstance(reuse, bool | _AutoReuse):
        advice = f"; type default_name={reuse!r}" if isinstance(reuse, str) else ""
        raise ValueError(
            "The reuse parameter must be True or False or None, or tf.AUTO_REUSE; got "
            f"{reuse!r}{advice}"
        )
    if not isinstance(auxiliary_name_scope, bool):
        raise TypeError(
            "The auxiliary_name_scope must be `True` or `False`, got "
            f"{auxiliary_name_scope!r}"
        )


def _scope_name(name: object, default_name: str | None, reuse: Reuse | None) -> str:
    if name is None and default_name is not None:
        if reuse:
            raise ValueError("reuse=True cannot be used without a name_or_scope")
        name = default_name
    if not isinstance(name, str):
        raise TypeError(
            "VariableScope: name_or_scope must be a string or VariableScope, got "
            f"{name!r}; or None with default_name="
        )
    return name


def _unopened(run: Run, path: str) -> str:
    """The first of ``path``, ``path_1``, ... that is not counted as opened."""
    times, unique = 0, path
    while run.scope_counts.get(unique):
        times += 1
        unique = f"{path}_{times}"
    return unique


@contextlib.contextmanager
def _counted(run: Run, path: str, reopened: bool) -> Iterator[None]:
    """Count openings, for ``default_name``; closing a scope forgets those within it."""
    run.scope_counts[path] = run.scope_counts.get(path, 0) + 1
    before = dict(run.scope_counts)
    try:
        yield
    finally:
        if reopened:
            run.scope_counts = before
        else:
            within = [n for n in run.scope_counts if n.startswith(f"{path}/")]
            run.scope_counts |= dict.fromkeys(within, 0)


@contextlib.contextmanager
def name_scope(
    name: str | None, default_name: str | None = None, values: Sequence[Any] = ()
) -> Iterator[str]:
    """Put a prefix before the names of :class:`jslices.tf1.Variable`, not of get_variable.

    Yields the unique name, with a slash. Opened twice, ``"ns"`` is ``ns`` and ``ns_1``;
    ``"ns/"`` enters that very scope again. If ``name`` is None it is ``default_name``; if
    both are, all scopes are left. ``values`` are ignored.

    Example:
      >>> import jslices.tf1 as tf
      >>> def model():
      ...     with tf.variable_scope("foo"), tf.name_scope("bar"):
      ...         print(tf.Variable(0.0, name="v").name)
      >>> _ = tf.transform(model).init(None)
      foo/bar/v:0
    """
    with current_run("name_scope").names.scope(name or default_name or "") as unique:
        yield unique


# --- get_variable -----------------------------------------------------------------------


def get_variable(
    name: str,
    shape: PartialShape | None = None,
    dtype: DTypeLike | None = None,
    initializer: InitializerLike = None,
    trainable: bool = True,
    collections: Sequence[str] | None = None,
    regularizer: Regularizer | None = None,
    **theirs: object,
) -> Variable:
    """The variable of this name in the current scope: a new one, or the handle to share.

    Args:
      name: its name within the scope: ``v`` in the scope ``foo/bar`` is ``foo/bar/v:0``.
      shape: that of a new variable; of a shared one it is checked, unless it or an axis is
        None.
      dtype: None means that of a constant initializer, else the scope's (float32).
      initializer: a function ``init(key, shape, dtype)`` as of ``jax.nn.initializers``,
        ``init(shape, dtype)``, whose first parameter is called ``shape``, or ``init()``; or
        a constant, which decides on shape and dtype. None means the scope's, else
        ``glorot_uniform_initializer`` (zeros for integers).
      trainable: whether it belongs to ``variables.trainable``.
      collections: keys of the collections to put it into; None means ``["variables"]``.
      regularizer: a function of the array, whose result is in
        ``get_collection("regularization_losses")``. None means the scope's.
      theirs: TensorFlow's other keywords, such as ``partitioner``, with its defaults.

    Raises:
      ValueError: if the variable exists and the scope does not reuse, if it does not exist
        and the scope does, if a shared one has another shape or dtype, or if the shape of
        a new one is missing.

    Example:
      >>> import jax.numpy as jnp, jslices.tf1 as tf
      >>> def model(ids):
      ...     table = tf.get_variable("table", [100, 8], initializer=tf.ones_initializer())
      ...     return table[ids].sum()
      >>> model, ids = tf.transform(model), jnp.array([3, 3])
      >>> model.apply(model.init(None, ids), ids)
      (Array(16., dtype=float32), Variables(table: float32[100, 8]))

    The key of an initializer is the one given to ``init`` folded with the variable's name,
    so that a value depends on no other variable.
    """
    run = current_run("get_variable")
    check_defaults("get_variable", theirs)
    scope = current_scope(run)
    full = join(scope.name, check_name(name, "get_variable", scope.name))
    existing: Variable | None = run.shared.get(full)
    if existing is not None:
        if not scope.reuse:
            raise ValueError(
                f"Variable {full} already exists, disallowed. Did you mean to set "
                "reuse=True or reuse=tf.AUTO_REUSE in VarScope?"
            )
        _check_shared(existing, full, shape, _shared_dtype(dtype, initializer, scope))
        return existing
    if scope.reuse is True:
        raise ValueError(
            f"Variable {full} does not exist, or was not created with tf.get_variable(). "
            "Did you mean to set reuse=tf.AUTO_REUSE in VarScope?"
        )
    with run.names.released_on_error(), run.names.scope(""):
        # If a Variable already has the name, this one becomes v_1, as in TensorFlow.
        unique = run.names.unique(full, "get_variable")
        if initializer is None:
            initializer = scope.initializer
        request = dataclasses.replace(
            _creation.request_of_initializer(
                full, unique, shape, dtype, initializer, scope.dtype
            ),
            trainable=trainable,
            collections=collections,
            regularizer=scope.regularizer if regularizer is None else regularizer,
        )
        new = run.shared[full] = Variable._new(run, request)
    return new


def _shared_dtype(
    dtype: DTypeLike | None, initializer: InitializerLike, scope: VariableScope
) -> np.dtype:
    """The dtype that a shared variable must have; a constant has one of its own."""
    if dtype is None and initializer is not None and not _creation.is_function(initializer):
        return dtype_of(initializer)
    return canonical_dtype(scope.dtype if dtype is None else dtype)


def _check_shared(
    existing: Variable, name: str, shape: PartialShape | None, dtype: np.dtype
) -> None:
    if shape is not None:
        dims = _creation.as_axes(shape)
        fits = len(dims) == len(existing.shape) and all(
            n is None or n == length for n, length in zip(dims, existing.shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"Trying to share variable {name}, but specified shape {dims} and found "
                f"shape {existing.shape}."
            )
    declared = existing._request.dtype
    if dtype != declared:
        raise ValueError(
            f"Trying to share variable {name}, but specified dtype {dtype} and found "
            f"dtype {declared}."
        )
