"""CPU seconds of each test: they depend less on what else runs than seconds of a clock do.

With JSLICES_CPU_SECONDS=file they are written to the file, the dearest test first, and the
run fails if a test that is not marked slow took more than ``MOST``: README's command would
take longer every month.
"""

import os
import pathlib

import pytest

#: Above the 2 s that a test may take on a quiet machine, as two runs differ by a half.
MOST = 3.0


def cpu_seconds():
    """Of this process, its threads, and the processes it has started and waited for."""
    return sum(os.times()[:4])


class CpuSeconds:
    """Each worker of pytest-xdist meters its tests, and the first process adds up."""

    def __init__(self, file):
        self.file = pathlib.Path(file)
        self.all, self.too_long = {}, []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.started = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        now = cpu_seconds()
        report.cpu_seconds, self.started = now - self.started, now
        return report

    def pytest_runtest_logreport(self, report):
        taken = getattr(report, "cpu_seconds", 0.0)  # none where its worker has crashed
        self.all[report.nodeid] = self.all.get(report.nodeid, 0) + taken
        if report.when == "call" and taken > MOST and "slow" not in report.keywords:
            self.too_long.append(f"{report.nodeid} took {taken:.1f} s of CPU")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput"):
            return
        dearest = sorted(self.all.items(), key=lambda test: -test[1])
        self.file.write_text("".join(f"{taken:8.3f} {name}\n" for name, taken in dearest))
        if self.too_long and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        total = sum(self.all.values())
        terminalreporter.write_line(f"{total:.0f} s of CPU, of each test in {self.file}")
        for line in self.too_long:
            terminalreporter.write_line(f"{line}, more than {MOST}: mark it slow", red=True)
