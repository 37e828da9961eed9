"""Arrays that a step writes rows of, and whether its program got them donated.

XLA copies an array that is changed and not donated, a table for the rows of one step.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from jslices._densify import human_bytes
from jslices._jax import identity_primitive, is_staged, is_symbolic
from jslices._place.hints import HINT_BYTES, hint_once
from jslices._typing import Aval, PyTree

#: Whether the caller of a step wants arrays kept.
_KEEPS = contextvars.ContextVar("keeps_arrays", default=False)
#: Marks an array that a step changes, after one that comes before it in the results.
_changed_p = identity_primitive("jslices_changed", passed=1)
#: An argument's attribute: the number of the result that takes its memory.
_ALIAS = "tf.aliasing_output"


@contextlib.contextmanager
def unsaid(keeps: bool) -> Iterator[None]:
    """A context for steps whose arrays are to stay, if so: nothing is said of them."""
    token = _KEEPS.set(keeps or _KEEPS.get())
    try:
        yield
    finally:
        _KEEPS.reset(token)


def changed(tree: PyTree, after: PyTree = ()) -> PyTree:
    """Arrays that a step changes by rows; a large one that was not donated is hinted at.

    In the results they come ``after`` these.
    """
    if _KEEPS.get():
        return tree
    first = [x for x in jax.tree.leaves(after) if _is_large(x)]
    return jax.tree.map(lambda x: _changed(x, first) if _is_large(x) else x, tree)


def _is_large(x: Any) -> bool:
    return isinstance(x, jax.Array) and not is_symbolic(x.size) and x.nbytes > HINT_BYTES


def _changed(x: jax.Array, first: Sequence[jax.Array]) -> jax.Array:
    if not isinstance(x, jax.core.Tracer):
        _hint(x, "outside of jax.jit")
    if not is_staged():
        return x
    alike = (p for p in first if (p.shape, p.dtype) == (x.shape, x.dtype))
    return _changed_p.bind(next(alike, x), x)  # type: ignore[no-any-return]


def _hint(x: Aval, why: str) -> None:
    shape, size = list(x.shape), x.size * x.dtype.itemsize
    hint_once(
        ("undonated", x.shape, x.dtype),
        f"a step writes rows of {x.dtype}{shape} {why}, so that it copies all "
        f"{human_bytes(size)} each time. js.train_step(loss, tx) donates by itself; in a "
        "program of your own type jax.jit(step, donate_argnums=(0, 1)) for step(params, "
        "state, *batch), which returns (params, state, ...) in this order",
    )


def _look(context: Any, first: Any, x: Any) -> list[Any]:
    """Lowering: hint at an argument of the program that is changed and was not donated."""
    named = {op.name.value: op for op in context.module_context.module.body.operations}
    if (main := named.get("main")) is None:
        return [x]
    arguments, attributes = [*main.regions[0].blocks[0].arguments], main.arg_attrs
    alike = [i for i, each in enumerate(arguments) if each.type == x.type]
    own = [i for i in alike if arguments[i] == x] or alike  # else in a loop, or a program
    donated = [_ALIAS in attributes[i] or "jax.buffer_donor" in attributes[i] for i in own]
    if own and x.type in main.type.results and not any(donated):
        _hint(context.avals_in[1], "that its program got undonated")
    pair = [
        attributes[arguments.index(value)] for value in (first, x) if value in arguments
    ]
    results = [each[_ALIAS].value for each in pair if _ALIAS in each]
    if len(results) == 2 and results[0] > results[1]:
        _hint(context.avals_in[1], "donated in another order than that of its results")
    return [x]


mlir.register_lowering(_changed_p, _look, cacheable=False)
