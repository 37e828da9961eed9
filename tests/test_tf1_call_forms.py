"""The call forms of TensorFlow's pages: each works, or says what to type instead."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jslices as js
import jslices.tf1 as tf

KEY = jax.random.key(0)
SLICES = tf.IndexedSlices([[1.0], [2.0], [3.0], [4.0]], [12, 26, 37, 45], (1000, 1))
V = np.float32([3, 4])


def run(fn):
    """What a program returns, run as it stands."""
    model = tf.transform(fn)
    return model.apply(model.init(KEY))[0]


def variable(**theirs):
    return tf.Variable(V, name="v", **theirs)


# One line is one call; what is compared is a list of numbers, a name or a flag.
FORMS = {
    # norms, clips and masks: TensorFlow's parameters, the name in its position
    "global_norm": (lambda: tf.global_norm(t_list=[V, None], name="n"), 5),
    "clip_by_global_norm": (
        lambda: tf.clip_by_global_norm(t_list=[V], clip_norm=1.0, use_norm=5.0, name="n")
        [0][0],
        [0.6, 0.8],
    ),
    "clip_by_value": (lambda: tf.clip_by_value(V, 0.0, 3.5, "name"), [3, 3.5]),
    "clip_by_norm": (lambda: tf.clip_by_norm(V, 1.0, None, "name"), [0.6, 0.8]),
    "clip_by_average_norm": (lambda: tf.clip_by_average_norm(V, 1.0, "n"), [1.2, 1.6]),
    "sparse_mask": (lambda: tf.sparse_mask(SLICES, [12, 45], "name").indices, [26, 37]),
    "sparse.mask": (lambda: tf.sparse.mask(SLICES, [12, 26, 45]).indices, [37]),
    "name and op": (lambda: [SLICES.name, SLICES.op], [None, None]),
    "device of slices": (lambda: SLICES.device == jax.devices()[0], True),
    # what the pages' programs use
    "matmul": (lambda: tf.matmul([[1.0, 2]], [[3.0, 4]], False, True, "name"), [[11]]),
    "sigmoid": (lambda: tf.sigmoid(0.0, name="s"), 0.5),
    "zeros_like": (lambda: tf.zeros_like(variable(), tf.int32, "name"), [0, 0]),
    "zeros_like slices": (lambda: tf.zeros_like(SLICES).shape, [1000, 1]),
    # variables
    "assign": (lambda: variable().assign([1, 2], False, "name", True), [1, 2]),
    "assign_sub": (lambda: variable().assign_sub(V, name="name", read_value=False), [0, 0]),
    "scatter_sub": (
        lambda: variable().scatter_sub(tf.IndexedSlices([1.0], [0]), False, "name"),
        [2, 4],
    ),
    "scatter_nd_add": (lambda: variable().scatter_nd_add([[0]], [1.0], "name"), [4, 4]),
    "NumPy's 64 bits": (lambda: variable().assign(np.array([1.5, 2.5])), [1.5, 2.5]),
    "get_shape": (lambda: variable().get_shape() == [2], True),
    "as_list": (lambda: variable().get_shape().as_list(), [2]),
    "base_dtype": (lambda: variable().dtype.base_dtype == tf.float32, True),
    "as_numpy_dtype": (lambda: variable().dtype.as_numpy_dtype(1.5), 1.5),
    "device": (lambda: variable().device == str(jax.devices()[0]), True),
    "eval": (lambda: type(variable().eval(None)) is np.ndarray, True),
    "keywords": (
        lambda: variable(
            caching_device=None, expected_shape=None, use_resource=True, constraint=None,
            variable_def=None, import_scope=None,
        ),
        [3, 4],
    ),
    # variables of many
    "trainable_variables": (lambda: variable() is tf.trainable_variables("v")[0], True),
    "all_variables": (lambda: variable() is tf.all_variables(scope="v")[0], True),
    "assert_variables_initialized": (
        lambda: len(tf.assert_variables_initialized(var_list=[variable()])), 1,
    ),
    "report_uninitialized_variables": (
        lambda: tf.report_uninitialized_variables([variable()], "report"), [],
    ),
    "initialize_variables": (lambda: tf.initialize_variables([variable()], "i"), None),
    "initialize_all_variables": (lambda: tf.initialize_all_variables(), None),
    "GraphKeys": (lambda: tf.GraphKeys.UPDATE_OPS, "update_ops"),
    # scopes and initializers
    "get_variable": (
        lambda: tf.get_variable(
            "w", [2], initializer=tf.ones_initializer, validate_shape=True,
            partitioner=None, use_resource=None, custom_getter=None, constraint=None,
            caching_device=None,
        ),
        [1, 1],
    ),
    "variable_scope": (lambda: scope_contents(), ["s/a:0", "s/a:0", "s/b:0"]),
    "initializer of nothing": (
        lambda: tf.get_variable("w", initializer=lambda: tf.constant([1.5])), [1.5],
    ),
    "initializer of nothing and a shape": (
        lambda: tf.get_variable("w", [2], initializer=lambda: [1, 2]), [1, 2],
    ),
    "initializer of a shape": (
        lambda: tf.get_variable("w", [2], initializer=full_of_sevens), [7, 7],
    ),
    "name_scope": (lambda: op_name(None, "op", [V]) + op_name("own", "op"), "op/own/"),
    "constant": (lambda: tf.constant([1], tf.int32, [1], "name", verify_shape=True), [1]),
    "zeros_initializer": (lambda: tf.zeros_initializer([2], tf.int32), [0, 0]),
    "init(shape)": (lambda: tf.constant_initializer(3)([2]), [3, 3]),
    "init(shape) of random numbers": (
        lambda: tf.Variable(tf.random_uniform_initializer(2, 2)([1, 1])), [[2]],
    ),
}  # fmt: skip


def full_of_sevens(shape, dtype=None, partition_info=None):
    return jnp.full(shape, 7, dtype)


def op_name(*args):
    with tf.name_scope(*args) as name:
        return name


def scope_contents():
    with tf.variable_scope("s", partitioner=None, values=[1]) as scope:
        tf.get_variable("a", [1])
        tf.get_variable("b", [1], trainable=False, collections=["mine"])
    with tf.variable_scope("t"):
        tf.get_variable("a", [1])
    lists = (scope.global_variables(), scope.trainable_variables())
    return [v.name for part in (*lists, scope.get_collection("mine")) for v in part]


@pytest.mark.parametrize("form", FORMS)
def test_works(form):
    call, expected = FORMS[form]
    out = run(lambda: getattr(out := call(), "value", lambda: out)())
    if isinstance(out, str | None | list) or isinstance(expected, bool):
        assert out == expected
    else:
        np.testing.assert_allclose(out, expected, rtol=1e-6)


REFUSED = {
    "GradientTape": (lambda: tf.GradientTape(), AttributeError, "js?lices.value_and_grad"),
    "gradients": (lambda: tf.gradients, AttributeError, "value_and_grad"),
    "Session": (lambda: tf.Session(), AttributeError, r"tf\.transform\(fn\); variables ="),
    "reduce_sum": (lambda: tf.reduce_sum, AttributeError, "jax.numpy.sum, whose arguments"),
    "layers": (lambda: tf.layers.dense, AttributeError, "tf.get_variable and tf.matmul"),
    "of another kind": (lambda: tf.audio, AttributeError, "no function of this name"),
    "AdamOptimizer": (
        lambda: tf.train.AdamOptimizer(1e-3), AttributeError, r"jslices\.adam\(rate",
    ),
    "sampler": (
        lambda: tf.nn.fixed_unigram_candidate_sampler, AttributeError, "sampled_values=",
    ),
    "init without a key": (
        lambda: tf.transform(lambda ids: ids).init(jnp.array([3, 9])), TypeError,
        r"PRNG key first: init\(jax.random.key",
    ),
    "a later order of arguments": (
        lambda: tf.get_variable("w", [2], jnp.float32, None, abs), TypeError,
        r"trainable of w must be a bool, got <.*abs>; give regularizer= .* by keyword",
    ),
    "constraint": (
        lambda: variable(constraint=abs), TypeError, "constraint=.* after the update",
    ),
    "partitioner": (
        lambda: tf.get_variable("w", [2], partitioner=len), TypeError, "jax.device_put",
    ),
    "validate_shape": (
        lambda: tf.get_variable("w", [2], validate_shape=False), TypeError, "leave it out",
    ),
    "custom_getter": (
        lambda: tf.variable_scope("s", custom_getter=len).__enter__(), TypeError,
        "a function of your own",
    ),
    "a keyword of nobody": (lambda: variable(shape=3), TypeError, "unexpected .* 'shape'"),
    "too large an integer": (
        lambda: tf.Variable(0).assign(np.int64(2**40)), TypeError, "which cannot hold",
    ),
    "a constant too large": (
        lambda: tf.constant(np.int64(2**40)), TypeError, "which cannot hold",
    ),
    "nn.softmax": (lambda: tf.nn.softmax, AttributeError, "jax.nn"),
    "another kind": (
        lambda: tf.Variable(0).assign(np.array(1.5)), TypeError, "wants int32",
    ),
    "verify_shape": (
        lambda: tf.constant([1, 2], shape=[3], verify_shape=True), TypeError, "expected",
    ),
    "to_proto": (
        lambda: tf.train.Saver().to_proto(), AttributeError, r"a Saver .* as_saver_def\(\)",
    ),
    "scope.get_variable": (
        lambda: tf.get_variable_scope().get_variable("v"), AttributeError,
        r"with tf\.variable_scope\(scope\): tf\.get_variable",
    ),
    "js.Saver.restore": (
        lambda: js.Saver().restore({"v": V}, "path"), TypeError,
        r"path first: restore\(path, variables\)",
    ),
    "js.Saver.save": (
        lambda: js.Saver().save("path", {"v": V}), TypeError,
        r"variables first: save\(variables, path\)",
    ),
    "arrays for names": (
        lambda: tf.train.Saver({"v1": V}), TypeError, "arguments of save and restore",
    ),
    "builder": (lambda: tf.train.Saver(builder=1), TypeError, "no argument 'builder'"),
    "a variable as the scope": (
        lambda: tf.all_variables([variable()]), TypeError, "wants a scope",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", REFUSED)
def test_says_what_to_type(form):
    call, error, words = REFUSED[form]
    with pytest.raises(error, match=words):
        run(call)


X, LOGITS = jnp.array([[1.0, -2.0], [3.0, 0.0]]), jnp.array([[1.0, -2.0], [3.0, 0.5]])
#: The arguments, and the result of TensorFlow 2.21's ``tf.compat.v1``.
ADVICE = {
    "add_n": (dict(inputs=[X, X]), 2 * X),
    "cast": (dict(x=X, dtype="int32"), X),
    "fill": (dict(dims=(2,), value=7.0), [7, 7]),
    "floor_div": (dict(x=X, y=2.0), [[0, -1], [1, 0]]),
    "gather_nd": (dict(x=X, indices=jnp.array([[0, 1], [1, 0]])), [-2, 3]),
    "identity": (dict(x=X), X),
    "map_fn": (dict(fn=lambda row: 2 * row, elems=X), 2 * X),
    "range": (dict(start=1, limit=7, delta=2), [1, 3, 5]),
    "rank": (dict(x=X), 2),
    "scatter_nd": (
        dict(shape=(2, 2), indices=jnp.array([[0, 1], [1, 0], [0, 1]]),
             updates=jnp.array([1.0, 2.0, 3.0])),
        [[0, 4], [2, 0]],
    ),
    "sequence_mask": (dict(lengths=jnp.array([1, 2]), maxlen=3), [[1, 0, 0], [1, 1, 0]]),
    "slice": (dict(x=X, begin=(0, 1), size=(2, 1)), [[-2], [0]]),
    "sparse_tensor_to_dense": (
        dict(shape=(2, 2), indices=jnp.array([[0, 1], [1, 0]]),
             values=jnp.array([1.0, 2.0])),
        [[0, 1], [2, 0]],
    ),
    "squared_difference": (dict(x=X, y=LOGITS), [[0, 0], [0, 0.25]]),
    "unsorted_segment_sum": (
        dict(data=X, segment_ids=jnp.array([1, 1]), num_segments=2), [[0, 0], [4, -2]],
    ),
    "nn.in_top_k": (
        dict(predictions=LOGITS, targets=jnp.array([1, 0]), k=1), [False, True],
    ),
    "nn.l2_loss": (dict(x=X), 7),
    "nn.l2_normalize": (dict(x=X.at[1].set(0), axis=1), [[0.4472136, -0.8944272], [0, 0]]),
    "nn.moments": (dict(x=X, axes=0), [[2, -1], [1, 1]]),
    "nn.sigmoid_cross_entropy_with_logits": (
        dict(logits=LOGITS, labels=jnp.array([[1.0, 0.0], [0.25, 0.75]])),
        [[0.31326169, 0.126928], [2.29858732, 0.59907699]],
    ),
    "nn.softmax_cross_entropy_with_logits_v2": (
        dict(logits=LOGITS, labels=jnp.array([[1.0, 0.0], [0.25, 0.75]])),
        [0.04858733, 1.95388985],
    ),
    "nn.sparse_softmax_cross_entropy_with_logits": (
        dict(logits=LOGITS, labels=jnp.array([1, 0])), [3.04858732, 0.07888975],
    ),
    "nn.xw_plus_b": (
        dict(x=X, weights=LOGITS, biases=jnp.array([1.0, 2.0])), [[-4, -1], [4, -4]],
    ),
    "nn.zero_fraction": (dict(x=X), 0.25),
    "train.cosine_decay": (dict(alpha=0.1), 0.11590098),
    "train.exponential_decay": ({}, 0.46201053),
    "train.inverse_time_decay": ({}, 0.29850748),
    "train.natural_exp_decay": ({}, 0.2545782),
    "train.polynomial_decay": (dict(end_rate=0.1, power=2.0), 0.125),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVICE)
def test_what_to_type_gives_what_tensorflow_gives(name):
    arguments, expected = ADVICE[name]
    schedule = dict(rate=0.5, decay_steps=4, decay_rate=0.9)
    home, _, bare = name.rpartition(".")
    with pytest.raises(AttributeError) as caught:
        getattr(getattr(tf, home) if home else tf, bare)
    text = str(caught.value).partition(": ")[2]
    with jax.numpy_rank_promotion("allow"):  # as programs have it
        out = eval(text, {"jax": jax, "optax": optax, **schedule, **arguments})
        out = out(3) if callable(out) else out
    np.testing.assert_allclose(jnp.asarray(out), expected, rtol=1e-5)


def test_a_shape_that_is_a_constant():
    shape = tf.constant([2, 3])
    assert tf.zeros(shape).shape == tf.random_normal(shape, seed=1).shape == (2, 3)
    with pytest.raises(TypeError, match=r"known before tracing.*write the list itself"):
        jax.jit(lambda: tf.zeros(tf.constant([2])))()


def test_under_jit_there_are_no_values():
    model = tf.transform(lambda: (variable().device, variable().eval()))
    with pytest.raises(RuntimeError, match=r"eval\(\) of v_1:0 .*use value\(\)"):
        jax.jit(model.init)(KEY)
    devices = []
    jax.eval_shape(tf.transform(lambda: devices.append(variable().device)).init, KEY)
    jax.eval_shape(lambda slices: devices.append(slices.device), SLICES)
    assert devices == [None, None]


def test_the_saver_of_the_page(tmp_path):
    variables = {"v1": jnp.ones(2), "v2": jnp.zeros(3)}
    saver = tf.train.Saver(
        ["v1"], False, False, 5, 10000.0, None, False, None, None, False, False, 1
    )
    path = saver.save(
        sess=variables, save_path=str(tmp_path / "my-model"), global_step=0,
        latest_filename=None, meta_graph_suffix="meta", write_meta_graph=True,
    )  # fmt: skip
    assert path == str(tmp_path / "my-model-0")
    cleared = jax.tree.map(jnp.zeros_like, variables)
    restored = saver.restore(sess=cleared, save_path=path)
    assert restored["v1"].tolist() == [1, 1]
    assert saver.restore(path, cleared)["v1"].tolist() == [1, 1]  # as js.Saver's
    nothing = tf.train.Saver(allow_empty=True, write_version=tf.train.SaverDef.V2)
    assert nothing.restore({}, str(tmp_path / "empty")) == {}
    assert nothing.save({}, str(tmp_path / "empty")) is None
    assert tf.train.Saver([], allow_empty=True).save(variables, "empty") is None
    assert not (tmp_path / "empty").exists()


def test_a_seed_for_the_whole_program():
    """Initial values and other draws are the same in every run, each of its own."""

    def model():
        tf.set_random_seed(1234)
        v = tf.Variable(tf.random_normal([2]), name="v")
        return [v.value(), tf.random.uniform([2]) + 0, tf.random.uniform([2]) + 0]

    model = tf.transform(model)
    with jax.checking_leaks():
        jax.eval_shape(model.init, KEY)
    first, again = model.apply(model.init(None))[0], model.apply(model.init(KEY))[0]
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert len({tuple(a.tolist()) for a in first}) == 3
    with pytest.raises(RuntimeError, match="set_random_seed was called outside"):
        tf.random.set_seed(1)


@pytest.mark.parametrize(
    "make, dtype",
    [
        (lambda: tf.constant(1.5), "float32"), (lambda: tf.constant([1, 2]), "int32"),
        (lambda: tf.constant(2**40), "int64"), (lambda: tf.Variable(1.5), "float32"),
        (lambda: tf.Variable(lambda: 3), "int32"),
        (lambda: tf.constant(np.ones(2)), "float64"),
        (lambda: tf.Variable(np.ones(2), dtype=tf.float32), "float32"),
        (lambda: tf.convert_to_tensor(np.ones(2), tf.float32), "float32"),
        (lambda: tf.get_variable("a", initializer=0.5, dtype=tf.float32), "float32"),
        (lambda: tf.get_variable("a", [2], initializer=lambda k, s, d: [0.5] * 2),
         "float32"),
        (lambda: tf.get_variable("a", [2], initializer=lambda k, s, d: jnp.full(s, 0.5)),
         "float32"),
        (lambda: tf.Variable([1.0]).assign([1.5]), "float32"),
        (lambda: tf.Variable([1.0]).assign_add(np.array([1.5])), "float32"),
        (lambda: tf.scatter_add(tf.Variable([1.0]), [0], [1.5]), "float32"),
        (lambda: tf.scatter_update(tf.Variable([1]), [0], np.array([2])), "int32"),
        (lambda: tf.matmul([[1.0]], [[2.0]]), "float32"),
        (lambda: tf.zeros_like([1.5]), "float32"),
    ],
)  # fmt: skip
def test_numbers_are_of_32_bits_where_jax_has_64(make, dtype):
    with (
        jax.enable_x64(True)
        if hasattr(jax, "enable_x64")
        else jax.experimental.enable_x64()
    ):
        out = []
        run(lambda: out.append(make().dtype))
        assert set(out) == {np.dtype(dtype)}


def test_dtypes_are_those_of_numpy():
    for theirs, ours in ((jnp.bfloat16, tf.bfloat16), (np.float64, tf.double)):
        dtype = np.dtype(theirs)
        assert ours == dtype == ours and hash(ours) == hash(dtype) and ours == ours.name
        assert np.zeros(2, ours).dtype == dtype == jnp.promote_types(ours, ours)
        assert ours.itemsize == ours.size and pickle.loads(pickle.dumps(ours)) == ours
    assert tf.float64 != None and tf.float32 != "no dtype"  # noqa: E711


ROWS = tf.IndexedSlices([[1.0]], [0], (2, 1))


@pytest.mark.parametrize(
    "cls, apply",
    [
        (tf.ConditionalAccumulator, lambda a: a.apply_grad([[1.0], [0.0]], 0, "name")),
        (tf.SparseConditionalAccumulator,
         lambda a: a.apply_grad([0], [[1.0]], [2, 1], 0, "name")),
        (tf.SparseConditionalAccumulator,
         lambda a: a.apply_indexed_slices_grad(ROWS, local_step=0, name="name")),
    ],
)  # fmt: skip
def test_accumulators(cls, apply):
    accumulator = cls(tf.float32, [2, 1], "shared", "name")
    other = cls(tf.float32, [2, 1], shared_name="shared")
    assert issubclass(cls, tf.ConditionalAccumulatorBase)
    assert accumulator.accumulator_ref is other.accumulator_ref
    accumulator.set_global_step(0, "name")
    apply(accumulator)
    assert accumulator.num_accumulated("name") == 1
    accumulator.take_grad(1, "name")
    if cls is tf.SparseConditionalAccumulator:
        accumulator.apply_grad([1], [[2.0]], local_step=1)
        assert other.take_indexed_slices_grad(1, "name").indices.tolist() == [1]
