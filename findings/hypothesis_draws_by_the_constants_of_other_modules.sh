#!/usr/bin/env bash
# Examples of a derandomized test change with a number in a module that it does not name.
#
# Versions: hypothesis 6.170.17, Python 3.11 (x86).
# Guess: with derandomize=True the examples of a test follow from the test alone, so that a
#   suite that passed draws the same ones until a test or Hypothesis changes.
# Seen (2026-11-29): Hypothesis collects the constants in the source of the local modules
#   that are imported, and draws them now and then: with another number in one of them, which
#   no test reads, the examples are others, and a test that passed for months may fail.
#     with LIMIT = 123456789: 1000 examples, drawn itself
#     with LIMIT = 987654321: 1000 examples, drawn itself
#     the same examples: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "hypothesis==6.170.17"
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import os
import pathlib

PROGRAM = """
from hypothesis import given, settings, strategies as st
import limits

drawn = []

@settings(derandomize=True, database=None, max_examples=1000)
@given(st.integers())
def test(x):
    drawn.append(x)

test()
print(len(drawn), limits.LIMIT in drawn, hash(tuple(drawn)))
"""
pathlib.Path("program.py").write_text(PROGRAM)
found = []
for limit in (123456789, 987654321):
    pathlib.Path("limits.py").write_text(f"LIMIT = {limit}\n")
    count, own, examples = os.popen(f"{os.sys.executable} -B program.py").read().split()
    print(f"with LIMIT = {limit}: {count} examples, drawn {'itself' if own == 'True' else 'not'}")
    found.append((own, examples))
same = found[0][1] == found[1][1]
print(f"the same examples: {same}")
assert [own for own, _ in found] == ["True", "True"] and not same, "this has changed"
PYTHON
