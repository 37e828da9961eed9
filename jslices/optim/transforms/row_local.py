"""Finding out whether a transformation treats each row by itself, by trying it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices._slices import IndexedSlices, is_slices

#: Rows of the table that is tried, and which of them get a gradient.
HEIGHT, TOUCHED = 7, (1, 4)


def refuse_mixing(
    tx: Any, lifted: Callable[..., Any], grads: Sequence[Any], tree: Any
) -> None:
    """Refuses a transformation that is not the same on rows as on the whole array.

    It is tried on tables of a few rows: on the dense gradient of two of them, and, lifted,
    on these rows alone.

    Args:
      tx: the transformation.
      lifted: its ``update`` on IndexedSlices.
      grads: the gradients that came, for their kinds, shapes and dtypes.
      tree: their structure.

    Raises:
      ValueError: if the updates of the two rows differ.
    """
    try:
        with jax.ensure_compile_time_eval():
            difference = float(jax.jit(lambda: _difference(tx, lifted, grads, tree))())
    except (ArithmeticError, TypeError, ValueError, IndexError, KeyError):
        return  # It does not run on tables this small, which says nothing.
    if difference > 1e-3:
        raise ValueError(
            "from_optax: this transformation does not treat each row by itself. On a "
            f"table of {HEIGHT} rows, {len(TOUCHED)} of them with a gradient, its updates "
            f"differ by {difference:.0%} from those it makes of these rows alone. Trust "
            "ratios, norms of parameters, means over an array, factored moments and noise "
            "do that: use jslices.lamb or jslices.adafactor, or give it dense gradients "
            "(sparse=False)"
        )


def _difference(
    tx: Any, lifted: Callable[..., Any], grads: Sequence[Any], tree: Any
) -> jax.Array:
    rng = np.random.default_rng(0)

    def random(shape: Sequence[int], dtype: Any) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    columns: list[tuple[Any, Any, Any, Any]] = []
    for g in grads:
        if g is None:
            columns.append((random((), jnp.float32), None, None, None))
            continue
        by_row = is_slices(g)
        shape = tuple(min(n, HEIGHT) for n in g.shape)
        shape = (HEIGHT, *g.values.shape[1:]) if by_row else shape
        param, before, now = (random(shape, g.dtype) for _ in range(3))
        rows: Any = now
        if by_row:
            touched = jnp.array(TOUCHED)
            rows = IndexedSlices(now[touched], touched, shape)
            now = rows.to_dense()
        columns.append((param, before, now, rows))
    params, before, whole, rows = map(tree.unflatten, zip(*columns, strict=True))
    _, state = tx.update(before, tx.init(params), params)
    wanted, got = tx.update(whole, state, params)[0], lifted(rows, state, params)[0]
    worst = jnp.zeros(())
    for u, w in zip(tree.flatten_up_to(got), tree.flatten_up_to(wanted), strict=True):
        if is_slices(u):
            u, w = u.values, w[u.indices]
        if u is not None and jnp.issubdtype(u.dtype, jnp.floating):
            gap = jnp.max(jnp.abs(u - w)) / (jnp.max(jnp.abs(w)) + 1e-30)
            worst = jnp.maximum(worst, gap.astype(worst.dtype))
    return worst
