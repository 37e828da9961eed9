#!/usr/bin/env bash
# Vowpal Wabbit takes the names 3 and 003 for one feature, and numbers of two namespaces for neighbours.
#
# Versions: vowpalwabbit 9.11.9 on a CPU (x86), Python 3.11.
# Guess: a feature's name is hashed: 3, 03 and 003, as product codes, are three
#   features, at random places.
# Seen (2026-11-29): A name of digits alone is its number, added to the hash of the
#   namespace. 3.0 and -3 are names.
#     indices without a namespace: {'3': 3, '03': 3, '003': 3, '3.0': 74820, '-3': 190767, 'x3': 46944}
#     of 3, 4 and 003 in the namespace item, above its hash: [3, 4, 3]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "vowpalwabbit==9.11.9"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
from vowpalwabbit import Workspace

model = Workspace("--quiet --bit_precision 18")
found = {name: model.hash_feature(name, 0) for name in ("3", "03", "003", "3.0", "-3", "x3")}
print(f"indices without a namespace: {found}")
space = model.hash_space("item")
near = [(model.hash_feature(name, space) - space) % 2**18 for name in ("3", "4", "003")]
print(f"of 3, 4 and 003 in the namespace item, above its hash: {near}")
assert found["3"] == found["03"] == found["003"] == 3 and near == [3, 4, 3], "this has changed"
assert 3 not in (found["3.0"], found["-3"], found["x3"]), "this has changed"
PYTHON
