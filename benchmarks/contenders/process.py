"""A contender's process, seen from the outside."""

import json
import os
import pathlib
import subprocess
import sys

from contenders import CONTENDERS, DEVICES

WORKER = pathlib.Path(__file__).parent / "worker.py"


class Contender:
    """A framework: ``start`` it, then ``contender("run", 2, 5)`` sends it an order.

    ``version`` says what it is, or ``missing`` why it cannot take part. ``ours``: whether
    it is jslices; ``whole``: whether its steps pass over the whole table; ``optimizers``:
    those that it has. With ``checkout``
    jslices is imported from there, and the name says "before". ``device`` is a key of
    ``DEVICES``.
    """

    def __init__(self, kind, checkout=None, device="cpu"):
        made = CONTENDERS[kind]
        self.whole, self.optimizers = made.whole, made.optimizers
        self.kind, self.ours = kind, made.module == "with_jslices"
        self.name, self.environment = kind, os.environ | DEVICES[device]
        if checkout:
            self.name = kind.replace("jslices", "before")
            self.environment["PYTHONPATH"] = str(checkout.absolute())
        self.start()
        hello = self("hello")
        self.missing, self.version = hello.get("missing"), hello.get("version")
        self.end()

    def start(self):
        """A new process, whose memory is that of a new one too."""
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), self.kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self.environment,
        )

    def end(self):
        self.process.kill()
        self.process.wait()

    def __call__(self, order, *arguments):
        self.send(order, *arguments)
        return self.answer()

    def send(self, order, *arguments):
        self.process.stdin.write(json.dumps({order: arguments or True}) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.process.wait()}")
        return json.loads(line)
