"""Advice for names of TensorFlow that are missing here."""

import importlib
from collections.abc import Mapping

_PARTITION = (
    "leave it out on one device; shard the array over several: jax.device_put(table, "
    "sharding)"
)
_GETTER = "call get_variable through a function of your own"
_CACHING = "leave it out: JAX decides what is copied where"
_COLLECTION = "write tf.get_collection(tf.GraphKeys.{})"
_HASH = "hash strings in NumPy before the step, and take ids % V"

# Names -> what to type instead. Expressions use TensorFlow's names for arguments; a test
# compares them with its results.
_ADVICE = {
    "GradientTape gradients": "value, grads = jslices.value_and_grad(loss)(params, ...), "
    "of a function",
    "Session InteractiveSession": "model = tf.transform(fn); variables = model.init(key, "
    "...); out, variables = model.apply(variables, ...)",
    "Graph get_default_graph reset_default_graph graph": "the function given to "
    "tf.transform takes the place of a graph",
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
    "fixed_size_partitioner min_max_variable_partitioner set_partitioner "
    "replica_device_setter variable_axis_size_partitioner": _PARTITION,
    "set_caching_device": _CACHING,
    "set_custom_getter": _GETTER,
    "get_variable": "with tf.variable_scope(scope): tf.get_variable(...)",
    "build": "leave it out: there is no graph to build",
    "from_proto": "tf.train.Saver(saver_def=...)",
    "to_proto": "as_saver_def()",
    "set_last_checkpoints_with_time": "recover_last_checkpoints(paths)",
    "export_meta_graph": "there is no graph to save; save the variables",
    "import_meta_graph": "there is no graph to load; restore the variables",
    "ConfigProto GPUOptions RunOptions OptimizerOptions": "leave it out: JAX has no "
    "sessions to configure",
    "Print": 'jax.debug.print("{}", x), on a line of its own',
    "Assert": "jax.experimental.checkify.check(condition, message)",
    "SparseTensorValue": "tf.SparseTensor",
    "sparse_placeholder": "pass its indices and values as arguments, and make a "
    "tf.SparseTensor of them",
    "placeholder_with_default": "an argument of the function, with a default",
    "Coordinator MonitoredTrainingSession estimator": "a Python loop around the step; "
    "jslices.Saver saves in it",
    "ExponentialMovingAverage": "jslices.optim.params_ema(optimizer, decay), which has no "
    "num_updates",
    "SyncReplicasOptimizer": "jslices.accumulators, or jit on a mesh of devices",
    "add_n": "sum(inputs)",
    "app flags logging": "the module of this name in absl, from the package absl-py",
    "bias_add": "value + bias",
    "cast": "x.astype(dtype)",
    "check_numerics": "jax.debug_nans(True), or jslices.all_finite(grads)",
    "checkpoint_exists": "tf.train.latest_checkpoint(folder) is not None",
    "contrib": "TensorFlow 2 has none either; see jax.nn, jslices.optim and optax",
    "control_dependencies group local_variables_initializer tables_initializer tuple": (
        "leave it out: the order of the program decides"
    ),
    "cosine_decay": "optax.cosine_decay_schedule(rate, decay_steps, alpha)",
    "compat": "tf itself, for compat.v1",
    "create_global_step get_global_step get_or_create_global_step global_step": (
        "count steps in the state: every optimizer's state has count; or a tf.Variable"
    ),
    "data": "tf.data of TensorFlow works beside JAX, dataset.as_numpy_iterator(); or grain",
    "device": "leave the block out; jax.device_put(x, device) places an array",
    "feature_column": "tables and lookups: jslices.embedding_lookup_sparse",
    "dropout": "x * jax.random.bernoulli(key, keep, x.shape) / keep",
    "dynamic_rnn": "jax.lax.scan, over the steps of the sequence",
    "exponential_decay": "optax.exponential_decay(rate, decay_steps, decay_rate)",
    "fixed_unigram_candidate_sampler learned_unigram_candidate_sampler "
    "uniform_candidate_sampler": "pass sampled_values=jslices."
    "fixed_unigram_candidate_sampler(true_classes, num_sampled, range_max, key=key, "
    "unigrams=counts), with counts of the batches so far, or equal ones",
    "fill": "jax.numpy.full(dims, value)",
    "floor_div floordiv": "x // y",
    "gather_nd": "x[tuple(jax.numpy.moveaxis(indices, -1, 0))]",
    "gfile": "open, os.path and glob; fsspec or etils.epath for files in a cloud",
    "identity": "x",
    "in_top_k": "(jax.lax.top_k(predictions, k)[1] == targets[:, None]).any(-1)",
    "init_from_checkpoint": "variables = tf.train.Saver().restore(variables, path)",
    "inverse_time_decay": "lambda step: rate / (1 + decay_rate * step / decay_steps)",
    "l2_loss": "jax.numpy.sum(x**2) / 2",
    "l2_normalize": "x * jax.lax.rsqrt(jax.numpy.maximum(jax.numpy.sum(x**2, axis, "
    "keepdims=True), 1e-12))",
    "layers": "tf.get_variable and tf.matmul, or a model of Flax, Haiku or Equinox",
    "list_variables": "tf.train.Saver().restore(None, path).keys()",
    "load_checkpoint": "tf.train.Saver().restore(None, path)",
    "load_variable": "tf.train.Saver().restore(None, path)[name]",
    "losses": "functions of jax.numpy; those of regularizers are in "
    'tf.get_collection("regularization_losses")',
    "map_fn": "jax.lax.map(fn, elems)",
    "metrics summary": "return the numbers from the step, and log them: clu, tensorboardX, "
    "or print",
    "moments": "x.mean(axes), x.var(axes)",
    "multinomial": "jax.random.categorical(key, logits, shape=(n, batch)).T",
    "natural_exp_decay": "lambda step: rate * jax.numpy.exp(-decay_rate * step / "
    "decay_steps)",
    "no_op": "None",
    "piecewise_constant": "optax.piecewise_constant_schedule(rate, {boundary + 1: "
    "factor, ...})",
    "polynomial_decay": "optax.polynomial_schedule(rate, end_rate, power, decay_steps)",
    "py_func": "jax.pure_callback(f, shapes, x)",
    "random_shuffle": "jax.random.permutation(key, x)",
    "range": "jax.numpy.arange(start, limit, delta)",
    "rank": "x.ndim",
    "saved_model": "jax.export.export(jax.jit(f))(x).serialize()",
    "scatter_nd": "jax.numpy.zeros(shape).at[tuple(indices.T)].add(updates)",
    "sequence_mask": "jax.numpy.arange(maxlen) < lengths[..., None]",
    "shuffle_batch batch start_queue_runners": "feed the step from a Python iterator: "
    "tf.data as NumPy, grain, or a generator",
    "sigmoid_cross_entropy_with_logits": "jax.numpy.logaddexp(0, logits) - logits * labels",
    "slice": "jax.lax.dynamic_slice(x, begin, size)",
    "softmax_cross_entropy_with_logits softmax_cross_entropy_with_logits_v2": "-(labels * "
    "jax.nn.log_softmax(logits)).sum(-1)",
    "sparse_softmax_cross_entropy_with_logits": "-jax.numpy.take_along_axis("
    "jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]",
    "sparse_tensor_to_dense": "jax.numpy.zeros(shape).at[tuple(indices.T)].set(values)",
    "squared_difference": "(x - y) ** 2",
    "string": "NumPy has strings, arrays of JAX have none: " + _HASH,
    "string_to_hash_bucket string_to_hash_bucket_fast strings": _HASH,
    "to_float": 'x.astype("float32")',
    "to_int32": 'x.astype("int32")',
    "unique": "jax.numpy.unique(x, return_inverse=True, size=...), which is sorted",
    "unsorted_segment_sum": "jax.ops.segment_sum(data, segment_ids, num_segments)",
    "xw_plus_b": "x @ weights + biases",
    "zero_fraction": "(x == 0).mean()",
    "AdadeltaOptimizer": "jslices.adadelta(rate, rho=0.95, eps=1e-8)",
    "AdagradOptimizer": "jslices.adagrad(rate, eps=0.0)",
    "AdamOptimizer": 'jslices.adam(rate, eps_hat=True, untouched="exact"), in a step '
    "by jslices.train_step(loss, tx)",
    "FtrlOptimizer": "jslices.ftrl(rate)",
    "GradientDescentOptimizer": "jslices.sgd(rate)",
    "MomentumOptimizer": "jslices.sgd(rate, momentum)",
    "ProximalAdagradOptimizer": "jslices.proximal_adagrad(rate)",
    "RMSPropOptimizer": "jslices.rmsprop(rate, eps=1e-10, initial_scale=1.0)",
}
INSTEAD = {name: text for names, text in _ADVICE.items() for name in names.split()}

#: Keywords that change nothing as long as they have TensorFlow's default, and advice.
_KEYWORDS = {
    "caching_device": (None, _CACHING),
    "constraint": (None, "apply it after the update: jslices.project_rows, or v.assign"),
    "custom_getter": (None, _GETTER),
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
    if name in INSTEAD:
        advice = INSTEAD[name]
    elif name.endswith("Optimizer"):
        advice = "help(jslices.optim) lists the optimizers"
    else:
        advice = _of_jax(name) or (
            "JAX has no function of this name, and TensorFlow 1's variables, scopes, "
            "initializers, lookups, accumulators and Savers are all that is here"
        )
    return AttributeError(f"{module} has no {name!r}: {advice}", name=name)


def _of_jax(name: str) -> str | None:
    """The function of JAX with this name, if there is one."""
    bare = name.removeprefix("reduce_")
    for module in ("numpy", "nn", "lax", "numpy.linalg", "ops", "scipy.special"):
        if callable(getattr(importlib.import_module(f"jax.{module}"), bare, None)):
            return f"jax.{module}.{bare}, whose arguments may differ"
    return None
