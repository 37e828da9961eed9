#!/usr/bin/env bash
# tf.clip_by_global_norm to 1 leaves IndexedSlices of a repeated id with norm 1.41.
#
# Versions: tensorflow 2.21.0 on a CPU (x86), Python 3.11.
# Guess: the norm of IndexedSlices is that of the gradient that they stand for, in which
#   entries of one id are added up; clipped to 1 it has the norm 1.
# Seen (2026-11-28): Norms are taken of the raw values: two entries of 1 for one row
#   have the norm 1.41, the row they add up to 2. clip_by_norm does the same, and
#   clip_by_value lets 2 pass.
#     global_norm: of slices 1.414, dense 2.000
#     clip_by_global_norm: norm 1.414
#     clip_by_norm: norm 1.414
#     clip_by_value to [-1, 1]: norm 2.000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "tensorflow==2.21.0"
cd "$folder"
TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 "$folder/venv/bin/python" - <<'PYTHON'
import tensorflow as tf

rows = tf.IndexedSlices(tf.ones((2, 1)), tf.constant([0, 0]), tf.constant([3, 1]))
dense = tf.convert_to_tensor(rows)
norms = [float(tf.linalg.global_norm([grad])) for grad in (rows, dense)]
print(f"global_norm: of slices {norms[0]:.3f}, dense {norms[1]:.3f}")
clipped = {
    "clip_by_global_norm": tf.clip_by_global_norm([rows], 1.0)[0][0],
    "clip_by_norm": tf.clip_by_norm(rows, 1.0),
    "clip_by_value to [-1, 1]": tf.clip_by_value(rows, -1.0, 1.0),
}
after = {name: float(tf.norm(tf.convert_to_tensor(grad))) for name, grad in clipped.items()}
for name, norm in after.items():
    print(f"{name}: norm {norm:.3f}")
assert [round(norm, 2) for norm in norms] == [1.41, 2.0], "this has changed"
assert [round(norm, 2) for norm in after.values()] == [1.41, 1.41, 2.0], "this has changed"
PYTHON
