"""The README is true: its code runs, and its commands are two."""

import pathlib
import re

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


def test_numbers_are_filled_in():
    assert not re.search(r"GAIN_|TODO|XXX", README)


def test_contributing_is_short_and_its_picture_is_of_this_house():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) <= 120
    folders = ["jslices"]
    for line in re.findall(r"^```\njslices/\n(.*?)^```", text, re.M | re.S)[0].splitlines():
        name, depth = line.split()[0], (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        assert ROOT.joinpath(*folders).exists(), name
