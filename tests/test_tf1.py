"""Whole programs with ``import jslices.tf1 as tf``, and the operations they are made of.

Where tests/golden has TensorFlow's numbers for a program, they are compared. The programs
of the page "Sharing Variables" are in test_sharing_variables.py.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, fast_jit, golden

import jslices as js
import jslices.tf1 as tf

KEY = jax.random.key(0)


def run(fn, *args):
    """What a program returns, and the variables after it."""
    model = tf.transform(fn)
    return model.apply(model.init(KEY, *args), *args)


# --- programs -------------------------------------------------------------------------


@pytest.mark.parametrize("name", golden("seed_model"))
def test_the_published_model_is_trained(name):
    """Embedding, Flatten, Dense(1), mean squared error, SGD 0.1, two steps."""
    case = golden("seed_model")[name]
    data, target, lr = case["data"], case["target"], float(case["lr"])

    def model():
        with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
            names = ("embeddings", "kernel", "bias")
            return [tf.get_variable(n, initializer=tf.constant(case[n])) for n in names]

    def loss(params):
        embeddings, kernel, bias = params
        rows = tf.nn.embedding_lookup(embeddings, data)
        out = rows.reshape(len(data), -1) @ kernel + bias[None]
        return ((out - target) ** 2).mean(), out

    def step():
        variables = model()
        (value, out), grads = js.value_and_grad(loss, has_aux=True)(
            [v.value() for v in variables]
        )
        embeddings, kernel, bias = variables
        assert isinstance(grads[0], tf.IndexedSlices)
        tf.scatter_sub(embeddings, grads[0].indices, lr * grads[0].values)
        kernel.assign_sub(lr * grads[1])
        bias.assign_sub(lr * grads[2])
        return value, out, grads

    program = tf.transform(step)
    variables, apply = fast_jit(lambda: program.init(None))(), fast_jit(program.apply)
    for wanted in case["steps"]:
        (value, out, grads), variables = apply(variables)
        np.testing.assert_allclose(value, wanted["loss"], rtol=1e-5)
        np.testing.assert_allclose(out, wanted["output"], atol=1e-5)
        slices = wanted["grad_embeddings"]["is"]
        np.testing.assert_array_equal(grads[0].indices, slices["indices"])
        np.testing.assert_allclose(grads[0].values, slices["values"], atol=1e-6)
        for key in ("embeddings", "kernel", "bias"):
            after = variables[f"model/{key}"]
            np.testing.assert_allclose(after, wanted[f"{key}_after"], atol=1e-6)


@pytest.mark.slow
def test_word_vectors_with_a_sampled_softmax():
    """The page "Vector Representations of Words", its variables and its loss."""
    vocabulary_size, embedding_size, num_sampled = 50, 4, 8
    words = jnp.array([3, 7, 3, 9])

    def model(train_inputs, train_labels, key):
        embeddings = tf.Variable(
            tf.random_uniform([vocabulary_size, embedding_size], -1.0, 1.0), name="emb"
        )
        softmax_weights = tf.Variable(
            tf.truncated_normal(
                [vocabulary_size, embedding_size], stddev=1.0 / embedding_size**0.5
            ),
            name="weights",
        )
        softmax_biases = tf.Variable(tf.zeros([vocabulary_size]), name="biases")
        embed = tf.nn.embedding_lookup(embeddings, train_inputs)
        return jnp.mean(
            tf.nn.sampled_softmax_loss(
                weights=softmax_weights,
                biases=softmax_biases,
                labels=train_labels,
                inputs=embed,
                num_sampled=num_sampled,
                num_classes=vocabulary_size,
                key=key,
            )
        )

    program, tx = tf.transform(model), js.adagrad(1.0)
    data = words, jnp.array([[7], [3], [9], [3]])

    @fast_jit
    def step(variables, state, key):
        loss, grads = js.value_and_grad(lambda v: program.apply(v, *data, key)[0])(
            variables
        )
        assert all(map(js.is_slices, grads.values()))
        clipped, norm = tf.clip_by_global_norm(list(grads.values()), 5.0, name="clip")
        updates, state = tx.update(grads, state, variables)
        return js.apply_updates(variables, updates), state, loss, norm, clipped

    first = variables = fast_jit(program.init)(KEY, *data, KEY)
    state, losses = tx.init(variables), []
    for i in range(30):
        key = jax.random.fold_in(KEY, i)
        variables, state, loss, norm, clipped = step(variables, state, key)
        losses.append(float(loss))
        assert norm > 0 and js.is_slices(clipped[0])
    assert np.mean(losses[-5:]) < 0.3 * np.mean(losses[:5])
    moved = (first["emb"] != variables["emb"]).any(1)
    assert np.flatnonzero(moved).tolist() == sorted(set(words.tolist()))


@pytest.mark.parametrize("reduction", ["MEAN", "SUM"])
def test_workers_accumulate_sparse_gradients(reduction):
    """Two workers look up rows of one table; the chief takes what they have summed up."""
    script = golden("sparse_conditional_accumulator")[f"base {reduction}"]
    args = tf.float32, (6, 2)
    accumulator = tf.sparse.SparseConditionalAccumulator(*args, reduction_type=reduction)
    assert isinstance(accumulator, tf.SparseConditionalAccumulator)
    for event in script["log"]:
        if event["op"] == "apply_grad":
            grad = tf.IndexedSlices(event["values"], event["indices"], (6, 2))
            accumulator.apply_indexed_slices_grad(grad, event["local_step"])
        elif event["op"] == "take" and isinstance(event["result"], dict):
            wanted = event["result"]["is"]
            taken = accumulator.take_indexed_slices_grad(event["num_required"])
            np.testing.assert_array_equal(taken.indices, wanted["indices"])
            np.testing.assert_allclose(taken.values, wanted["values"], rtol=1e-6)
            break
    else:
        raise AssertionError("the script takes nothing")

    def update():
        table = tf.Variable(tf.ones([6, 2]), name="table")
        return tf.scatter_sub(table, taken.indices, taken.values)

    out, variables = run(update)
    np.testing.assert_allclose(out, 1 - taken.to_dense())
    np.testing.assert_array_equal(variables["table"], out)


def test_a_saver_saves_and_restores(tmp_path):
    """The page of ``tf.train.Saver``, a step number in the name and the latest found."""

    def model():
        v1 = tf.Variable(tf.random_normal([4, 2]), name="v1")
        v2 = tf.Variable(tf.zeros([3]), name="v2")
        return v1.assign_add(tf.ones([4, 2])), tf.assign(v2, [1.0, 2.0, 3.0])

    program = tf.transform(model)
    _, variables = program.apply(program.init(KEY))
    saver = tf.train.Saver(max_to_keep=2)
    for step in range(3):
        path = saver.save(variables, str(tmp_path / "my-model"), global_step=step)
    assert path == tf.train.latest_checkpoint(tmp_path) == str(tmp_path / "my-model-2")
    state = tf.train.get_checkpoint_state(tmp_path)
    assert state.model_checkpoint_path == path and len(saver.last_checkpoints) == 2
    for wanted in (variables, program.abstract_init()):
        restored = saver.restore(wanted, path)
        assert isinstance(restored, tf.Variables)
        jax.tree.map(np.testing.assert_array_equal, restored, variables)
    assert (program.apply(restored)[0][0] == variables["v1"] + 1).all()
    with pytest.raises(tf.errors.NotFoundError):
        tf.train.Saver(["v3"]).restore({"v3": jnp.zeros(3)}, path)


def test_a_saver_takes_handles(tmp_path):
    """``Saver([v1])`` saves that variable; a handle in a tree is saved as its value."""
    path = {}

    def model():
        v1, v2 = tf.Variable(1.0, name="v1"), tf.Variable(2.0, name="v2")
        tree = {"v1": v1, "v2": v2}
        path["one"] = tf.train.Saver([v1]).save(tree, str(tmp_path / "one"))
        path["all"] = tf.train.Saver({"renamed": v2}).save(tree, str(tmp_path / "all"))

    run(model)
    assert tf.train.Saver().restore(None, path["one"]) == {"v1": 1.0}
    assert tf.train.Saver().restore(None, path["all"]) == {"renamed": 2.0}


def test_an_input_queue_ends():
    """``count_up_to`` and ``tf.errors``."""
    program = tf.transform(lambda: tf.count_up_to(tf.Variable(0, name="epoch"), 2))
    variables = program.init(None)
    for wanted in (0, 1):
        out, variables = program.apply(variables)
        assert out == wanted
    with pytest.raises(tf.errors.OutOfRangeError, match="Reached limit of 2: epoch:0"):
        program.apply(variables)


# --- convert_to_tensor ----------------------------------------------------------------


DENSE = {k: v for k, v in golden("to_dense").items() if k in (
    "basic", "duplicates", "empty", "negative_dropped", "rank3")}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_slices_become_a_tensor_with_a_warning(name):
    case = DENSE[name]
    slices = tf.IndexedSlices(case["values"], case["indices"], case["dense_shape"])

    def model():
        with pytest.warns(tf.DensificationWarning) as caught:
            out = tf.convert_to_tensor(slices)
        line = inspect.currentframe().f_lineno - 1
        assert (caught[0].filename, caught[0].lineno) == (__file__, line)
        assert tf.convert_to_tensor_or_indexed_slices(slices) is slices
        assert tf.shape(slices).tolist() == list(out.shape)  # which stays sparse
        return out

    np.testing.assert_allclose(run(model)[0], case["dense"], rtol=1e-6)


def test_convert_to_tensor():
    def model():
        v = tf.Variable([1.5, 2.5], name="v")
        assert tf.convert_to_tensor(v) is v.value()
        stacked = tf.convert_to_tensor([v[0], 3.0])
        return stacked, tf.convert_to_tensor(3), tf.convert_to_tensor([1, 2], tf.float32)

    stacked, three, floats = run(model)[0]
    assert stacked.tolist() == [1.5, 3.0] and three.dtype == tf.int32
    assert floats.dtype == tf.float32 and floats.tolist() == [1, 2]


@pytest.mark.parametrize(
    "convert, error, words",
    [
        (lambda: tf.convert_to_tensor(jnp.ones(2), tf.int32), ValueError,
         r"dtype int32 was requested for a value of float32; cast it: value\.astype"),
        (lambda: tf.convert_to_tensor(tf.IndexedSlices([1.0], [0], (2,)), "int32"),
         ValueError, "int32 was requested"),
        (lambda: tf.convert_to_tensor_or_indexed_slices(
            tf.IndexedSlices([1.0], [0], (2,)), "int32"), ValueError, "int32 was"),
        (lambda: tf.convert_to_tensor(tf.IndexedSlices([1.0], [0])), ValueError,
         "dense_shape"),
        (lambda: tf.convert_to_tensor(1.5, tf.int32), TypeError, "wants int32, got 1.5"),
        (lambda: tf.convert_to_tensor("a"), TypeError, "cannot hold a string"),
        (lambda: tf.shape(tf.IndexedSlices([1.0], [0])), ValueError, "have no dense_shape"),
        (lambda: tf.gather(jnp.ones(3), [0.5]), TypeError, "integer"),
        (lambda: tf.gather(jnp.ones((3, 2)), [0.5], axis=1), TypeError, "integer"),
        (lambda: tf.gather(jnp.ones(3), [0], axis=1), ValueError, "have no axis 1"),
        (lambda: tf.assign(jnp.ones(3), 1), TypeError, "assign wants a Variable, got"),
        (lambda: tf.nn.log_uniform_candidate_sampler([[1]], 1, 2, True, 9), ValueError,
         "got no key; pass key="),
        (lambda: tf.nn.log_uniform_candidate_sampler([1], 1, 2, True, 9, 1), ValueError,
         r"true_classes \[B, num_true=1\], got shape \[1\]"),
        (lambda: tf.nn.embedding_lookup_sparse(
            jnp.ones(3), tf.SparseTensor([[0]], [1], (2,)), None), ValueError,
         r"indices \[K, 2\] and dense_shape \(B, L\), got indices \[1, 1\]"),
    ],
)  # fmt: skip
def test_refusals(convert, error, words):
    with pytest.raises(error, match=words):
        convert()


# --- the operations -------------------------------------------------------------------


SCATTERS = {k: v for k, v in golden("scatter").items() if k in (
    "tail[] dup_vector", "tail[2] rank2_dup", "tail[2] empty")}  # fmt: skip


@pytest.mark.parametrize("name", SCATTERS)
def test_scatters_change_a_variable_and_leave_an_array(name):
    case = SCATTERS[name]
    args = case["indices"], case["updates"]

    def model():
        for verb in case["out"]:
            v = tf.Variable(case["ref"], name=verb)
            out = getattr(tf, verb)(v, *args, use_locking=True, name="op")
            pure = getattr(tf, verb)(case["ref"], *args)
            assert out is v.value() and (pure == out).all()

    variables = run(model)[1]
    for verb, wanted in case["out"].items():
        np.testing.assert_allclose(variables[verb], wanted, rtol=1e-6)


def test_scatter_nd_changes_a_variable():
    def model():
        v = tf.Variable(tf.zeros([2, 3]), name="v")
        tf.scatter_nd_update(v, [[0, 1]], [5.0])
        tf.scatter_nd_add(v, [[0, 1], [1, 9]], [1.0, 7.0])
        tf.scatter_nd_sub(v, [[1]], 1.0)
        w = tf.Variable(tf.zeros([2, 3]), name="w")
        tf.batch_scatter_update(w, [[0], [2]], [[1.0], [2.0]])
        with pytest.raises(ValueError, match="scatter_add to v:0"):
            tf.scatter_add(v, [0], tf.ones([7]))
        return tf.assign_add(w, tf.ones([2, 3])), tf.assign_sub(w, tf.ones([2, 3]))

    (more, same), variables = run(model)
    assert variables["v"].tolist() == [[0, 6, 0], [-1, -1, -1]]
    assert variables["w"].tolist() == [[1, 0, 0], [0, 0, 2]] == same.tolist()
    assert (more == same + 1).all()


def test_gather_has_a_row_gradient():
    cases = golden("gradients")
    x, w = jnp.asarray(cases["_x"]), cases["_w"]
    case = cases["gather_dups: sum(gather(x,[1,1,3]) * w[:3])"]
    grad = fast_jit(js.grad(lambda x: jnp.sum(tf.gather(x, [1, 1, 3]) * w[:3])))(x)
    assert grad.indices.tolist() == case["grad"]["is"]["indices"].tolist()
    assert_close(grad, jnp.asarray(case["dense_grad"]))
    name = next(n for n in cases if n.startswith("gather_axis1"))
    columns = lambda x: tf.gather(x, [2, 2, 0], axis=1)  # noqa: E731
    np.testing.assert_array_equal(columns(x), np.asarray(x)[:, [2, 2, 0]])
    dense = fast_jit(jax.grad(lambda x: jnp.sum(columns(x) * w[:6])))(x)
    np.testing.assert_allclose(dense, cases[name]["dense_grad"], rtol=1e-6)
    assert np.isnan(tf.gather(x, [-1, 3], axis=-1)).all()  # neither wraps nor clamps
    assert tf.gather([[1, 2], [3, 4]], [[1]]).tolist() == [[[3, 4]]]


def test_bags_as_sparse_tensors():
    """``embedding_lookup_sparse`` with TensorFlow's arguments, and its numbers."""
    cases = golden("embedding_lookup_sparse")
    case = cases["contiguous mean weights=w"]
    shape = tuple(int(n) for n in case["shape"])
    ids = tf.SparseTensor(case["indices"], case["ids"], shape)
    weights = tf.SparseTensor(case["indices"], case["weights"], shape)

    def model():
        table = tf.Variable(cases["_params"], name="table")
        return tf.nn.embedding_lookup_sparse(table, ids, weights, "mod", "bags", "mean")

    np.testing.assert_allclose(fast_jit(lambda: run(model)[0])(), case["out"], rtol=1e-5)


