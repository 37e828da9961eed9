"""One contender in a process of its own: orders come as lines of JSON, answers go back so.

{"hello": true}                         -> {"version": words}, or {"missing": why}
{"load": [optimizer, rows, dim]}        -> {}
{"ids": [count, kind]}                  -> {"first": seconds}, of the first step with them
{"temporaries": true}                   -> {"bytes": as its compiler tells, or null}
{"run": [warm, timed, several]}         -> {"seconds": [...]}, of one step
{"peak": true}                          -> {"bytes": beyond what was there and the state,
                                            null on a GPU}
"""

import importlib
import json
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from contenders import CONTENDERS, RATE, STATE_ARRAYS, on_gpu
from contenders.ids import batches


def status(key):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text.split(f"{key}:")[1].split()[0]) * 1024


class Worker:
    def __init__(self, name):
        kind = CONTENDERS[name]
        self.arguments = kind.arguments
        self.framework = importlib.import_module(f"contenders.{kind.module}")
        if hasattr(self.framework, "prepare"):
            self.framework.prepare(**self.arguments)

    def hello(self, _):
        return {"version": self.framework.VERSION}

    def load(self, optimizer, rows, dim):
        self.expected = status("VmRSS") + rows * dim * 4 * (1 + STATE_ARRAYS[optimizer])
        self.rows = rows
        self.step, self.convert = self.framework.make(
            optimizer, rows, dim, RATE, **self.arguments
        )
        return {}

    def ids(self, count, kind):
        self.given = [self.convert(x) for x in batches(self.rows, count, kind)]
        self.number = 0
        start = time.perf_counter()
        self.framework.wait(self.step(self.given[0]))
        first = time.perf_counter() - start
        for _ in range(3):
            self.run(1, 0, 1)
        try:  # from here on the peak is that of the steps
            pathlib.Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.expected = None
        return {"first": first}

    def temporaries(self, _):
        analysis = getattr(self.step, "temporaries", lambda ids: None)
        return {"bytes": analysis(self.given[0])}

    def run(self, warm, timed, several):
        """Times ``several`` steps together, as a training loop runs them."""
        seconds = []
        for _ in range(warm + timed):
            start = time.perf_counter()
            for _ in range(several):
                self.number += 1
                loss = self.step(self.given[self.number % len(self.given)])
            self.framework.wait(loss)
            seconds.append((time.perf_counter() - start) / several)
        return {"seconds": seconds[warm:]}

    def peak(self, _):
        known = self.expected is not None and not on_gpu()
        return {"bytes": status("VmHWM") - self.expected if known else None}


def main():
    # What frameworks print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(what):
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        worker = Worker(sys.argv[1])
    except ImportError as error:
        sys.stdin.readline()
        return answer({"missing": str(error)})
    for line in sys.stdin:
        ((order, arguments),) = json.loads(line).items()
        arguments = arguments if isinstance(arguments, list) else [arguments]
        answer(getattr(worker, order)(*arguments))


if __name__ == "__main__":
    main()
