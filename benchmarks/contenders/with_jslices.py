"""jslices: rows as gradients, updates of those rows."""

import functools

import jslices as js
from contenders import BAG

VERSION = f"jslices {js.__version__}"


def make(optimizer, num_rows, dim, rate, keep=False, read="gather", **how):
    tx = getattr(js, optimizer)(rate, **how)
    return jitted(js.train_step, tx, num_rows, dim, read)


def rows_of(table, ids, read):
    """The rows of the ids, by one of the programs that read rows, or their sums."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.sparse import BCOO

    if read == "one_hot":
        return jax.nn.one_hot(ids, len(table)) @ table
    if read == "bcoo":
        places = jnp.stack([jnp.arange(len(ids)), ids], axis=1)
        return BCOO((jnp.ones(len(ids)), places), shape=(len(ids), len(table))) @ table
    if read == "bags":
        return js.embedding_lookup_sparse(table, ids.reshape(-1, BAG), None, "sum")
    return js.embedding_lookup(table, ids) if read == "lookup" else table[ids]


def jitted(train_step, tx, num_rows, dim, read="gather"):
    """``train_step(loss, tx)``, jitted, and the state that it is run on."""
    import jax
    import jax.numpy as jnp

    def loss(table, ids):
        return 0.5 / ids.shape[0] * jnp.sum(rows_of(table, ids, read) ** 2)

    step = jax.jit(train_step(loss, tx), donate_argnums=(0, 1))
    return runner(step, tx, num_rows, dim)


def prepare(keep=False, **_):
    if keep:
        js.keep_memory()


def wait(loss):
    loss.block_until_ready()


def runner(step, tx, num_rows, dim):
    """Runs a jitted step of JAX and keeps what it returns."""
    import jax
    import jax.numpy as jnp

    table = jnp.ones((num_rows, dim), jnp.float32)
    held = [table, tx.init(table)]

    def run(ids):
        *held[:], loss = step(*held, ids)
        return loss

    @functools.cache  # the same for all ids of a shape
    def of_shape(shape, dtype):
        ids = jax.ShapeDtypeStruct(shape, dtype)
        analysis = step.lower(*held, ids).compile().memory_analysis()
        return getattr(analysis, "temp_size_in_bytes", None)

    def temporaries(ids):
        return of_shape(ids.shape, ids.dtype)

    run.temporaries = temporaries
    return run, jnp.asarray
