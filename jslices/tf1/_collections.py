"""Collections of variables, and TensorFlow's functions of many variables at once.

Inside of a transformed function they speak of the variables of this run, as TensorFlow's
speak of the graph. Given :class:`jslices.tf1.Variables` they are pure functions of these.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from jslices import FailedPreconditionError
from jslices.tf1._names import bare_name
from jslices.tf1._run import LiveCell, current_run, initial_value
from jslices.tf1._state import Value, VariableInfo, Variables, is_initialized
from jslices.tf1._variable import Variable

#: Variables, a list of handles, or None for all of the run.
SomeVariables: TypeAlias = Mapping[str, Value] | Sequence[Variable] | None


class GraphKeys:
    """The names of TensorFlow's own collections.

    Source: ``tf.GraphKeys``.
    """

    VARIABLES = "variables"
    GLOBAL_VARIABLES = "variables"
    TRAINABLE_VARIABLES = "trainable_variables"
    REGULARIZATION_LOSSES = "regularization_losses"


def get_collection(key: str, scope: str | None = None) -> list[Any]:
    """The contents of a collection so far, in the order of creation.

    Args:
      key: ``"variables"``, ``"trainable_variables"`` or another key that variables were
        created with; or ``"regularization_losses"``, which calls the regularizer of every
        variable that has one on its current value, and leaves out results of None.
      scope: a regular expression that the beginning of the name must match.

    Returns:
      A list of :class:`jslices.tf1.Variable`, or of losses.

    Raises:
      RuntimeError: outside of a transformed function.

    Example:
      >>> import jax, jax.numpy as jnp, jslices.tf1 as tf
      >>> def loss():
      ...     tf.get_variable("w", [3], initializer=tf.ones_initializer(),
      ...                     regularizer=lambda w: 0.5 * jnp.sum(w * w))
      ...     return sum(tf.get_collection("regularization_losses"))
      >>> model = tf.transform(loss)
      >>> model.apply(model.init(jax.random.key(0)))[0]
      Array(1.5, dtype=float32)

    Source: ``tf.get_collection``. TensorFlow calls a regularizer when the variable is
    created; here, if you don't ask, nothing is computed, and a table that is only looked up
    keeps its row gradients.
    """
    if key != GraphKeys.REGULARIZATION_LOSSES:
        return list(_handles("get_collection", key, scope))
    losses = []
    for handle in _handles("get_collection", None, scope):
        regularizer = handle._cell.request.regularizer  # type: ignore[union-attr]
        if regularizer is not None:
            losses.append(regularizer(handle.value()))
    return [loss for loss in losses if loss is not None]


def _handles(caller: str, key: str | None, scope: str | None) -> list[Variable]:
    """The variables of a run, of the collection ``key``, in the order of creation."""
    handles: list[Variable] = list(current_run(caller).handles.values())
    return [v for v in handles if _is_in(v.info, key, scope)]


def _is_in(info: VariableInfo, key: str | None, scope: str | None) -> bool:
    """True for the collection ``key``, if the beginning of the name matches ``scope``."""
    in_scope = scope is None or re.match(scope, f"{info.name}:0") is not None
    return in_scope and (key is None or key in info.collections)


def all_variables(variables: Variables | None = None, scope: str | None = None) -> Any:
    """The variables of the collection ``"variables"``, in the order of creation.

    Args:
      variables: what ``init`` or ``apply`` returned; None, inside of a transformed
        function, means those that were created so far.
      scope: a regular expression that the beginning of the name must match.

    Returns:
      A list of :class:`jslices.tf1.Variable`; given ``variables``, a part of these.

    Raises:
      RuntimeError: without ``variables``, outside of a transformed function.

    Example:
      >>> import jax, jslices.tf1 as tf
      >>> def model():
      ...     tf.get_variable("a", [2])
      ...     tf.get_variable("b", [], trainable=False)
      ...     return [v.name for v in tf.all_variables()]
      >>> model = tf.transform(model)
      >>> variables = model.init(jax.random.key(0))
      >>> model.apply(variables)[0], list(tf.trainable_variables(variables))
      (['a:0', 'b:0'], ['a'])

    Source: ``tf.all_variables``, later ``tf.global_variables``.
    """
    return _of_collection("all_variables", GraphKeys.VARIABLES, variables, scope)


def trainable_variables(
    variables: Variables | None = None, scope: str | None = None
) -> Any:
    """The variables that are trained, in the order of creation.

    Arguments and errors are those of :func:`jslices.tf1.all_variables`; given ``variables``
    without a scope, the result is ``variables.trainable``.

    Example:
      >>> import jax, jslices.tf1 as tf
      >>> model = tf.transform(lambda: [tf.Variable(1.0), tf.Variable(2, trainable=False)])
      >>> tf.trainable_variables(model.init(None))
      Variables(Variable: float32[])

    Source: ``tf.trainable_variables``.
    """
    key = GraphKeys.TRAINABLE_VARIABLES
    return _of_collection("trainable_variables", key, variables, scope)


def _of_collection(
    caller: str, key: str, variables: Variables | None, scope: str | None
) -> list[Variable] | Variables:
    if variables is None:
        return _handles(caller, key, scope)
    return _checked(caller, variables).where(lambda info: _is_in(info, key, scope))


def report_uninitialized_variables(variables: SomeVariables = None) -> list[str]:
    """The names of variables that are declared and have no value.

    Args:
      variables: what ``init``, ``apply`` or ``abstract_init`` returned, or a list of
        handles; None, inside of a transformed function, means all that it created.

    Returns:
      Names without ``:0``, in the order of creation.

    Raises:
      RuntimeError: without ``variables``, outside of a transformed function.

    Example:
      >>> import jax, jslices.tf1 as tf
      >>> model = tf.transform(lambda: tf.get_variable("w", [2]).value())
      >>> declared = model.abstract_init(jax.random.key(0))
      >>> tf.report_uninitialized_variables(declared)
      ['w']
      >>> tf.report_uninitialized_variables(tf.initialize_all_variables(
      ...     declared, jax.random.key(0)))
      []

    Source: ``tf.report_uninitialized_variables``.
    """
    return _uninitialized(_values_of("report_uninitialized_variables", variables))


def assert_variables_initialized(variables: SomeVariables = None) -> SomeVariables:
    """Return the variables, or raise an error if some have no value.

    Args:
      variables: as for :func:`report_uninitialized_variables`.

    Returns:
      ``variables``; None if there are none, as in TensorFlow.

    Raises:
      FailedPreconditionError: naming every variable that has no value.

    Example:
      >>> import jax, jslices.tf1 as tf
      >>> model = tf.transform(lambda: tf.get_variable("w", [2]).value())
      >>> tf.assert_variables_initialized(model.abstract_init(jax.random.key(0)))
      Traceback (most recent call last):
      jslices._errors.FailedPreconditionError: Attempting to use uninitialized value w; ...

    Source: ``tf.assert_variables_initialized``, which names one of these variables.
    """
    values = _values_of("assert_variables_initialized", variables)
    missing = _uninitialized(values)
    if missing:
        raise FailedPreconditionError(
            f"Attempting to use uninitialized value {', '.join(missing)}; make them with "
            "model.init(key, *args) or initialize_all_variables(variables, key)"
        )
    if not values:
        return None
    return values if variables is None else variables


def initialize_all_variables(variables: Variables, key: jax.Array) -> Variables:
    """All variables with their initial values, whether they had values or not.

    As :func:`jslices.tf1.initialize_variables`, errors included, for every name.

    Example:
      >>> import jax, jslices.tf1 as tf
      >>> model = tf.transform(lambda: tf.Variable(3, name="n").assign_add(1))
      >>> _, variables = model.apply(model.init(jax.random.key(0)))
      >>> int(variables["n"])
      4
      >>> int(tf.initialize_all_variables(variables, jax.random.key(0))["n"])
      3

    Source: ``tf.initialize_all_variables``, an operation to run in a session.
    """
    return initialize_variables(variables, list(variables), key)


def initialize_variables(
    variables: Variables, var_list: Iterable[str | Variable], key: jax.Array
) -> Variables:
    """Some of the variables with their initial values, the others unchanged.

    Args:
      variables: what ``abstract_init``, ``init`` or ``apply`` returned.
      var_list: names; an empty list changes nothing.
      key: a PRNG key; the same key gives what ``init`` gives.

    Raises:
      TypeError: if ``var_list`` is not a list.
      KeyError: for a name that is not in ``variables``.
      ValueError: for variables whose initial value was an array that the function
        computed, naming them; only ``model.init(key, *args)`` can make those.

    Example:
      >>> import jax, jslices.tf1 as tf
      >>> model = tf.transform(lambda: tf.Variable(3, name="n").assign_add(1))
      >>> _, variables = model.apply(model.init(jax.random.key(0)))
      >>> int(tf.initialize_variables(variables, ["n"], jax.random.key(0))["n"])
      3

    Source: ``tf.initialize_variables``, later ``tf.variables_initializer``.
    """
    checked = _checked("initialize_variables", variables)
    if isinstance(var_list, str | Variable) or not isinstance(var_list, Iterable):
        raise TypeError(
            f"initialize_variables wants a list of names, got {var_list!r}; put the name "
            "into a list"
        )
    names = [bare_name(v.name if isinstance(v, Variable) else v) for v in var_list]
    for name in names:
        checked[name]  # a KeyError says which there are
    infos = [info for info in checked.infos if info.name in names]
    computed = [info.name for info in infos if info.initial is None]
    if computed:
        raise ValueError(
            f"the initial value of {', '.join(computed)} was computed inside of the "
            "function; make it with new = model.init(key, *args), and put it in with "
            "variables.replace({name: new[name]})"
        )
    return checked.replace(
        {i.name: initial_value(i.initial, key, i.name) for i in infos if i.initial}
    )


# Their names from TensorFlow 0.12 on.
global_variables = all_variables
global_variables_initializer = initialize_all_variables
variables_initializer = initialize_variables


def _checked(caller: str, variables: object) -> Variables:
    if not isinstance(variables, Variables):
        raise TypeError(
            f"{caller} wants the Variables that init or apply returned, got "
            f"{type(variables).__name__}"
        )
    return variables


def _uninitialized(values: Mapping[str, Value]) -> list[str]:
    return [name for name, value in values.items() if not is_initialized(value)]


def _values_of(caller: str, variables: SomeVariables) -> dict[str, Value]:
    if variables is None:
        return {name: cell.value for name, cell in current_run(caller).cells.items()}
    if isinstance(variables, Mapping):
        return dict(variables)
    if isinstance(variables, list | tuple):
        cells = [v._cell for v in variables]
        return {c.name: c.value for c in cells if isinstance(c, LiveCell)}
    raise TypeError(
        f"{caller} wants the Variables that init or apply returned, or a list of handles, "
        f"got {type(variables).__name__}"
    )
