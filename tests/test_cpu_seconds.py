"""The plugin by which CI sees that no test grows too long."""

import types

import pytest
from cpu_seconds import MOST, CpuSeconds


def run_of(plugin, name, *marks, **phases):
    for when, seconds in phases.items():
        report = types.SimpleNamespace(when=when, cpu_seconds=seconds, nodeid=name)
        report.keywords = dict.fromkeys(marks, 1)
        plugin.pytest_runtest_logreport(report)


def session_of(**config):
    return types.SimpleNamespace(config=types.SimpleNamespace(**config), exitstatus=0)


@pytest.mark.parametrize("marks, fails", [((), True), (("slow",), False)])
def test_a_run_fails_by_a_long_test_that_is_not_slow(marks, fails, tmp_path):
    plugin, session = CpuSeconds(tmp_path / "seconds"), session_of()
    run_of(plugin, "test_a", setup=2 * MOST, call=0.5)  # compiles what others read, too
    run_of(plugin, "test_b", *marks, setup=1.0, call=2 * MOST)
    plugin.pytest_sessionfinish(session)
    assert session.exitstatus == fails
    lines = (tmp_path / "seconds").read_text().split("\n")
    assert [line.split() for line in lines] == [
        [f"{2 * MOST + 1:.3f}", "test_b"],
        [f"{2 * MOST + 0.5:.3f}", "test_a"],
        [],
    ]


def test_workers_write_nothing(tmp_path):
    CpuSeconds(tmp_path / "seconds").pytest_sessionfinish(session_of(workerinput={}))
    assert not (tmp_path / "seconds").exists()
