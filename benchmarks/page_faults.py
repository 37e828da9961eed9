"""Page faults a step on a CPU, of forty programs, each in a process of its own.

The allocator maps large temporaries anew in each step, and the step waits for the faults.
What steps keep by themselves (docs/speed.md) is compared with malloc as it is, and with
``js.keep_memory()``. Counts do not depend on what else runs:

    python benchmarks/page_faults.py
    python benchmarks/page_faults.py --first 5 --how default
"""

import argparse
import os
import resource
import statistics
import sys
import time

#: Of each program V, D, K, the optimizer, and whether ``js.train_step`` makes it; drawn
#: at random.
PROGRAMS = """
44428 16 1000 sgd hand, 53873 8 8192 sgd hand, 73670 8 50000 adam_exact step,
450509 8 78505 adamw hand, 142628 50 8192 sgd hand, 37950 16 100000 adam hand,
16073 64 16384 sgd hand, 134504 64 2581 adamw step, 358473 50 32768 adam step,
31394 16 8192 sgd step, 112303 32 10000 adamw hand, 17223 50 16384 adagrad step,
69726 100 50000 adamw step, 47889 32 100000 adam_exact step, 478559 32 8875 sgd hand,
289947 32 19690 adam_exact step, 271178 100 32768 adam hand, 166662 50 10000 adagrad hand,
62487 128 4096 adam_exact step, 125568 16 50000 adam step, 625000 100 8192 adagrad hand,
22513 16 1000 adam_exact step, 33534 8 50000 adam step, 625000 100 100000 sgd step,
488281 128 80125 adamw step, 62537 50 1610 adam_exact step, 24055 16 2000 adam hand,
16023 64 2000 adam hand, 13823 16 4096 adam step, 160161 50 32768 adam_exact step,
92825 8 16384 adam step, 454685 16 8192 adamw step, 19642 64 50000 adam hand,
246827 32 4096 adam hand, 116194 128 10124 adagrad hand, 409408 128 8192 adagrad step,
51419 8 10000 adam_exact step, 24394 64 32768 adam step, 14490 8 8192 adam hand,
92322 64 32768 adam hand
"""
PAGE = 4096
#: As the environment has it, and what JSLICES_KEEP_MEMORY is then.
HOW = {"malloc": "0", "default": "", "keep_memory": "1"}


def measure(V, D, K, optimizer, by, steps=20):
    """Bytes of temporaries, page faults and milliseconds a step, medians of the last."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jslices as js

    name, _, exact = optimizer.partition("_")
    tx = getattr(js, name)(0.01, **{"untouched": "exact"} if exact else {})
    params, weights = {"table": jnp.ones((V, D))}, jnp.ones(D)
    state = tx.init(params)

    def loss(params, ids):
        return ((params["table"][ids] @ weights - 1) ** 2).mean()

    def by_hand(params, state, ids):
        grads = js.grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return js.apply_updates(params, updates), state

    step = by_hand if by == "hand" else js.train_step(loss, tx)
    rng = np.random.default_rng(0)
    batches = [jnp.asarray(rng.integers(0, V, K), jnp.int32) for _ in range(4)]
    step = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batches[0]).compile()
    count = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt  # noqa: E731
    faults, times = [], []
    for i in range(steps):
        before, start = count(), time.perf_counter()
        params, state, *_ = jax.block_until_ready(step(params, state, batches[i % 4]))
        times.append(1e3 * (time.perf_counter() - start))
        faults.append(count() - before)
    last = steps // 2
    size = step.memory_analysis().temp_size_in_bytes
    return size, statistics.median(faults[last:]), statistics.median(times[last:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, help="programs; all by default")
    parser.add_argument("--how", nargs="+", choices=HOW, default=[*HOW])
    options = parser.parse_args()
    programs = [x.split() for x in PROGRAMS.replace("\n", " ").split(",")][: options.first]
    print(f"{'program':42}{'temporaries':>12}", *(f"{x:>22}" for x in options.how))
    for *sizes, optimizer, by in programs:
        cells = []
        for how in options.how:
            pipe, out = os.pipe()
            if not os.fork():  # JAX is not imported yet
                os.environ["JSLICES_KEEP_MEMORY"] = HOW[how]
                found = measure(*map(int, sizes), optimizer, by)
                os.write(out, " ".join(map(str, found)).encode())
                os._exit(0)
            _, status = os.wait()
            if status:
                sys.exit(f"a process ended with {status}")
            size, faults, ms = map(float, os.read(pipe, 1000).split())
            mapped = "mapped" if faults > size / PAGE / 2 > 15 else ""
            cells.append(f"{faults:6.0f} {ms:7.2f} ms {mapped:6}")
        print(
            f"{' '.join([*sizes, optimizer, by]):42}{size / 2**20:8.2f} MiB",
            *cells,
            flush=True,
        )


if __name__ == "__main__":
    main()
