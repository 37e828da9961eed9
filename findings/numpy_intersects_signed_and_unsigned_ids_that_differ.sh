#!/usr/bin/env bash
# np.intersect1d of int64 and uint64 ids finds ids that are not in both, as floats.
#
# Versions: numpy 2.2.6, Python 3.11 (x86).
# Guess: ids of int64 and hashes of uint64 are compared as integers, as == and np.isin
#   do; at worst they do not compare.
# Seen (2026-11-28): np.intersect1d, union1d and concatenate make float64 of them, in
#   which ids above 2^53 run together: neighbours match, and what comes back are no ids
#   any more.
#     isin: [False, False], ==: [False, False]
#     intersect1d: 2 of float64
#     concatenate: float64
#     intersect1d, both uint64: 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np

ids = np.array([2**60 + 1, 2**60 + 3])
hashes = np.array([2**60 + 2], np.uint64)
common = np.intersect1d(ids, hashes)
member = np.isin(ids, hashes)
print(f"isin: {member.tolist()}, ==: {(ids == hashes).tolist()}")
print(f"intersect1d: {len(common)} of {common.dtype}")
print(f"concatenate: {np.concatenate([ids, hashes]).dtype}")
same = np.intersect1d(ids.astype(np.uint64), hashes)
print(f"intersect1d, both uint64: {len(same)}")
assert not member.any() and len(common) and common.dtype == np.float64, "this has changed"
assert not len(same), "this has changed"
PYTHON
