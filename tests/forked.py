"""Processes that start at once, forked from one that has imported what they need.

    python tests/forked.py MODULE

For each order, a line of JSON, that process forks another, which calls a function of the
module and ends as any process does.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time


class Origin:
    """The process that the others are forked from."""

    def __init__(self, module):
        found = os.pathsep.join([os.path.dirname(__file__), os.getcwd(), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, __file__, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": found},
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.communicate()

    def ask(self, order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    @contextlib.contextmanager
    def forked(self, function, environment=None, /, **arguments):
        """A process that calls a function of the module, until the end of the block."""
        with (
            tempfile.NamedTemporaryFile("r") as out,
            tempfile.NamedTemporaryFile("r") as errors,
        ):
            files = out.name, errors.name
            order = [function, arguments, environment or {}, *files]
            process = Forked(self, self.ask(order), out, errors)
            try:
                yield process
            finally:
                process.kill()


class Forked:
    """A process, and what it prints.

    Attributes:
      id: of the process.
    """

    def __init__(self, origin, id_, out, errors):
        self.id = id_
        self._origin, self._code, self._out, self._errors = origin, None, out, errors

    def has_ended(self):
        if self._code is None:
            self._code = self._origin.ask(self.id)
        return self._code is not None

    def wait(self, timeout):
        """The exit code, as ``subprocess`` has it, in so many seconds."""
        end = time.monotonic() + timeout
        while not self.has_ended():
            assert time.monotonic() < end
            time.sleep(0.01)
        return self._code

    def kill(self):
        if not self.has_ended():
            os.kill(self.id, signal.SIGKILL)
            self.wait(60)

    def lines(self):
        """What it has printed so far, without a line that is not complete."""
        self._out.seek(0)
        return [x for x in self._out.read().splitlines(keepends=True) if x[-1] == "\n"]

    def errors(self):
        self._errors.seek(0)
        return self._errors.read()


def main(module):
    functions = importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what was imported stays: a forked process neither visits nor copies it
    for line in sys.stdin:
        order = json.loads(line)
        if isinstance(order, int):  # what became of a process
            process, status = os.waitpid(order, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if process else None
        else:
            answer = os.fork()
            if not answer:
                function, arguments, environment, *files = order
                os.environ.update(environment)
                for descriptor, path in enumerate(files, 1):
                    os.dup2(os.open(path, os.O_WRONLY), descriptor)
                return getattr(functions, function)(**arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
