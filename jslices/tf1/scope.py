"""Variable scopes: prefixes of names, and defaults for what is created under them."""

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.typing import DTypeLike

from jslices.tf1._names import check_name
from jslices.tf1.frame import Frame, current_frame

Regularizer = Callable[[jax.Array], Any]


class _AutoReuse(enum.Enum):
    """The type of :data:`jslices.AUTO_REUSE`: share what is there, create what is not."""

    AUTO_REUSE = 1

    def __repr__(self) -> str:
        return "AUTO_REUSE"


AUTO_REUSE = _AutoReuse.AUTO_REUSE
#: Whether get_variable shares (True), creates (False), or whichever is possible.
Reuse = bool | _AutoReuse


class VariableScope:
    """A scope: what :func:`jslices.variable_scope` gives, and opens again.

    Attributes:
      name: the whole path, ``"foo/bar"``; ``""`` for the outermost.
      reuse: True, False or AUTO_REUSE.
      initializer, regularizer, dtype: what :func:`jslices.get_variable` uses where it
        is given none.
      original_name_scope: ``"foo_1/"``, the unique name of this opening of the scope.

    Source: ``tf.VariableScope``.
    """

    def __init__(
        self,
        name: str,
        reuse: Reuse = False,
        initializer: Any = None,
        dtype: DTypeLike | None = None,
        regularizer: Regularizer | None = None,
        original_name_scope: str = "",
    ) -> None:
        self.name = name
        self.reuse = reuse
        self.initializer = initializer
        self.dtype = dtype
        self.regularizer = regularizer
        self.original_name_scope = original_name_scope

    def reuse_variables(self) -> None:
        """From here on get_variable shares under this scope, and creates nothing."""
        self.reuse = True

    def set_initializer(self, initializer: Any) -> None:
        """Sets the initializer for variables that are given none."""
        self.initializer = initializer

    def set_regularizer(self, regularizer: Regularizer | None) -> None:
        """Sets the regularizer for variables that are given none."""
        self.regularizer = regularizer

    def set_dtype(self, dtype: DTypeLike | None) -> None:
        """Sets the dtype for variables that are given none."""
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"VariableScope({self.name!r}, reuse={self.reuse})"


def current_scope(frame: Frame) -> VariableScope:
    """The innermost scope; the outermost one is made when first asked for."""
    if not frame.scopes:
        frame.scopes.append(VariableScope(""))
    return frame.scopes[-1]


def get_variable_scope() -> VariableScope:
    """The scope that one is in; the outermost has the name ``""``.

    Raises:
      RuntimeError: outside of a transformed function.

    Example:
      >>> import jax, jslices as js
      >>> def model():
      ...     with js.variable_scope("foo"), js.variable_scope("bar"):
      ...         print(js.get_variable_scope())
      >>> _ = js.transform(model).init(jax.random.key(0))
      VariableScope('foo/bar', reuse=False)

    Source: ``tf.get_variable_scope``.
    """
    return current_scope(current_frame("get_variable_scope"))


