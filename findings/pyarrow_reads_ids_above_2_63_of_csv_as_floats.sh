#!/usr/bin/env bash
# pyarrow reads a CSV column of ids as float64 once one of them is above 2^63.
#
# Versions: pyarrow 26.0.1 on a CPU (x86), Python 3.11.
# Guess: ids of 64 bits without a sign, as hashes are, become uint64, which Arrow has;
#   or the file is refused.
# Seen (2026-11-29): The column becomes double, and all ids above 2^53 are rounded, so
#   that neighbours are one. One id decides for all. column_types= keeps them.
#     by itself: double, 2 distinct ids of 3
#     with column_types: uint64, 3 distinct ids of 3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "pyarrow==26.0.1"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import io

import pyarrow as pa
from pyarrow import csv

text = b"id\n18446744073709551615\n9007199254740993\n9007199254740992\n"
options = csv.ConvertOptions(column_types={"id": pa.uint64()})
found = {}
for name, convert in {"by itself": None, "with column_types": options}.items():
    column = csv.read_csv(io.BytesIO(text), convert_options=convert)["id"]
    found[name] = str(column.type), len(set(column.to_pylist()))
    print(f"{name}: {found[name][0]}, {found[name][1]} distinct ids of 3")
assert found == {"by itself": ("double", 2), "with column_types": ("uint64", 3)}, "this has changed"
PYTHON
