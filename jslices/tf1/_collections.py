"""Collections of variables, and TensorFlow's functions of many variables at once.

Inside a transformed function they are about the variables of this run, as TensorFlow's are
about the graph; or they are pure functions of :class:`jslices.tf1.Variables`, which
``init`` and ``apply`` return. All results are in the order of creation.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from jslices.errors import FailedPreconditionError
from jslices.tf1._names import bare_name
from jslices.tf1._run import current_run, initial_value
from jslices.tf1._state import Value, Variables, is_initialized
from jslices.tf1._variable import Variable

#: Variables, a list of handles, or None for all of the run.
SomeVariables: TypeAlias = Mapping[str, Value] | Sequence[Variable] | None


class GraphKeys:
    """The names of TensorFlow's own collections, for variables and their regularizers."""

    VARIABLES = GLOBAL_VARIABLES = "variables"
    LOCAL_VARIABLES = "local_variables"
    METRIC_VARIABLES = "metric_variables"
    MODEL_VARIABLES = "model_variables"
    TRAINABLE_VARIABLES = "trainable_variables"
    MOVING_AVERAGE_VARIABLES = "moving_average_variables"
    CONCATENATED_VARIABLES = "concatenated_variables"
    TRAINABLE_RESOURCE_VARIABLES = "trainable_resource_variables"
    REGULARIZATION_LOSSES = "regularization_losses"
    LOSSES = "losses"
    WEIGHTS = "weights"
    BIASES = "biases"
    ACTIVATIONS = "activations"
    UPDATE_OPS = "update_ops"
    GLOBAL_STEP = "global_step"
    EVAL_STEP = "eval_step"
    TRAIN_OP = "train_op"
    INIT_OP = "init_op"
    LOCAL_INIT_OP = "local_init_op"
    READY_OP = "ready_op"
    READY_FOR_LOCAL_INIT_OP = "ready_for_local_init_op"
    SUMMARY_OP = "summary_op"
    SUMMARIES = "summaries"
    SAVERS = "savers"
    SAVEABLE_OBJECTS = "saveable_objects"
    RESOURCES = "resources"
    LOCAL_RESOURCES = "local_resources"
    QUEUE_RUNNERS = "queue_runners"
    TABLE_INITIALIZERS = "table_initializer"
    ASSET_FILEPATHS = "asset_filepaths"
    COND_CONTEXT = "cond_context"
    WHILE_CONTEXT = "while_context"


def get_collection(key: str, scope: str | None = None) -> list[Any]:
    """The :class:`jslices.tf1.Variable` handles of a collection, or its losses.

    ``"regularization_losses"`` calls the regularizers on the current values, and leaves out
    results of None. ``scope`` is a regular expression for the beginning of the name.

    Example:
      >>> import jax.numpy as jnp, jslices.tf1 as tf
      >>> def loss():
      ...     tf.get_variable("w", [3], initializer=tf.ones_initializer(),
      ...                     regularizer=lambda w: 0.5 * jnp.sum(w * w))
      ...     return sum(tf.get_collection("regularization_losses"))
      >>> model = tf.transform(loss)
      >>> model.apply(model.init(None))[0]
      Array(1.5, dtype=float32)

    TensorFlow calls a regularizer when it creates the variable; here a table that is only
    looked up keeps its row gradients if you don't ask.
    """
    handles = _handles("get_collection", scope)
    if key != GraphKeys.REGULARIZATION_LOSSES:
        return [v for v in handles if key in v.info.collections]
    pairs = [(v, v._request.regularizer) for v in handles]
    losses = [regularizer(v.value()) for v, regularizer in pairs if regularizer is not None]
    return [loss for loss in losses if loss is not None]


def _of_collection(
    caller: str, key: str, scope: str | Variables | None
) -> list[Variable] | Variables:
    if isinstance(scope, Variables):
        return scope.collection(key)
    return [v for v in _handles(caller, scope) if key in v.info.collections]


def _handles(caller: str, scope: str | None) -> list[Variable]:
    """The variables of a run."""
    if scope is not None and not isinstance(scope, str):
        raise TypeError(f"{caller} wants a scope, a string, got {type(scope).__name__}")
    variables = current_run(caller).variables.values()
    return [v for v in variables if scope is None or re.match(scope, v.name)]


