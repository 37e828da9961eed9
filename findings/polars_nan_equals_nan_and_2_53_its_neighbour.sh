#!/usr/bin/env bash
# In polars NaN equals NaN, and an int64 of 2^53 + 1 equals the float 2^53.
#
# Versions: polars 2.1.0 on a CPU (x86), Python 3.11.
# Guess: comparisons are those of IEEE, as in NumPy: NaN equals nothing; and integers
#   are compared exactly with floats, as in Python, or refused.
# Seen (2026-11-29): NaN == NaN is true, a maximum steps over NaN, and the integer is
#   rounded to float64 before it is compared.
#     NaN == NaN: [True], the largest of 1 and NaN: 1.0
#     2^53 + 1 == 2.0^53: [True], in Python: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "polars==2.1.0"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import polars as pl

nan = pl.Series([float("nan")])
equal = (nan == nan).to_list()
largest = pl.Series([1.0, float("nan")]).max()
near = (pl.Series([2**53 + 1]) == pl.Series([float(2**53)])).to_list()
print(f"NaN == NaN: {equal}, the largest of 1 and NaN: {largest}")
print(f"2^53 + 1 == 2.0^53: {near}, in Python: {2**53 + 1 == float(2**53)}")
assert equal == near == [True] and largest == 1.0, "this has changed"
PYTHON
