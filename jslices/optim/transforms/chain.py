"""Transformations one after the other."""

import functools
from typing import Any

import jax

from jslices._grad.untouched import read_update
from jslices._typing import Gradients, Key, Params, PyTree, State, Transformation
from jslices.optim.engine import protocol
from jslices.optim.engine.checks import other_state
from jslices.optim.engine.constructors import combinator
from jslices.optim.engine.now import not_read
from jslices.optim.engine.protocol import GradientTransformation, has_no_rows, is_leaf
from jslices.optim.transforms import base

MOVES_OTHER_ROWS = (
    'beside an optimizer with untouched="exact" this chain moves rows without gradient, or '
    "keeps something of them (weight decay, momentum), and nothing makes up for that in "
    "steps that they miss: type it as arguments of the optimizer, jslices.sgd(rate, "
    'weight_decay=w, untouched="exact"), jslices.sgd(rate, momentum, untouched="exact"), '
    'jslices.adamw(rate, weight_decay=w, untouched="exact"), whose decay is decoupled; or '
    'untouched="lazy"'
)
MUST_BE_LAST = (
    'an optimizer with untouched="exact" must be the last of a chain, as what comes after '
    "it would not apply to the steps that rows have missed (measures, which return the "
    "updates that they got, may come after it); to give some parameters another optimizer: "
    "jslices.optim.partition"
)


@combinator
def chain(*transformations: Transformation) -> GradientTransformation:
    """Runs transformations in turn, each on what the one before it returned.

    As ``optax.chain``, which takes our transformations as well. This one offers the
    ``apply``, ``catch_up`` and ``flush`` of its last transformation as well, and plans.

    Args:
      transformations: of jslices or of Optax. An optimizer with ``untouched="exact"`` must
        be the last: the steps that a row has missed are made up by the optimizer alone,
        and whatever came after it would not apply to them, but for measures, such as
        ``optax.snapshot("norm", js.global_norm)``: they see the updates of the rows that
        the step reads, without the steps that these had missed. Before it may stand what
        leaves rows without gradient alone, as clipping does.

    Returns:
      A :class:`GradientTransformation`; its state is the tuple of theirs.

    Raises:
      TypeError: for anything but a transformation.
      ValueError: in a step, for an exact optimizer that is not the last, or after weight
        decay, momentum and the like.

    Example:
      >>> import jax.numpy as jnp, jslices as js
      >>> tx = js.optim.chain(js.optim.clip(0.5), js.sgd(1.0))
      >>> grads = js.IndexedSlices(jnp.ones((1, 1)), jnp.array([2]), (4, 1))
      >>> updates, state = tx.update(grads, tx.init(jnp.zeros((4, 1))))
      >>> updates.values
      Array([[-0.5]], dtype=float32)

    Source: ``optax.chain``.
    """
    links = [base.as_transformation("chain", tx) for tx in transformations]
    if not links:
        return base.stateless(lambda grads: grads)
    late = [i for i, tx in enumerate(links) if tx.catches_up]
    at = late[0] if late else len(links) - 1
    before, last, measures = links[:at], links[at], links[at + 1 :]

    def init(params: Params) -> State:
        return tuple(tx.init(params) for tx in links)

    def part(state: State) -> State:
        count = len(links)
        if not isinstance(state, tuple) or hasattr(state, "_fields") or len(state) != count:
            raise TypeError(other_state("this chain", state, f"a tuple of {count} states"))
        return state[at]

    def in_turn(
        links: list[GradientTransformation],
        grads: Gradients,
        states: State,
        params: Params,
        **extra_args: PyTree,
    ) -> tuple[Gradients, State]:
        new = []
        for tx, state in zip(links, states, strict=True):
            updates, state = tx.update(grads, state, params, **extra_args)
            # An array without gradient stays one, though Optax's own are given zeros.
            of_one = lambda g, u: g if has_no_rows(g) else u  # noqa: E731
            grads = jax.tree.map(of_one, grads, updates, is_leaf=is_leaf)
            new.append(state)
        return grads, tuple(new)

    harmless: set[Any] = set()  #: trees of gradients whose other rows they leave alone

    def every_link(
        name: str,
        grads: Gradients,
        state: State,
        params: Params = None,
        *key: Key,
        **extra_args: PyTree,
    ) -> tuple[PyTree, State]:
        """``update`` of the links before the last, ``update`` or ``apply`` of that."""
        mine, tree = part(state), jax.tree.structure(grads)
        if any(tx.exact for tx in links) and tree not in harmless:
            of_any_rows = [tx.of_rows() for tx in links[: at + (not last.exact)]]
            if not all(read_update(x, grads, params, extra_args)[1] for x in of_any_rows):
                raise ValueError(MOVES_OTHER_ROWS)
            harmless.add(tree)
        in_turn_before = functools.partial(in_turn, before)
        first = protocol.widening(in_turn_before, key[0] if key else None)
        grads, new = first(grads, state[:at], params, **extra_args)
        result, mine = getattr(last, name)(grads, mine, params, *key, **extra_args)
        if not measures:
            return result, (*new, mine)
        same, more = in_turn(measures, result, state[at + 1 :], params, **extra_args)
        pairs = zip(*(jax.tree.leaves(x, is_leaf) for x in (result, same)), strict=True)
        if any(x is not y for x, y in pairs):
            raise ValueError(MUST_BE_LAST)
        return result, (*new, mine, *more)

    def plan(grads: Gradients, params: Params, platform: str | None = None) -> PyTree:
        """That of the last link which steps a gradient by a plan."""
        plans = [tx.plan(grads, params, platform) for tx in reversed(links)]
        first = lambda *each: next((x for x in each if x is not None), None)  # noqa: E731
        return jax.tree.map(first, *plans, is_leaf=lambda x: x is None)

    whole = lambda state, mine: (*state[:at], mine, *state[at + 1 :])  # noqa: E731
    rest = base.catching_up(last, part, whole)
    update, apply = (functools.partial(every_link, name) for name in ("update", "apply"))
    rest |= {"apply": apply, "of_rows": base.renumbering(chain, *links)}
    if measures:  # of what a step adds: rows catch up before it
        rest |= {"apply": None, "catch_up": not_read(rest["catch_up"])}
    return GradientTransformation(init, update, plan=plan, **rest)