def all_variables(scope: str | Variables | None = None) -> list[Variable] | Variables:
    """:func:`jslices.tf1.get_collection` of the key ``"variables"``: the handles of a run.

    Of :class:`jslices.tf1.Variables` as ``scope`` it gives those in the collection.
    """
    return _of_collection("all_variables", GraphKeys.VARIABLES, scope)


def trainable_variables(
    scope: str | Variables | None = None,
) -> list[Variable] | Variables:
    """The variables that are trained, as :func:`jslices.tf1.all_variables` gives all."""
    return _of_collection("trainable_variables", GraphKeys.TRAINABLE_VARIABLES, scope)


def report_uninitialized_variables(
    var_list: SomeVariables = None, name: str | None = None
) -> list[str]:
    """The names, without ``:0``, of variables that are declared and have no value.

    ``var_list``: :class:`jslices.tf1.Variables` or a list of handles; None, inside a
    transformed function, means all that it created.

    Example:
      >>> import jslices.tf1 as tf
      >>> model = tf.transform(lambda: tf.get_variable("w", [2]).value())
      >>> tf.report_uninitialized_variables(model.abstract_init())
      ['w']
    """
    values = _values_of("report_uninitialized_variables", var_list)
    return [name for name, value in values.items() if not is_initialized(value)]


def assert_variables_initialized(var_list: SomeVariables = None) -> SomeVariables:
    """Return the variables, None if there are none; or raise if some have no value.

    ``var_list`` is as for :func:`jslices.tf1.report_uninitialized_variables`.

    Raises:
      FailedPreconditionError: naming every variable that has no value, not only the first.
    """
    values = _values_of("assert_variables_initialized", var_list)
    if missing := report_uninitialized_variables(values):
        raise FailedPreconditionError(
            f"Attempting to use uninitialized value {', '.join(missing)}; make them with "
            "model.init(key, *args) or initialize_all_variables(variables, key)"
        )
    if not values:
        return None
    return values if var_list is None else var_list


def initialize_all_variables(
    variables: Variables | None = None, key: jax.Array | None = None
) -> Variables | None:
    """:func:`jslices.tf1.initialize_variables` of every name.

    Inside a transformed function, without ``variables``, it does nothing.
    """
    names = () if variables is None else _checked("initialize_all_variables", variables)
    return initialize_variables(list(names), variables=variables, key=key)


def initialize_variables(
    var_list: Iterable[str | Variable],
    name: str = "init",
    variables: Variables | None = None,
    key: jax.Array | None = None,
) -> Variables | None:
    """Some of the variables with their initial values, the others unchanged.

    Also in the order of functions, ``initialize_variables(variables, names, key)``.

    Args:
      var_list: names or handles; an empty list changes nothing.
      name: ignored.
      variables: what ``abstract_init``, ``init`` or ``apply`` returned. None, inside a
        transformed function, does nothing and returns None: ``model.init`` initializes.
      key: a PRNG key; the same key gives what ``init`` gives. None if nothing is random.

    Raises:
      KeyError: for a name that is not in ``variables``.
      ValueError: for initial values that the function computed from arrays: only
        ``model.init(key, *args)`` can make those.

    Example:
      >>> import jslices.tf1 as tf
      >>> model = tf.transform(lambda: tf.Variable(3, name="n").assign_add(1))
      >>> _, variables = model.apply(model.init(None))
      >>> after = tf.initialize_variables(["n"], variables=variables)
      >>> int(variables["n"]), int(after["n"])
      (4, 3)
    """
    if isinstance(var_list, Variables):
        return initialize_variables(name, "init", var_list, variables)  # type: ignore[arg-type]
    if isinstance(var_list, str | Variable) or not isinstance(var_list, Iterable):
        raise TypeError(
            f"initialize_variables wants a list of names, got {var_list!r}; put the name "
            "into a list"
        )
    names = [bare_name(v.name if isinstance(v, Variable) else v) for v in var_list]
    if variables is None:
        current_run("initialize_variables")
        return None
    checked = _checked("initialize_variables", variables)
    for name in names:
        checked[name]  # a KeyError lists the known names
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


def _values_of(caller: str, variables: SomeVariables) -> dict[str, Value]:
    if isinstance(variables, Mapping):
        return dict(variables)
    if variables is None:
        variables = list(current_run(caller).variables.values())
    if isinstance(variables, list | tuple):
        return {v.info.name: v._value for v in variables}
    raise TypeError(
        f"{caller} wants the Variables that init or apply returned, or a list of handles, "
        f"got {type(variables).__name__}"
    )
