"""The README is true: its code runs, its commands are two, its names are public."""

import pathlib
import re

import jslices as js

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def test_code_runs_from_top_to_bottom():
    namespace = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)


def test_is_short_and_has_two_commands():
    assert len(README.splitlines()) < 150
    install, test = blocks("sh")
    assert "-m jslices demo" in install and "-m pytest" in test
    assert len((install + test).splitlines()) == 2


def test_table_of_names_is_what_is_public():
    table = README[README.index("| area | names |") : README.index("## What it means")]
    named = set(re.findall(r"`(\w+)`", table))
    public = {name for name in vars(js) if not name.startswith("_")} - {"optim"}
    assert named == public


def test_numbers_are_filled_in():
    assert not re.search(r"GAIN_|TODO|XXX", README)
