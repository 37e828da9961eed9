"""Word vectors trained by one chief and several workers, each a process of its own.

    python examples/asynchronous_training.py --workers 2 --kill-one-at 300 --compare

The workers compute row gradients on the parameters that they last read, and send them to
the chief's accumulators. The chief takes the mean of N gradients, where N is the number of
workers, no matter who sent them; it steps, and publishes the new parameters. A gradient
computed on older ones is dropped. Nothing waits for a worker that is slow or dead: a worker
that sees no new parameters for a moment computes another gradient on those that it has.

For workers on other machines: serve at ``"0.0.0.0:5000"`` with certificates, and run
``work`` there with the address, the token and the certificate (docs/workers.md).
"""

import argparse
import functools
import multiprocessing
import threading
import time
from pathlib import Path

import jax
import numpy as np

import jslices as js
from jslices.demo import skipgram
from jslices.demo.skipgram import read_corpus

PATIENCE = 0.01  # seconds that a worker waits for new parameters


class Parameters:
    """The latest parameters, as NumPy arrays, and the step they belong to."""

    def __init__(self, params):
        self._changed = threading.Condition()
        self._latest = 0, jax.tree.map(np.array, params)
        self._done = False

    def publish(self, step, params, done=False):
        with self._changed:
            # A copy: the jitted step will write over its own arrays.
            self._latest = step, jax.tree.map(np.array, params)
            self._done = done
            self._changed.notify_all()

    def read(self, newer_than, timeout):
        """``(step, params)``, waiting a little for newer ones; None when all is done."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._done or self._latest[0] > newer_than, timeout
            )
            return None if self._done else self._latest


def work(index, address, token, options):
    """What a worker does: read, compute, apply, until the chief is done or gone."""
    data = skipgram.make_data(read_corpus(options.text, options.words), options.seed)
    key = jax.random.fold_in(jax.random.key(options.seed + 1), index)

    @jax.jit
    def gradients(params, number):
        batch = skipgram.draw(data, jax.random.fold_in(key, number), options.batch)
        grads = js.grad(skipgram.loss)(params, *batch)
        return jax.tree.map(lambda g: g.coalesce(), grads, is_leaf=js.is_slices)

    chief = js.accumulators.connect(address, token)
    parameters, sums = chief["parameters"], {k: chief[k] for k in ("near", "far")}
    step, number = -1, 0
    try:
        while (latest := parameters.read(step, PATIENCE)) is not None:
            step, params = latest
            for name, grad in gradients(params, number).items():
                sums[name].apply_indexed_slices_grad(grad, local_step=step)
            number += 1
    except ConnectionError:
        print(f"worker {index}: the chief is gone", flush=True)


def take(accumulator, workers, size):
    """The mean of as many gradients as there are workers; waits while a worker lives."""
    while any(worker.is_alive() for worker in workers):
        try:
            return accumulator.take_indexed_slices_grad(len(workers), timeout=1, size=size)
        except TimeoutError:
            pass
    raise SystemExit("all workers are dead")


def train(options, params):
    """What the chief does; the trained parameters."""
    sums = {
        name: js.accumulators.SparseConditionalAccumulator(
            table.dtype, table.shape, name=name
        )
        for name, table in params.items()
    }
    tx = js.adam(options.learning_rate)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state

    parameters, state = Parameters(params), tx.init(params)
    with js.accumulators.serve({**sums, "parameters": parameters}) as server:
        # Not fork: the threads of JAX do not survive one.
        spawn = multiprocessing.get_context("spawn")
        workers = [
            spawn.Process(
                target=work, args=(i, server.address, server.token, options), daemon=True
            )
            for i in range(options.workers)
        ]
        for worker in workers:
            worker.start()
        for step in range(options.steps):
            if step == options.kill_one_at:
                workers[0].kill()
                print(f"step {step}: worker 0 is killed", flush=True)
            # One size for all, so that the update is compiled once.
            grads = {
                name: take(accumulator, workers, size=len(params[name]))
                for name, accumulator in sums.items()
            }
            params, state = update(params, state, grads)
            parameters.publish(step + 1, params, done=step + 1 == options.steps)
        for worker in workers:
            worker.join(timeout=10)
    stale = ", ".join(f"{a.num_stale()} of {name}" for name, a in sums.items())
    print(f"stale gradients dropped: {stale}")
    return params


def train_alone(options, params):
    """The same number of steps in one process, on batches as large as all workers'."""
    batch = options.batch * options.workers
    data = skipgram.make_data(read_corpus(options.text, options.words), options.seed)
    tx, step = skipgram.sparse_step(options.learning_rate, batch, "lazy")
    state, key = tx.init(params), jax.random.key(options.seed + 1)
    for _ in range(options.steps):
        params, state, _ = step(params, state, data, key)
    return params


def quality(options, params):
    """The mean loss on pairs that are the same in every process."""
    data = skipgram.make_data(read_corpus(options.text, options.words), options.seed)
    keys = jax.random.split(jax.random.key(options.seed + 2), 20)
    loss = jax.jit(lambda key: skipgram.loss(params, *skipgram.draw(data, key, 1024)))
    return float(np.mean([loss(key) for key in keys]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--text", type=Path, help="a file or folder (default: Python's own library)")
    add("--words", type=int, default=2000, help="the most frequent words")
    add("--dim", type=int, default=32)
    add("--steps", type=int, default=1000)
    add("--batch", type=int, default=512, help="windows of one worker")
    add("--workers", type=int, default=2)
    add("--learning-rate", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    add("--kill-one-at", type=int, metavar="STEP", help="kill a worker at this step")
    add("--compare", action="store_true", help="train in one process as well")
    options = parser.parse_args()

    def start():
        return skipgram.init_params(options.words, options.dim, options.seed)

    print(f"loss before: {quality(options, start()):.4f}")
    begin = time.perf_counter()
    params = train(options, start())
    spent = time.perf_counter() - begin
    print(
        f"loss of {options.workers} workers: {quality(options, params):.4f} "
        f"({options.steps} steps, {spent:.0f} s)"
    )
    if options.compare:
        print(f"loss of one process: {quality(options, train_alone(options, start())):.4f}")


if __name__ == "__main__":
    main()
