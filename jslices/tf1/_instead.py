"""Advice for names of TensorFlow that are missing here."""

from collections.abc import Mapping

_PARTITION = "shard the array over a mesh: jax.device_put(table, sharding)"
_COLLECTION = "write tf.get_collection(tf.GraphKeys.{})"
_GRADIENT = "value, grads = jslices.value_and_grad(loss)(params, ...), of a function"
_SESSION = (
    "model = tf.transform(fn); variables = model.init(key, ...); out, variables = "
    "model.apply(variables, ...)"
)
_GRAPH = "the function given to tf.transform takes the place of a graph"

INSTEAD = {
    "GradientTape": _GRADIENT,
    "gradients": _GRADIENT,
    "Session": _SESSION,
    "InteractiveSession": _SESSION,
    "Graph": _GRAPH,
    "get_default_graph": _GRAPH,
    "reset_default_graph": _GRAPH,
    "graph": _GRAPH,
    "initial_value": "use initialized_value()",
    "initializer": "model.init(key, ...) makes all initial values, and "
    "tf.initialize_variables([name], variables=variables, key=key) one of them",
    "load": "use assign(value) in the function, variables.replace({name: value}) outside",
    "placeholder": "make it an argument of the function given to tf.transform",
    "function": "jax.jit",
    "keras": "jslices.keras gives the layers of Keras 3 row gradients",
    "add_to_collection": "give the variable collections=[...], and return other values",
    "make_template": "call the function within variable_scope(name, reuse=tf.AUTO_REUSE)",
    "variable_op_scope": "tf.variable_scope",
    "no_regularizer": "regularizer=lambda w: None",
    "is_variable_initialized": "not tf.report_uninitialized_variables([v])",
    "local_variables": _COLLECTION.format("LOCAL_VARIABLES"),
    "model_variables": _COLLECTION.format("MODEL_VARIABLES"),
    "moving_average_variables": _COLLECTION.format("MOVING_AVERAGE_VARIABLES"),
    "fixed_size_partitioner": _PARTITION,
    "min_max_variable_partitioner": _PARTITION,
    "variable_axis_size_partitioner": _PARTITION,
    "set_caching_device": "leave it out: JAX decides what is copied where",
    "set_custom_getter": "call get_variable through a function of your own",
    "set_partitioner": _PARTITION,
    "get_variable": "with tf.variable_scope(scope): tf.get_variable(...)",
    "build": "leave it out: there is no graph to build",
    "from_proto": "tf.train.Saver(saver_def=...)",
    "to_proto": "as_saver_def()",
    "set_last_checkpoints_with_time": "recover_last_checkpoints(paths)",
    "export_meta_graph": "there is no graph to save; save the variables",
    "import_meta_graph": "there is no graph to load; restore the variables",
}

_OPTIMIZERS = {
    "Adadelta": "adadelta(rate)",
    "Adagrad": "adagrad(rate)",
    "Adam": 'adam(rate), or adam(rate, untouched="exact") as in TensorFlow',
    "Ftrl": "ftrl(rate)",
    "GradientDescent": "sgd(rate)",
    "Momentum": "sgd(rate, momentum)",
    "ProximalAdagrad": "proximal_adagrad(rate)",
    "RMSProp": "rmsprop(rate)",
}
INSTEAD |= {f"{name}Optimizer": f"jslices.{call}" for name, call in _OPTIMIZERS.items()}

#: Keywords that change nothing as long as they have TensorFlow's default, and advice.
_KEYWORDS = {
    "caching_device": (None, "leave it out: JAX decides what is copied where"),
    "constraint": (None, "apply it after the update: jslices.project_rows, or v.assign"),
    "custom_getter": (None, "call get_variable through a function of your own"),
    "expected_shape": (None, "leave it out: the value decides"),
    "import_scope": (None, "leave it out: there is no graph to import"),
    "partitioner": (None, _PARTITION),
    "validate_shape": (True, "leave it out: every shape is known"),
    "variable_def": (None, "pass the initial value"),
}
#: Keywords that never change anything.
_IGNORED = ("use_resource", "values")


def check_defaults(caller: str, theirs: Mapping[str, object]) -> None:
    """Raise a TypeError for a keyword of TensorFlow that is not supported here."""
    for name, value in theirs.items():
        if name in _IGNORED:
            continue
        if name not in _KEYWORDS:
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}")
        default, advice = _KEYWORDS[name]
        if value is not default:
            raise TypeError(f"{caller} knows no {name}={value!r}: {advice}")


def missing(module: str, name: str) -> AttributeError:
    """The error for a name of TensorFlow that ``module`` lacks, saying what to type."""
    others = "jax.numpy, jax.nn and jax.lax have what is not here"
    if name.endswith("Optimizer"):
        others = "help(jslices.optim) lists the optimizers"
    advice = INSTEAD.get(name, others)
    return AttributeError(f"{module} has no {name!r}: {advice}", name=name)
