"""TensorFlow's helpers for all variables at once, for explicit state.

Without an argument they speak of the run they are called in, as TensorFlow's speak of the
graph; given variables they are pure functions of these.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jslices._errors import FailedPreconditionError
from jslices.tf1._cells import LiveCell
from jslices.tf1._keys import initial_value
from jslices.tf1._names import bare_name
from jslices.tf1.collections import GraphKeys, handles_in, matches
from jslices.tf1.frame import current_frame
from jslices.tf1.state import Variables, is_initialized
from jslices.tf1.variable import Variable


def all_variables(variables: Variables | None = None, scope: str | None = None) -> Any:
    """The variables of the collection ``"variables"``, in the order of creation.

    Args:
      variables: what ``init`` or ``apply`` returned; None, inside of a transformed
        function, means what has been created so far.
      scope: a regular expression that the beginning of the name must match.

    Returns:
      A list of :class:`jslices.Variable`; given ``variables``, those of them.

    Raises:
      RuntimeError: without ``variables``, outside of a transformed function.

    Example:
      >>> import jax, jslices as js
      >>> def model():
      ...     js.get_variable("a", [2])
      ...     js.get_variable("b", [], trainable=False)
      ...     return [v.name for v in js.all_variables()]
      >>> model = js.transform(model)
      >>> variables = model.init(jax.random.key(0))
      >>> model.apply(variables)[0], list(js.trainable_variables(variables))
      (['a:0', 'b:0'], ['a'])

    Source: ``tf.all_variables``, later ``tf.global_variables``.
    """
    return _of_collection("all_variables", GraphKeys.VARIABLES, variables, scope)


def trainable_variables(
    variables: Variables | None = None, scope: str | None = None
) -> Any:
    """The variables that are trained; see :func:`all_variables`, which has the example.

    Args:
      variables: what ``init`` or ``apply`` returned, or None inside of a function.
      scope: a regular expression that the beginning of the name must match.

    Returns:
      A list of :class:`jslices.Variable`; given ``variables``, those of them: what
      ``variables.trainable`` is.

    Raises:
      RuntimeError: without ``variables``, outside of a transformed function.

    Example:
      >>> import jax, jslices as js
      >>> model = js.transform(lambda: [js.Variable(1.0), js.Variable(2, trainable=False)])
      >>> js.trainable_variables(model.init(None))
      Variables(Variable: float32[])

    Source: ``tf.trainable_variables``.
    """
    key = GraphKeys.TRAINABLE_VARIABLES
    return _of_collection("trainable_variables", key, variables, scope)


def _of_collection(what: str, key: str, variables: Any, scope: str | None) -> Any:
    if variables is None:
        return handles_in(current_frame(what), key, scope)
    return _checked(what, variables).where(
        lambda info: key in info.collections and matches(info.name, scope)
    )


def report_uninitialized_variables(variables: Any = None) -> list[str]:
    """The names of variables that are declared and have no value.

    Args:
      variables: what ``init``, ``apply`` or ``abstract_init`` returned, or a list of
        handles; None, inside of a transformed function, means all of its own.

    Returns:
      Names without ``:0``, in the order of creation.

    Raises:
      RuntimeError: without ``variables``, outside of a transformed function.

    Example:
      >>> import jax, jslices as js
      >>> model = js.transform(lambda: js.get_variable("w", [2]).value())
      >>> declared = model.abstract_init(jax.random.key(0))
      >>> js.report_uninitialized_variables(declared)
      ['w']
      >>> js.report_uninitialized_variables(js.initialize_all_variables(
      ...     declared, jax.random.key(0)))
      []

    Source: ``tf.report_uninitialized_variables``.
    """
    values = _values_of("report_uninitialized_variables", variables)
    return [name for name, value in values.items() if not is_initialized(value)]


def assert_variables_initialized(variables: Any = None) -> Any:
    """Raises for variables without a value, and gives back the variables.

    Args:
      variables: as for :func:`report_uninitialized_variables`.

    Returns:
      ``variables``; None if there are none, as in TensorFlow.

    Raises:
      FailedPreconditionError: naming every variable that has no value.
      RuntimeError: without ``variables``, outside of a transformed function.

    Example:
      >>> import jax, jslices as js
      >>> model = js.transform(lambda: js.get_variable("w", [2]).value())
      >>> js.assert_variables_initialized(model.abstract_init(jax.random.key(0)))
      Traceback (most recent call last):
      jslices._errors.FailedPreconditionError: Attempting to use uninitialized value w; ...

    Source: ``tf.assert_variables_initialized``, which names one of them.
    """
    values = _values_of("assert_variables_initialized", variables)
    missing = [name for name, value in values.items() if not is_initialized(value)]
    if missing:
        raise FailedPreconditionError(
            f"Attempting to use uninitialized value {', '.join(missing)}; make them with "
            "model.init(key, *args) or initialize_all_variables(variables, key)"
        )
    if not values:
        return None
    return values if variables is None else variables


def initialize_all_variables(variables: Variables, key: jax.Array) -> Variables:
    """All variables with their initial values: of declared ones, or over again.

    Args:
      variables: what ``abstract_init``, ``init`` or ``apply`` returned.
      key: a PRNG key; the same key gives what ``init`` gives.

    Returns:
      The same variables, each with its initial value.

    Raises:
      ValueError: naming variables whose initial value was an array that the function
        computed; only ``model.init(key, *args)`` makes those.

    Example:
      >>> import jax, jslices as js
      >>> model = js.transform(lambda: js.Variable(3, name="n").assign_add(1))
      >>> _, variables = model.apply(model.init(jax.random.key(0)))
      >>> int(variables["n"])
      4
      >>> int(js.initialize_all_variables(variables, jax.random.key(0))["n"])
      3

    Source: ``tf.initialize_all_variables``, an operation to run in a session.
    """
    return initialize_variables(variables, list(variables), key)


def initialize_variables(
    variables: Variables, var_list: Iterable[Any], key: jax.Array
) -> Variables:
    """The same as :func:`initialize_all_variables` for some, the others as they are.

    Args:
      variables: what ``abstract_init``, ``init`` or ``apply`` returned.
      var_list: names; an empty list changes nothing.
      key: a PRNG key; the same key gives what ``init`` gives.

    Returns:
      The same variables, those of ``var_list`` with their initial values.

    Raises:
      TypeError: if ``var_list`` is one name, no list.
      KeyError: for a name that is none of ``variables``.
      ValueError: as for :func:`initialize_all_variables`.

    Example:
      >>> import jax, jslices as js
      >>> model = js.transform(lambda: js.Variable(3, name="n").assign_add(1))
      >>> _, variables = model.apply(model.init(jax.random.key(0)))
      >>> int(js.initialize_variables(variables, ["n"], jax.random.key(0))["n"])
      3

    Source: ``tf.initialize_variables``, later ``tf.variables_initializer``.
    """
    checked = _checked("initialize_variables", variables)
    if isinstance(var_list, str | Variable) or not isinstance(var_list, Iterable):
        raise TypeError(
            f"initialize_variables wants a list of names, got {var_list!r}; put it into one"
        )
    names = [bare_name(v.name if isinstance(v, Variable) else v) for v in var_list]
    for name in names:
        checked[name]  # a KeyError says which there are
    infos = [info for info in checked.infos if info.name in names]
    computed = [info.name for info in infos if info.initial is None]
    if computed:
        raise ValueError(
            f"the initial value of {', '.join(computed)} was computed inside of the "
            "function; make it by model.init(key, *args), and take it over by "
            "variables.replace({name: new[name]})"
        )
    return checked.replace(
        {i.name: initial_value(i.initial, key, i.name) for i in infos if i.initial}
    )


def _checked(what: str, variables: Any) -> Variables:
    if not isinstance(variables, Variables):
        raise TypeError(
            f"{what} wants the Variables that init or apply returned, got "
            f"{type(variables).__name__}"
        )
    return variables


def _values_of(what: str, variables: Any) -> dict[str, Any]:
    if variables is None:
        entries = current_frame(what).entries.items()
        return {name: entry.value for name, entry in entries}
    if isinstance(variables, Mapping):
        return dict(variables)
    if isinstance(variables, list | tuple):
        cells = [v._cell for v in variables]
        return {c.name: c.entry.value for c in cells if isinstance(c, LiveCell)}
    raise TypeError(
        f"{what} wants the Variables that init or apply returned, or a list of handles, "
        f"got {type(variables).__name__}"
    )
