"""The base of transformations that hold others."""

import functools
from collections.abc import Callable
from typing import Protocol

import jax

from jslices._typing import Gradients, Key, Leaf, Params, PyTree, State, Transformation
from jslices.optim.engine.protocol import GradientTransformation, has_no_rows, is_leaf

#: From a tree that mirrors all parameters (or None) to a held transformation's share.
Share = Callable[[PyTree], PyTree]
#: ``call(tx, share, state) -> (result, state)``: a function of a held transformation.
_Result = tuple[PyTree, State]
Call = Callable[[GradientTransformation, Share, State], _Result]


class Inside(Protocol):
    """How a call of the whole is made of calls of the transformations it holds."""

    def __call__(
        self, call: Call, state: State, params: Params, grads: Gradients = None
    ) -> tuple[PyTree, State]:
        """``(result, state)`` of the whole.

        Args:
          call: to be called for each transformation held, with its share of the trees and
            its part of the state. The result mirrors its share of the parameters.
          state: of the whole.
          params: the parameters, or None.
          grads: gradients, where there are no parameters.
        """


def inside_of(
    tx: GradientTransformation,
    part: Callable[[State], State] = lambda state: state,
    whole: Callable[[State, State], State] = lambda state, part: part,
) -> Inside:
    """Hold one transformation, which sees all parameters.

    Args:
      tx: the transformation.
      part: from a state of the whole to that of ``tx``.
      whole: ``whole(state, part)``, the state of the whole with a new part.
    """

    def inside(
        call: Call, state: State, params: Params, grads: Gradients = None
    ) -> tuple[PyTree, State]:
        del params, grads
        result, new = call(tx, lambda tree: tree, part(state))
        return result, whole(state, new)

    return inside


def wrapped(
    init: Callable[[Params], State],
    inside: Inside,
    *,
    catches_up: bool,
    share_extra_args: bool = False,
    update: Callable[..., tuple[Gradients, State]] | None = None,
    apply: Callable[..., tuple[Params, State]] | None = None,
    catch_up: Callable[[Params, State, PyTree], tuple[Params, State]] | None = None,
    flush: Callable[[Params, State], tuple[Params, State]] | None = None,
    plan: Callable[..., PyTree] | None = None,
    peek: Callable[[Params, State, PyTree], PyTree] | None = None,
    peeks: bool = False,
) -> GradientTransformation:
    """A transformation that holds others: what is not passed follows from these.

    Args:
      init: makes the state.
      inside: how it calls what it holds.
      catches_up: whether any of these does.
      share_extra_args: whether each gets its share of those extra arguments that mirror
        the parameters.
      update: what it does other than calling theirs.
      apply: likewise.
      catch_up: likewise.
      flush: likewise.
      plan: likewise.
      peek: likewise.
      peeks: whether those that catch up can peek as well.
    """

    def update_all(
        grads: Gradients, state: State, params: Params = None, **extra_args: PyTree
    ) -> tuple[Gradients, State]:
        def call(tx: GradientTransformation, share: Share, state: State) -> _Result:
            extra = _shares_of(share, extra_args, share_extra_args)
            return tx.update(share(grads), state, share(params), **extra)

        return inside(call, state, params, grads)

    def apply_all(
        grads: Gradients,
        state: State,
        params: Params,
        key: Key | None = None,
        **extra_args: PyTree,
    ) -> tuple[Params, State]:
        def call(tx: GradientTransformation, share: Share, state: State) -> _Result:
            extra = _shares_of(share, extra_args, share_extra_args)
            return tx.apply(share(grads), state, share(params), key, **extra)

        return inside(call, state, params)

    def catch_up_all(params: Params, state: State, ids: PyTree) -> tuple[Params, State]:
        def call(tx: GradientTransformation, share: Share, state: State) -> _Result:
            return tx.catch_up(share(params), state, share(ids))

        return inside(call, state, params)

    def flush_all(params: Params, state: State) -> tuple[Params, State]:
        call = lambda tx, share, state: tx.flush(share(params), state)  # noqa: E731
        return inside(call, state, params)

    def peek_all(params: Params, state: State, rows: PyTree) -> PyTree:
        def call(tx: GradientTransformation, share: Share, state: State) -> _Result:
            mine = share(rows)
            if not tx.peeks:
                return jax.tree.map(lambda x: None, mine, is_leaf=is_leaf), state
            return tx.peek(share(params), state, mine), state

        return inside(call, state, params)[0]

    def plan_all(grads: Gradients, params: Params, platform: str | None = None) -> PyTree:
        def call(tx: GradientTransformation, share: Share, state: State) -> _Result:
            return tx.plan(share(grads), share(params), platform), state

        return inside(call, jax.eval_shape(init, params), params)[0]

    return GradientTransformation(
        init,
        update or update_all,
        (catch_up or catch_up_all) if catches_up else None,
        (flush or flush_all) if catches_up else None,
        apply or apply_all,
        plan or plan_all,
        (peek or peek_all) if catches_up and peeks else None,
    )


def _shares_of(
    share: Share, extra_args: dict[str, PyTree], shared: bool
) -> dict[str, PyTree]:
    return {
        name: _share_of(share, x) if shared or name == "peeked" else x
        for name, x in extra_args.items()
    }


def _share_of(share: Share, x: PyTree) -> PyTree:
    """The share of what mirrors the parameters; anything else as it is."""
    try:
        return share(x)
    except ValueError:
        return x


def as_transformation(caller: str, tx: Transformation) -> GradientTransformation:
    """A transformation of jslices or of Optax as one of jslices; refuses anything else.

    One of Optax gets zeros for an array into which no gradient comes.
    """
    if isinstance(tx, GradientTransformation):
        return tx
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"{caller} wants transformations (with init and update), got {tx!r}"
        )

    @functools.wraps(tx.update)
    def update(
        grads: Gradients, state: State, params: Params = None, **extra_args: PyTree
    ) -> tuple[Gradients, State]:
        arrays = jax.tree.map(_zeros_for_no_rows, grads, is_leaf=is_leaf)
        return tx.update(arrays, state, params, **extra_args)

    return GradientTransformation(tx.init, update)


def _zeros_for_no_rows(grad: Leaf) -> Leaf:
    return grad.to_dense() if has_no_rows(grad) else grad


def stateless(f: Callable[[Gradients], Gradients]) -> GradientTransformation:
    """The transformation whose updates are ``f(grads)``, and whose state is ``()``."""

    def update(
        grads: Gradients, state: State, params: Params = None
    ) -> tuple[Gradients, State]:
        del params
        return f(grads), state

    return GradientTransformation(lambda params: (), update)


def each_leaf(f: Callable[[Leaf], Leaf]) -> GradientTransformation:
    """The stateless transformation that maps ``f`` over arrays and IndexedSlices."""
    over_present = lambda g: g if g is None else f(g)  # noqa: E731
    return stateless(functools.partial(jax.tree.map, over_present, is_leaf=is_leaf))
