#!/usr/bin/env bash
# pyarrow refuses a cast that loses a bit, and wraps sums of integers.
#
# Versions: pyarrow 26.0.1 on a CPU (x86), Python 3.11.
# Guess: a library that refuses to cast 2^53 + 1 to float64 also refuses, or widens,
#   int8 100 + 100 and a sum above 2^63.
# Seen (2026-11-29): pc.add, pc.abs, pc.power, pc.cumulative_sum and pc.sum of int64
#   wrap in silence; names with _checked raise. pc.sum of int8 widens.
#     pc.add of int8 100 and 100: [-56]
#     pc.abs of int8 -128: [-128]
#     pc.sum of int64 3 * 2^62: -4611686018427387904
#     the cast of 2^53 + 1 to float64 and pc.add_checked: 2 of 2 refused
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "pyarrow==26.0.1"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import pyarrow as pa
import pyarrow.compute as pc

hundred, large = pa.array([100], pa.int8()), pa.array([2**62] * 3)
found = {
    "pc.add of int8 100 and 100": pc.add(hundred, hundred).to_pylist(),
    "pc.abs of int8 -128": pc.abs(pa.array([-128], pa.int8())).to_pylist(),
    "pc.sum of int64 3 * 2^62": pc.sum(large).as_py(),
}
for name, value in found.items():
    print(f"{name}: {value}")
refused = 0
for call in (
    lambda: pa.array([2**53 + 1]).cast(pa.float64()),
    lambda: pc.add_checked(hundred, hundred),
):
    try:
        call()
    except pa.ArrowInvalid:
        refused += 1
print(f"the cast of 2^53 + 1 to float64 and pc.add_checked: {refused} of 2 refused")
assert [*found.values()] == [[-56], [-128], -(2**62)] and refused == 2, "this has changed"
PYTHON
