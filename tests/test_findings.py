"""Scripts in ``findings/`` say what they show, and pin the releases that they install."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent / "findings"
SCRIPTS = sorted(ROOT.glob("*.sh"))

#: The head, the installation in a temporary folder, and the program.
FORM = re.compile(
    r"""#!/usr/bin/env bash
# (?P<title>[^\n]+\.)
#
# Versions: (?P<versions>[^\n]+(?:\n#   [^\n]+)*)
# Guess: (?P<guess>[^\n]+(?:\n#   [^\n]+)*)
# Seen \((?P<date>\d{4}-\d\d-\d\d)\): (?P<seen>[^\n]+(?:\n#   (?! )[^\n]+)*)
(?P<output>(?:#     [^\n]*\n)+)set -euo pipefail
folder=\$\(mktemp -d\)
trap 'rm -rf "\$folder"' EXIT
python3 -m venv "\$folder/venv"
"\$folder/venv/bin/pip" install -q (?P<pins>"[^\n]+"(?: \\\n  "[^\n]+")*)
cd "\$folder"
(?:[A-Z_]+=\S+ (?:\\\n  )?)*"\$folder/venv/bin/python" - <<'PYTHON'
(?P<program>.*)
PYTHON
""",
    re.DOTALL,
)


def parts(script):
    found = FORM.fullmatch(script.read_text())
    assert found, f"{script.name} has another form than the others: see CONTRIBUTING.md"
    return found.groupdict()


def test_there_are_scripts():
    assert len(SCRIPTS) >= 25
    titles = [parts(script)["title"] for script in SCRIPTS]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_says_what_it_shows_and_pins_what_it_installs(script):
    found = parts(script)
    pins = re.findall(r'"([^"]+)"', found["pins"])
    assert pins and all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    releases = dict(pin.split("==") for pin in pins)
    # What the title is about is pinned to the release that the head names.
    stated = re.sub(r"\n#  ", "", found["versions"])
    named = [name for name in releases if re.search(rf"\b{name}\b", stated)]
    assert named and all(f"{releases[name]}" in stated for name in named)
    assert re.search(r"Python\s3\.\d+", stated)
    program = found["program"]
    compile(program, script.name, "exec")
    assert re.search(r"^ *assert ", program, re.MULTILINE) and "print(" in program
    assert "jslices" not in script.read_text()
    assert not re.search(r"\bpip\b|https?://|subprocess", program)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_name_begins_with_whose_surprise_it_is(script):
    library, *what = script.stem.split("_")
    stated = parts(script)["versions"].lower()
    aliases = {"jnp": "jax", "xla": "jaxlib"}
    assert aliases.get(library, library) in stated and len(what) >= 3


def test_the_readme_tells_how_to_run_one():
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"findings/(\w+\.sh)", text)
    assert named and all((ROOT / name).exists() for name in named)