@contextlib.contextmanager
def variable_scope(
    name_or_scope: str | VariableScope | None,
    reuse: Reuse | None = None,
    initializer: Any = None,
    dtype: DTypeLike | None = None,
    regularizer: Regularizer | None = None,
    *,
    default_name: str | None = None,
) -> Iterator[VariableScope]:
    """Puts a prefix before the names of variables, and gives defaults for them.

    Args:
      name_or_scope: a name, opened within the scope that one is in (``"a/b"`` is ``b`` in
        ``a``), or a scope that was opened before, whose whole path then counts wherever
        one is.
      reuse: True shares existing variables only, AUTO_REUSE creates those that miss, False
        and None mean what the enclosing scope does (of a scope object: what it does).
      initializer, dtype, regularizer: for variables, and scopes within, that are given
        none; None inherits.
      default_name: with ``name_or_scope=None``, a name to make unique: ``d``, ``d_1``, ...

    Yields:
      The :class:`VariableScope`. What is set on it lasts to the end of the block.

    Raises:
      RuntimeError: outside of a transformed function.
      TypeError, ValueError: for a scope or ``reuse`` of the wrong kind.

    Example:
      >>> import jax, jslices as js
      >>> def model():
      ...     with js.variable_scope("foo", initializer=js.constant_initializer(0.5)):
      ...         v = js.get_variable("v", [1])
      ...     with js.variable_scope("foo", reuse=True):
      ...         assert js.get_variable("v") is v
      ...     return v * 2
      >>> model = js.transform(model)
      >>> model.apply(model.init(jax.random.key(0)))
      (Array([1.], dtype=float32), Variables(foo/v: float32[1]))

    Source: ``tf.variable_scope``; the order of arguments is that of its first releases.
    Operations have no names in JAX; ``jax.named_scope`` puts the scope's into profiles.
    """
    frame = current_frame("variable_scope")
    if reuse is not None and not isinstance(reuse, bool | _AutoReuse):
        raise ValueError(
            "The reuse parameter must be True or False or None, or js.AUTO_REUSE; got "
            f"{reuse!r}"
        )
    outer = current_scope(frame)
    if isinstance(name_or_scope, VariableScope):
        base, last = name_or_scope, name_or_scope.name.rpartition("/")[2]
        path, sharing = base.name, reuse or base.reuse
    else:
        last = _scope_name(frame, outer, name_or_scope, default_name, reuse)
        base, path = outer, join(outer.name, last)
        sharing = reuse or outer.reuse
    scope = VariableScope(
        path,
        sharing,
        base.initializer if initializer is None else initializer,
        base.dtype if dtype is None else dtype,
        base.regularizer if regularizer is None else regularizer,
    )
    with contextlib.ExitStack() as stack:
        if last:
            scope.original_name_scope = stack.enter_context(frame.names.scope(last))
            stack.enter_context(jax.named_scope(last))
        stack.enter_context(_counted(frame, path, isinstance(name_or_scope, VariableScope)))
        frame.scopes.append(scope)
        stack.callback(frame.scopes.pop)
        yield scope


def _scope_name(
    frame: Frame,
    outer: VariableScope,
    name: object,
    default_name: str | None,
    reuse: Reuse | None,
) -> str:
    if name is None and default_name is not None:
        if reuse:
            raise ValueError("reuse=True cannot be used without a name_or_scope")
        wanted, times = check_name(default_name, "variable_scope"), 0
        unique = wanted
        while frame.scope_counts.get(join(outer.name, unique)):
            times += 1
            unique = f"{wanted}_{times}"
        return unique
    if not isinstance(name, str):
        raise TypeError(
            "VariableScope: name_or_scope must be a string or VariableScope, got "
            f"{name!r}; or None with default_name="
        )
    return check_name(name, "variable_scope") if name else ""


@contextlib.contextmanager
def _counted(frame: Frame, path: str, again: bool) -> Iterator[None]:
    """Counts openings, for ``default_name``; afterwards those within count no more."""
    counts = frame.scope_counts
    counts[path] = counts.get(path, 0) + 1
    before = dict(counts)
    try:
        yield
    finally:
        within = f"{path}/" if path else ""
        closed = {
            n: 0 if n.startswith(within) and n != path else c for n, c in counts.items()
        }
        frame.scope_counts = before if again else closed


def join(outer: str, inner: str) -> str:
    """``outer/inner``, either of which may be empty."""
    return f"{outer}/{inner}" if outer and inner else outer or inner


@contextlib.contextmanager
def name_scope(name: str | None) -> Iterator[str]:
    """Puts a prefix before the names of :class:`jslices.Variable`, not of get_variable.

    Args:
      name: made unique: opened twice it is ``ns`` and ``ns_1``. ``"ns/"`` opens that very
        scope again, None leaves all scopes.

    Yields:
      The unique name, with a slash.

    Raises:
      RuntimeError: outside of a transformed function.

    Example:
      >>> import jax, jslices as js
      >>> def model():
      ...     with js.variable_scope("foo"), js.name_scope("bar"):
      ...         print(js.get_variable("v", [1]).name, js.Variable(0.0, name="v").name)
      >>> _ = js.transform(model).init(jax.random.key(0))
      foo/v:0 foo/bar/v:0

    Source: ``tf.name_scope``; ``jax.named_scope`` puts the name into profiles as well.
    """
    frame = current_frame("name_scope")
    if name:
        check_name(name, "name_scope")
    with contextlib.ExitStack() as stack:
        unique = stack.enter_context(frame.names.scope(name or ""))
        if name:
            stack.enter_context(jax.named_scope(name.strip("/")))
        yield unique
