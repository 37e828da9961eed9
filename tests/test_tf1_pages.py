"""The programs of TensorFlow's pages, as text in which only the import is changed.

The pages "Variables" (its API and its how-to), "Sparse Variable Updates", ``IndexedSlices``
and ``SparseConditionalAccumulator``, and what articles about IndexedSlices do. Where a page
says ``...`` there is a value. What a page says of the result is asserted after the program.
The page "Sharing Variables" is in test_sharing_variables.py.
"""

import textwrap

import jax
import numpy as np
import pytest

import jslices.tf1 as tf

KEY = jax.random.key(0)

PROGRAMS = {
    "a variable is used like a tensor": """
        # Create a variable.
        w = tf.Variable([[0.5]], name="w")

        # Use the variable in the graph like any Tensor.
        y = tf.matmul(w, [[2.0, 4.0]])

        # The overloaded operators are available too.
        z = tf.sigmoid(w + y)

        # Assign a new value to the variable with `assign()` or a related method.
        w.assign(w + 1.0)
        w.assign_add([[1.0]])

        # Add an Op to initialize all variables.
        init_op = tf.initialize_all_variables()

        assert y.tolist() == [[1, 2]] and w.eval() == 2.5
        assert np.allclose(z, 1 / (1 + np.exp([[-1.5, -2.5]])))
        assert tf.all_variables() == tf.trainable_variables() == [w]
    """,
    "initialization from another variable": """
        # Create two variables.
        weights = tf.Variable(tf.random_normal([784, 200], stddev=0.35),
                              name="weights")
        biases = tf.Variable(tf.zeros([200]), name="biases")
        # Create another variable with the same value as 'weights'.
        w2 = tf.Variable(weights.initialized_value(), name="w2")
        # Create another variable with twice the value of 'weights'
        w_twice = tf.Variable(weights.initialized_value() * 2.0, name="w_twice")
        # Add an op to initialize the variables.
        init_op = tf.initialize_all_variables()

        # Initialize 'v' with a random tensor.
        v = tf.Variable(tf.truncated_normal([10, 40]))
        # The random values are picked only once.
        w = tf.Variable(v.initialized_value() * 2.0)

        assert (w2.eval() == weights.eval()).all() and not biases.eval().any()
        assert (w_twice.eval() == 2 * weights.eval()).all() and 0.3 < weights.eval().std()
        assert (w.eval() == 2 * v.eval()).all() and w.get_shape() == [10, 40]
    """,
    "savers": """
        v1 = tf.Variable(1.0, name='v1')
        v2 = tf.Variable([2.0, 3.0], name='v2')

        # Pass the variables as a dict:
        saver = tf.train.Saver({'v1': v1, 'v2': v2})

        # Or pass them as a list.
        saver = tf.train.Saver([v1, v2])
        # Passing a list is equivalent to passing a dict with the variable op names
        # as keys:
        saver = tf.train.Saver({v.op.name: v for v in [v1, v2]})
        # Add ops to save and restore only 'v2' using the name "my_v2"
        saver = tf.train.Saver({"my_v2": v2})

        sess = {v.op.name: v for v in [v1, v2]}
        # Save the variables to disk.
        save_path = saver.save(sess, directory + "/model.ckpt")
        print("Model saved in file: %s" % save_path)
        for step in range(3):
            # Append the step number to the checkpoint name:
            saver.save(sess, directory + '/my-model', global_step=step)
        # Restore variables from disk.
        sess = saver.restore(sess, directory + "/model.ckpt")

        assert sess["v2"].tolist() == [2, 3]
        assert tf.train.latest_checkpoint(directory) == directory + '/my-model-2'
        assert len(tf.train.get_checkpoint_state(directory).all_model_checkpoint_paths) == 4
    """,
    "scopes": """
        with tf.variable_scope("foo"):
            with tf.variable_scope("bar"):
                v = tf.get_variable("v", [1])
                assert v.name == "foo/bar/v:0"

        with tf.variable_scope("foo"):
            v = tf.get_variable("v", [1])  # v.name == "foo/v:0"
            w = tf.get_variable("w", [1])  # w.name == "foo/w:0"
        with tf.variable_scope("foo", reuse=True):
            v1 = tf.get_variable("v")  # The same as v above.
        assert v1 == v

        with tf.variable_scope("foz") as scope:
            v = tf.get_variable("v", [1])
            scope.reuse_variables()
            v1 = tf.get_variable("v", [1])
        assert v1 == v
    """,
    "constants": """
        value = [0, 1, 2, 3, 4, 5, 6, 7]
        # value = np.array(value)
        # value = value.reshape([2, 4])
        init = tf.constant_initializer(value)
        x = tf.get_variable('fitting', shape=[2, 4], initializer=init)
        y = tf.get_variable('larger', shape=[3, 4], initializer=init)

        assert x.eval().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert y.eval().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [7, 7, 7, 7]]
        assert tf.zeros_initializer([2]).tolist() == [0, 0]
    """,
    "masks": """
        # `a` contains slices at indices [12, 26, 37, 45] from a large tensor
        # with shape [1000, 10]
        a = tf.IndexedSlices(tf.ones([4, 10]), [12, 26, 37, 45], [1000, 10])

        # `b` will be the subset of `a` slices at its second and third indices, so
        # we want to mask its first and last indices (which are at absolute
        # indices 12, 45)
        b = tf.sparse_mask(a, [12, 45])

        assert a.indices.tolist() == [12, 26, 37, 45]
        assert tf.shape(a.values).tolist() == [4, 10]
        assert b.indices.tolist() == [26, 37] and tf.shape(b.values).tolist() == [2, 10]
    """,
    "scatters": """
        ref = tf.Variable(tf.ones([4, 2]), name="ref")
        # Scalar indices, vector indices, high rank indices
        tf.scatter_update(ref, 0, [5.0, 6.0])
        tf.scatter_add(ref, [1, 1], [[1.0, 1.0], [2.0, 2.0]], use_locking=None, name=None)
        tf.scatter_sub(ref, [[2], [3]], [[[1.0, 1.0]], [[2.0, 2.0]]])
        ref.scatter_sub(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])))

        assert ref.eval().tolist() == [[4, 5], [4, 4], [0, 0], [-1, -1]]
    """,
    "an accumulator": """
        accumulator = tf.SparseConditionalAccumulator(
            tf.float32, shape=[5, 1], shared_name=None,
            name='sparse_conditional_accumulator', reduction_type='MEAN')
        accumulator.apply_grad([0, 2], [[1.0], [2.0]], grad_shape=[5, 1], local_step=0)
        accumulator.apply_indexed_slices_grad(
            tf.IndexedSlices(values=[[10.0], [30.0]], indices=[2, 3], dense_shape=[5, 1]))
        assert accumulator.num_accumulated(name=None) == 2
        grad = accumulator.take_indexed_slices_grad(num_required=1, name=None)
        accumulator.set_global_step(new_global_step=7, name=None)

        assert grad.indices.tolist() == [0, 2, 3]
        assert grad.values.tolist() == [[1], [6], [30]]
        assert isinstance(accumulator, tf.ConditionalAccumulatorBase)
    """,
    "slices of a vector": """
        tf.set_random_seed(1234)
        values = tf.constant([1.0, 2.0, 3.0])
        indices = tf.constant([0, 2, 4])
        shape = tf.constant([5])
        slices = tf.IndexedSlices(values=values, indices=indices, dense_shape=shape)
        dense = tf.convert_to_tensor(slices)
        noise = tf.random.uniform(shape=[5], minval=0, maxval=1) * dense
        same = tf.IndexedSlices(slices.values, slices.indices, slices.dense_shape)

        assert dense.tolist() == [1, 0, 2, 0, 3] and np.asarray(noise)[1] == 0
        assert tf.zeros_like(dense).shape == (5,)
        assert tf.convert_to_tensor(same).tolist() == dense.tolist()
    """,
    "a gradient made dense by hand": """
        embeddings = tf.Variable(tf.random.uniform([10, 4], -0.05, 0.05), name="embeddings")
        rows = tf.nn.embedding_lookup(embeddings, tf.constant([[6, 1, 1, 4, 8]]))
        grad = tf.IndexedSlices(tf.ones([5, 4]), tf.constant([6, 1, 1, 4, 8]), [10, 4])
        by_hand = np.zeros((10, 4))
        for row, index in zip(grad.values, grad.indices):
            by_hand[index] += row
        (clipped,), norm = tf.clip_by_global_norm([grad], 1.0)

        assert rows.shape == (1, 5, 4)
        assert (tf.convert_to_tensor(grad) == by_hand).all()
        assert np.isclose(norm, np.linalg.norm(by_hand))
    """,
}
RAISING = {
    "v already exists": """
        with tf.variable_scope("foo"):
            v = tf.get_variable("v", [1])
            v1 = tf.get_variable("v", [1])
            #  Raises ValueError("... v already exists ...").
    """,
    "v does not exist": """
        with tf.variable_scope("foo", reuse=True):
            v = tf.get_variable("v", [1])
            #  Raises ValueError("... v does not exists ...").
    """,
    "Too many elements provided": """
        init = tf.constant_initializer([0, 1, 2, 3, 4, 5, 6, 7])
        x = tf.get_variable('x', shape=[2, 3], initializer=init)
    """,
    r"tf.transform\(fn\); variables = model.init": """
        v = tf.Variable([1, 2])
        init = tf.initialize_all_variables()

        with tf.Session() as sess:
            sess.run(init)
            print(v.eval(sess))
            print(v.eval())
    """,
    "jslices.value_and_grad": """
        v = tf.Variable([[0.,1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8]])
        with tf.GradientTape() as tape:
          r = tf.gather(v, [1,3])
        index_slices = tape.gradient(r,v)
    """,
}


def run(text, **names):
    """Runs a program in ``init`` and in ``apply``."""
    program = compile(textwrap.dedent(text), "page", "exec")
    model = tf.transform(lambda: exec(program, {"tf": tf, "np": np, **names}))
    model.apply(model.init(KEY))


@pytest.mark.filterwarnings("ignore::jslices.DensificationWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_a_page(name, tmp_path):
    run(PROGRAMS[name], directory=str(tmp_path))


@pytest.mark.parametrize("words", RAISING)
def test_a_program_that_raises(words):
    with pytest.raises((ValueError, AttributeError), match=words):
        run(RAISING[words])