def test_clipping_and_masks_take_names_and_variables():
    def model():
        v, w = tf.Variable([3.0, 4.0], name="v"), tf.Variable([0.0], name="w")
        norm = tf.global_norm([v, w, None], name="norm")
        (clipped, _, none), known = tf.clip_by_global_norm([v, w, None], 1.0)
        assert none is None
        cut = tf.clip_by_value(v, 0.0, 3.5, name="c")
        return norm, known, clipped, tf.clip_by_norm(v, 1.0), cut

    given = {"v": jnp.array([3.0, 4.0]), "w": jnp.zeros(1)}
    norm, known, clipped, same, cut = fast_jit(tf.transform(model).apply)(given)[0]
    assert norm == known == 5
    np.testing.assert_allclose(clipped, [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(same, clipped, rtol=1e-6)
    assert cut.tolist() == [3, 3.5]
    case = golden("sparse_mask")["doc"]
    a = case["a"]["is"]
    masked = tf.sparse_mask(tf.IndexedSlices(a["values"], a["indices"]), case["mask"])
    kept = masked.indices[masked.indices < 100]
    assert sorted(kept.tolist()) == sorted(case["out"]["is"]["indices"].tolist())


def test_dtypes_and_modules():
    assert tf.float32 == jnp.float32 and tf.bool == jnp.bool_ and tf.half is tf.float16
    assert tf.zeros([2], tf.int32).dtype == tf.int32 == tf.dtypes.int32
    assert tf.random.normal is tf.random_normal
    assert tf.initializers.zeros is tf.zeros_initializer
    assert tf.global_variables is tf.all_variables
    assert tf.random.log_uniform_candidate_sampler is tf.nn.log_uniform_candidate_sampler
    assert issubclass(tf.train.Saver, js.Saver)
    assert tf.errors.DataLossError is js.errors.DataLossError
    assert tf.zeros(tf.shape(jnp.ones((2, 1)))).shape == (2, 1)
