#!/usr/bin/env bash
# A slice of a safetensors file that ends behind the last row is an error, and so is one from the end.
#
# Versions: safetensors 0.8.0, numpy 2.2.6 on a CPU (x86), Python 3.11.
# Guess: get_slice(name)[4:100] of six rows are the last two, as of an array: what reads
#   a table by blocks needs no other last block; [-2:] likewise.
# Seen (2026-11-29): [4:100] is out of bounds and [-2:] cannot be converted, though [-1]
#   is the last row. load_file gives the tensors by the width of their dtype, the widest
#   first, not as saved.
#     rows 0 to 5, [4:6]: [4.0, 5.0]
#     rows 0 to 5, [4:100]: SafetensorError
#     rows 0 to 5, [-2:]: OverflowError
#     rows 0 to 5, [-1]: [5.0]
#     saved as z, a, m; loaded as m, z, a
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "safetensors==0.8.0" "numpy==2.2.6"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

rows = np.arange(6.0, dtype=np.float32)[:, None]
save_file({"z": rows, "a": rows.astype(np.int8), "m": rows.astype(np.float64)}, "rows.safetensors")


def read(index):
    with safe_open("rows.safetensors", "np") as file:
        try:
            return file.get_slice("z")[index].ravel().tolist()
        except (SafetensorError, OverflowError) as error:
            return type(error).__name__


found = [read(x) for x in (slice(4, 6), slice(4, 100), slice(-2, None), -1)]
for code, value in zip(["[4:6]", "[4:100]", "[-2:]", "[-1]"], found):
    print(f"rows 0 to 5, {code}: {value}")
names = [*load_file("rows.safetensors")]
print(f"saved as z, a, m; loaded as {', '.join(names)}")
assert found == [[4.0, 5.0], "SafetensorError", "OverflowError", [5.0]], "this has changed"
assert names == ["m", "z", "a"], "this has changed"
PYTHON
