"""A cross-entropy over a large vocabulary that never holds all logits.

    python examples/chunked_cross_entropy.py --tokens 4096 --words 131072

``cross_entropy(hidden, words, targets)`` is the loss of ``softmax(hidden @ words.T)``, for
each of N tokens. Logits ``[N, V]`` are the largest array of a language model, and its
gradient is as large again. Here V is taken in chunks: a pass that keeps the largest logit
and the sum of exponentials of each token, and for the gradients a second one, which makes
each chunk of logits again. Two arrays ``[N, chunk]`` are there at a time; the price is one
matrix product more than three.

The gradient of ``words`` is dense by nature, since every word is in every sum: give
``jslices.value_and_grad`` a ``sparse=`` that says False for it.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np


def plain(hidden, words, targets):
    """The same by logits ``[N, V]``, for comparison."""
    logits = _product(hidden, words.T)
    right = jnp.take_along_axis(logits, targets[:, None] % len(words), axis=1)[:, 0]
    return jnp.where(targets < 0, 0, jax.nn.logsumexp(logits, axis=1) - right)


def _product(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(hidden, words, targets, chunk=4096):
    """The loss of each token, ``[N]`` float32.

    ``hidden`` is ``[N, D]``, ``words`` is ``[V, D]``, both of one dtype; ``targets`` are
    integers ``[N]``, and a negative one has the loss 0 and no gradient. Sums are float32.
    """
    return _forward(hidden, words, targets, chunk)[0]


def _chunks(words, chunk):
    """``(number of chunks, n -> (start, rows, which of them are new))``.

    The last chunk begins early where V is no multiple, and rows that were there are not
    new: no copy of the table is padded.
    """
    chunk = min(chunk, len(words))

    def part(n):
        start = jnp.minimum(n * chunk, len(words) - chunk)
        rows = jax.lax.dynamic_slice_in_dim(words, start, chunk)
        return start, rows, start + jnp.arange(chunk) >= n * chunk

    return -(-len(words) // chunk), part


def _forward(hidden, words, targets, chunk):
    count, part = _chunks(words, chunk)

    def add(n, carry):
        largest, total, right = carry
        start, rows, new = part(n)
        logits = _product(hidden, rows.T)
        column = jnp.clip(targets - start, 0, len(rows) - 1)
        logit = jnp.take_along_axis(logits, column[:, None], axis=1)[:, 0]
        right = jnp.where(targets == start + column, logit, right)
        logits = jnp.where(new, logits, -jnp.inf)
        higher = jnp.maximum(largest, logits.max(axis=1))
        total *= jnp.exp(largest - higher)
        return higher, total + jnp.exp(logits - higher[:, None]).sum(axis=1), right

    zeros = jnp.zeros(len(hidden), jnp.float32)
    carry = zeros - jnp.inf, zeros, zeros
    largest, total, right = jax.lax.fori_loop(0, count, add, carry)
    log_total = largest + jnp.log(total)
    losses = jnp.where(targets < 0, 0, log_total - right)
    return losses, (hidden, words, targets, log_total)


def _backward(chunk, saved, cotangents):
    hidden, words, targets, log_total = saved
    cotangents = jnp.where(targets < 0, 0, cotangents)[:, None]
    count, part = _chunks(words, chunk)

    def add(n, carry):
        of_hidden, of_words = carry
        start, rows, new = part(n)
        p = jnp.exp(_product(hidden, rows.T) - log_total[:, None])
        true = targets[:, None] == start + jnp.arange(len(rows))
        by_logits = (jnp.where(new, p - true, 0) * cotangents).astype(hidden.dtype)
        of_hidden += _product(by_logits, rows)
        of_rows = jax.lax.dynamic_slice_in_dim(of_words, start, len(rows))
        of_rows += _product(by_logits.T, hidden).astype(words.dtype)
        return of_hidden, jax.lax.dynamic_update_slice_in_dim(of_words, of_rows, start, 0)

    start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(words)
    of_hidden, of_words = jax.lax.fori_loop(0, count, add, start)
    return of_hidden.astype(hidden.dtype), of_words, None


cross_entropy.defvjp(_forward, _backward)


def main(arguments=None):
    """Values, gradients, temporaries and times of both, in turns; returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tokens", type=int, default=4096)
    add("--words", type=int, default=131072)
    add("--dim", type=int, default=128)
    add("--chunk", type=int, default=4096)
    add("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (options.tokens, options.dim))
    words = jax.random.normal(keys[1], (options.words, options.dim)) / options.dim**0.5
    targets = jax.random.randint(keys[2], (options.tokens,), 0, options.words)

    def compiled(losses):
        def mean(hidden, words):
            return losses(hidden, words, targets).mean()

        return jax.jit(jax.value_and_grad(mean, (0, 1))).lower(hidden, words).compile()

    steps = {
        "chunks": compiled(functools.partial(cross_entropy, chunk=options.chunk)),
        "plain": compiled(plain),
    }
    temporaries = {n: x.memory_analysis().temp_size_in_bytes for n, x in steps.items()}
    seconds = {name: [] for name in steps}
    for _ in range(options.repeats):
        for name, step in steps.items():
            begin = time.perf_counter()
            jax.block_until_ready(step(hidden, words))
            seconds[name].append(time.perf_counter() - begin)
    results = [step(hidden, words) for step in steps.values()]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(b).max())
    print(
        f"logits of {4 * options.tokens * options.words / 1e6:,.1f} MB; same values, and:"
    )
    for name in steps:
        spent = np.median(seconds[name])
        print(f"{name:>8}: temporaries {temporaries[name] / 1e6:,.1f} MB, {spent:.2f} s")
    return temporaries, seconds


if __name__ == "__main__":
    main()
