"""Functions that use variables as pure functions of explicit state."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jslices._typing import PyTree
from jslices.tf1._arrays import is_array
from jslices.tf1._draws import LazyValue
from jslices.tf1._names import bare_name
from jslices.tf1._run import Run, running
from jslices.tf1._state import Value, Variables
from jslices.tf1._variable import Variable


class Transformed(NamedTuple):
    """The pure functions that :func:`jslices.tf1.transform` returns.

    Attributes:
      init: ``init(key, *args, **kwargs) -> variables``, the initial values, whatever the
        function assigns. ``key`` may be None if nothing is random.
      apply: ``apply(variables, *args, **kwargs) -> (out, variables)``, what the function
        returns, and the variables (any mapping of name -> array) after its assignments.
      abstract_init: ``abstract_init(key, *args, **kwargs) -> variables``, declared only, by
        ``jax.ShapeDtypeStruct``, as arguments may be too. The key may be omitted.
    """

    init: Callable[..., Variables]
    apply: Callable[..., tuple[Any, Variables]]
    abstract_init: Callable[..., Variables]


def transform(fn: Callable[..., Any]) -> Transformed:
    """Turn a function that creates, reads and assigns variables into pure functions.

    Write ``fn`` as in TensorFlow: with ``get_variable``, ``variable_scope``, ``Variable``,
    ``assign``. The results are ordinary pure functions for ``jax.jit`` (with the variables
    donated), ``jax.grad`` or :func:`jslices.value_and_grad`, which gives IndexedSlices for
    a table that is only looked up. The calls are resolved while JAX traces, and cost
    nothing at run time.

    ``fn`` has to create the same variables whenever it runs, and to return no handle.

    Raises:
      ValueError: from ``apply``, for a variable that is missing or has another shape,
        naming it; or if ``fn`` returns a handle.

    Example:
      >>> import functools, jax, jax.numpy as jnp, jslices as js, jslices.tf1 as tf
      >>> def model(ids):
      ...     table = tf.get_variable("table", [1000, 8])
      ...     tf.Variable(0, name="steps", trainable=False).assign_add(1)
      ...     return jnp.sum(js.embedding_lookup(table, ids) ** 2)
      >>> model, tx, ids = tf.transform(model), js.adam(1e-2), jnp.array([3, 9, 3])
      >>> def loss(params, rest, ids):
      ...     out, variables = model.apply(params | rest, ids)
      ...     return out, variables.non_trainable
      >>> @functools.partial(jax.jit, donate_argnums=(0, 1))
      ... def step(variables, state, ids):
      ...     params, rest = variables.trainable, variables.non_trainable
      ...     (out, rest), grads = js.value_and_grad(loss, has_aux=True)(params, rest, ids)
      ...     assert js.is_slices(grads["table"])
      ...     params, state = tx.apply(grads, state, params)
      ...     return params | rest, state, out
      >>> variables = model.init(jax.random.key(0), ids)
      >>> variables, state, out = step(variables, tx.init(variables.trainable), ids)
      >>> variables
      Variables(table: float32[1000, 8], steps: int32[] not trainable)

    Source: Haiku's ``transform``, for TensorFlow's graph and session. Haiku keeps state
    apart; here ``trainable`` says what is differentiated.
    """
    if not callable(fn):
        raise TypeError(f"transform wants a function, got {type(fn).__name__}")

    def init(key: jax.Array | None, *args: Any, **kwargs: Any) -> Variables:
        if not _is_key(key):
            raise TypeError(
                f"init wants a PRNG key first: init(jax.random.key(0), *args); got {key!r}"
            )
        with running(Run(key)) as run:
            fn(*args, **kwargs)
            return run.initial_state()

    def apply(
        variables: Mapping[str, Value], *args: Any, **kwargs: Any
    ) -> tuple[Any, Variables]:
        if not isinstance(variables, Mapping):
            raise TypeError(
                "apply wants the variables first: apply(variables, *args), with a mapping "
                f"of name -> array such as init returns; got {type(variables).__name__}"
            )
        if not isinstance(variables, Variables):
            variables = {bare_name(name): value for name, value in variables.items()}
        with running(Run(passed=variables)) as run:
            return _arrays_only(fn(*args, **kwargs)), run.final_state()

    def abstract_init(*args: Any, **kwargs: Any) -> Variables:
        if args and _is_key(args[0]):
            args = args[1:]
        # Only arrays become abstract: a flag or a number decides as in init.
        leaves, structure = jax.tree.flatten((args, kwargs))
        arrays = {i: x for i, x in enumerate(leaves) if is_array(x)}

        def init_of_arrays(arrays: dict[int, jax.Array]) -> Variables:
            merged = [arrays.get(i, x) for i, x in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(structure, merged)
            return init(jax.random.key(0), *args, **kwargs)

        return jax.eval_shape(init_of_arrays, arrays)  # type: ignore[no-any-return]

    return Transformed(init, apply, abstract_init)


def _is_key(x: Any) -> bool:
    """True for a PRNG key of the new or of the old kind, and for None."""
    if x is None or not is_array(x):
        return x is None
    old = x.dtype == np.uint32 and tuple(x.shape) in ((2,), (4,))
    return old or bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _arrays_only(out: PyTree) -> PyTree:
    """``out`` with arrays for lazy values; handles in it are refused."""
    is_handle = lambda x: isinstance(x, LazyValue | Variable)  # noqa: E731
    leaves, tree = jax.tree.flatten(out, is_leaf=is_handle)
    names = [x.name for x in leaves if isinstance(x, Variable)]
    if names:
        raise ValueError(
            f"the function returned the Variable {', '.join(names)} itself, which is of no "
            "use outside of it: the handle would leak. Return its value(), or read it from "
            "the variables that apply returns"
        )
    # Lazy values can be made only while the run lasts.
    arrays = [x.value() if isinstance(x, LazyValue) else x for x in leaves]
    return jax.tree.unflatten(tree, arrays)
