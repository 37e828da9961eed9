#!/usr/bin/env bash
# Keras' Adam steps an id that repeats differently on TensorFlow than the same gradient dense.
#
# Versions: keras 3.15.1, tensorflow 2.21.0 on a CPU (x86), Python 3.11.
# Guess: IndexedSlices with a repeated id stand for the sum of its entries, so that a
#   step by them is a step by tf.convert_to_tensor of them.
# Seen (2026-11-28): Keras adds the square of each entry to the second moment instead of
#   the square of their sum: Adam, Adagrad, RMSprop and Ftrl differ for ids that repeat;
#   SGD and other ids do not.
#     Adam: id 1, three times, 0.7551, dense 0.7000; id 2 0.7000, 0.7000
#     Adagrad: id 1, three times, 0.8145, dense 0.7735; id 2 0.7789, 0.7789
#     RMSprop: id 1, three times, 0.3976, dense 0.2623; id 2 0.2623, 0.2623
#     Ftrl: id 1, three times, 0.6865, dense 0.6173; id 2 0.4773, 0.4773
#     SGD: id 1, three times, 0.4000, dense 0.4000; id 2 0.7000, 0.7000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "tensorflow==2.21.0" "keras==3.15.1"
cd "$folder"
TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 "$folder/venv/bin/python" - <<'PYTHON'
import keras
import numpy as np
import tensorflow as tf


def row_after(optimizer, dense):
    variable = tf.Variable(tf.ones((3, 1)))
    for _ in range(3):
        values = tf.constant([[1.0], [2.0], [-1.0], [1.0]])
        grad = tf.IndexedSlices(values, tf.constant([1, 1, 1, 2]), tf.constant([3, 1]))
        optimizer.apply_gradients([(tf.convert_to_tensor(grad) if dense else grad, variable)])
    return variable.numpy()[:, 0]


differ = {}
for name in ("Adam", "Adagrad", "RMSprop", "Ftrl", "SGD"):
    make = getattr(keras.optimizers, name)
    rows, dense = row_after(make(0.1), False), row_after(make(0.1), True)
    differ[name] = ~np.isclose(rows, dense, rtol=1e-3)
    print(f"{name}: id 1, three times, {rows[1]:.4f}, dense {dense[1]:.4f}; id 2 {rows[2]:.4f}, {dense[2]:.4f}")
assert not differ.pop("SGD").any(), "this has changed"
assert all(x.tolist() == [False, True, False] for x in differ.values()), "this has changed"
PYTHON
