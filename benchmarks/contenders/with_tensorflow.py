"""TensorFlow: IndexedSlices with the optimizers of version 1 and a lazy Adam, or Keras."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

VERSION = f"tensorflow {tf.__version__}, keras {tf.keras.__version__}"


def wait(loss):
    loss.numpy()


def make(optimizer, num_rows, dim, rate, keras):
    table = tf.Variable(tf.ones((num_rows, dim)))
    if keras:
        names = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam"}
        tx = getattr(tf.keras.optimizers, names[optimizer])(rate)
        tx.build([table])
        apply = apply_with(tx, table)
    elif optimizer == "adam":
        apply = lazy_adam(table, rate)
    else:
        names = {"sgd": "GradientDescentOptimizer", "adagrad": "AdagradOptimizer"}
        old = getattr(tf.compat.v1.train, names[optimizer])(rate)
        apply = apply_with(old, table)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, ids)
            loss = 0.5 / tf.cast(tf.shape(ids)[0], tf.float32) * tf.reduce_sum(rows**2)
        apply(tape.gradient(loss, table))
        return loss

    return step, tf.constant


def apply_with(tx, table):
    return lambda grads: tx.apply_gradients([(grads, table)])


def lazy_adam(table, rate, b1=0.9, b2=0.999, eps=1e-8):
    """As ``tfa.optimizers.LazyAdam``, which has no release for this TensorFlow."""
    mean, square = (tf.Variable(tf.zeros_like(table)) for _ in range(2))
    count = tf.Variable(0.0)

    def apply(grads):
        rows, where = tf.unique(grads.indices)
        g = tf.math.unsorted_segment_sum(grads.values, where, tf.shape(rows)[0])
        count.assign_add(1.0)
        size = rate * tf.sqrt(1 - b2**count) / (1 - b1**count)
        m = b1 * tf.gather(mean, rows) + (1 - b1) * g
        v = b2 * tf.gather(square, rows) + (1 - b2) * g**2
        mean.scatter_update(tf.IndexedSlices(m, rows))
        square.scatter_update(tf.IndexedSlices(v, rows))
        table.scatter_sub(tf.IndexedSlices(size * m / (tf.sqrt(v) + eps), rows))

    return apply
