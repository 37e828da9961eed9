"""What depends on the JAX release: traced programs, frames of JAX's functions.

Tested on jax 0.10.2 and 0.12. What moved so far: sub-programs are ``ClosedJaxpr`` or
``Jaxpr`` in 0.10 and always ``Jaxpr`` in 0.12; ``scan`` counts its operands in
``num_consts``/``num_carry`` or in ``ft_in``.
"""

import contextlib
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import jax.extend.core.primitives
import numpy as np
from jax import lax
from jax._src import (
    core,
    dtypes,
    hijax,
    linear_util,
    pjit,
    source_info_util,
    tree_util,
    xla_bridge,
    xla_metadata,
)
from jax._src.interpreters import pxla
from jax._src.random import prng
from jax._src.random.prng import PRNGKeyArray as KeyArray
from jax.export import is_symbolic_dim
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, get_opaque_trace_state
from jax.extend.random import define_prng_impl
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jaxlib.mlir.dialects import sdy

from jslices._densify import JAX_FOLDER, OUR_FOLDER, UserLine, pick_user_line
from jslices._instead import instead_of_optax
from jslices._typing import Aval, PyTree, Size

F = TypeVar("F", bound=Callable[..., Any])

# A jaxpr, closed or not, and one of its equations. JAX exports the classes but not
# their fields, so a type checker learns nothing from naming them.
Program = Any
Equation = Any
Source = Any  # where an equation comes from: its ``source_info``
Atom = Any  # a variable or a literal

#: The classes of sub-programs.
PROGRAMS = (Jaxpr, ClosedJaxpr)

__all__ = ["KeyArray", "Literal"]

#: To write into a bfloat16 array, XLA:CPU of these releases makes all of it float32 and
#: back: better once a step than once a chunk. (jax 0.10.2 does, 0.12 does not.)
WIDENS_BFLOAT16 = jax.__version_info__ < (0, 12)
#: Before, ``jit`` refuses to donate an array to an output whose layout is constrained.
CONSTRAINS_LAYOUTS = jax.__version_info__ >= (0, 11, 1)


def identity_primitive(name: str, passed: int = 0) -> Primitive:
    """A primitive that returns one of its operands unchanged.

    Lowerings of some platforms may do more. Under ``vmap`` only the operand is left.
    """
    primitive = Primitive(name)
    primitive.def_impl(lambda *operands, **_: operands[passed])
    primitive.def_abstract_eval(lambda *operands, **_: operands[passed])
    ad.primitive_jvps[primitive] = lambda primals, tangents: (
        primitive.bind(*primals),
        tangents[passed],
    )
    batching.primitive_batchers[primitive] = lambda args, axes: (args[passed], axes[passed])
    mlir.register_lowering(primitive, lambda _, *operands, **__: [operands[passed]])
    return primitive


def split_alike(pattern: jax.Array, x: jax.Array) -> jax.Array:
    """``x``, on a mesh of Auto axes split over devices as ``pattern``, of the same shape.

    ``pattern`` has no other effect, but makes the program one of its devices.
    """
    return _split_alike_p.bind(pattern, x)


_split_alike_p = identity_primitive("split_alike", passed=1)
_groups = itertools.count()


def _group(context: Any, pattern: Any, x: Any) -> list[Any]:
    if context.avals_in[0].shape == context.avals_in[1].shape:
        number = next(_groups)
        for each in (pattern, x):
            sdy.sharding_group(each, number)
    return [x]


mlir.register_lowering(_split_alike_p, _group)


#: JAX's own primitives by name, those of this release.
PRIMITIVES: dict[str, Primitive] = {
    x.name: x
    for module in (hijax, pjit, jax.extend.core.primitives, lax, xla_metadata)
    for x in vars(module).values()
    if isinstance(x, Primitive)
}


#: Of NumPy, as ``jnp`` compiles a program to make one.
_NUMBER = np.zeros((), np.float32)


def is_staged() -> bool:
    """Whether a program is being traced, so that nothing runs yet."""
    return isinstance(jax.device_put(_NUMBER), jax.core.Tracer)


def is_traced() -> bool:
    """Whether a transformation is at work, so that arrays may be tracers."""
    return core.trace_ctx.trace not in (None, core.eval_trace)


def trace_state() -> object:
    """What is being traced: equal as long as it is the same, or nothing, in eager mode."""
    return None if core.trace_ctx.trace is None else get_opaque_trace_state()


def traces() -> list[Any]:
    """What is being traced, from the innermost on, by references; nothing if eager."""
    trace, around = core.trace_ctx.trace, list[Any]()
    while trace not in (None, core.eval_trace):
        around, trace = [*around, weakref.ref(trace)], getattr(trace, "parent_trace", None)
    return around


@contextlib.contextmanager
def trace_at_hand(x: jax.Array) -> Iterator[None]:
    """A context for operations on ``x`` where none is set, or that of another mesh.

    JAX sets none around some transformations, while it takes results apart.
    """
    with contextlib.ExitStack() as contexts:
        if core.trace_ctx.trace is None:
            trace = x._trace if isinstance(x, jax.core.Tracer) else core.eval_trace
            contexts.enter_context(core.set_current_trace(trace))
        mesh = jax.typeof(x).sharding.mesh
        if not mesh.empty and mesh != jax.sharding.get_abstract_mesh():
            contexts.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


def takes_tables(**how: Any) -> Callable[[F], F]:
    """Lets a function take tables that are a type of JAX's: ``experimental.call.call``."""

    def decorated(fun: F) -> F:
        @functools.wraps(fun)
        def with_opaque_tables(*args: Any, **kwargs: Any) -> Any:
            loaded = sys.modules.get("jslices.experimental.call")
            return loaded.call(fun, args, kwargs, **how) if loaded else fun(*args, **kwargs)

        return with_opaque_tables  # type: ignore[return-value]

    return decorated


def define_keys(name: str, tag: Callable[[], str], words: int) -> tuple[Any, Any]:
    """A kind of random keys without randomness, and its dtype, which prints as ``tag()``.

    Each is ``words`` of uint32. ``jax.random.key_impl``, and so Orbax, gives its name.
    """

    def refuse(*_: object) -> NoReturn:
        raise TypeError(f"these are {tag()}")

    refused: Any = dict.fromkeys(("seed", "split", "random_bits", "fold_in"), refuse)
    spec: Any = define_prng_impl(key_shape=(words,), name=name, tag=tag, **refused)  # type: ignore
    # One of that name is there if the package has been imported before.
    spec._impl = prng.prngs.setdefault(name, _Kind(*spec._impl))
    return spec, prng.KeyTy(spec._impl)


class _Kind(prng.PRNGImpl):
    """A kind of keys that are filled with nothing but zeros, as by ``jnp.zeros_like``."""

    @property
    def tag(self) -> str:  # type: ignore[override]
        return self[-1]()  # type: ignore

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def key_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        # `jnp.ones_like` asks for it in `KeyTyRules.full`, and nothing else of ours. Should
        # that be renamed, ones are rows out of range, and tests fail.
        frame = sys._getframe(1)
        if frame.f_code.co_name == "full":
            number = frame.f_locals.get("fill_value", 0)
            if isinstance(number, jax.core.Tracer) or np.any(number):
                self.seed()
        return self[0]  # type: ignore[no-any-return]


def key_parts(keys: KeyArray) -> tuple[Any, Any]:
    """The kind of an array of random keys, and the integers below it."""
    return keys._impl, keys._base_array


def register_key_arrays(
    kind: type[KeyArray], on_host: Callable[[np.ndarray, Any], np.ndarray]
) -> None:
    """Make a class of random keys one that compiled programs take without delay.

    ``on_host(integers, dtype)`` is what ``jax.device_get`` returns for them.
    """

    def unflatten(impl: Any, children: Sequence[Any]) -> Any:
        (base,) = children
        if isinstance(base, np.ndarray):
            return on_host(base, prng.KeyTy(impl))
        return kind(impl, base)

    tree_util.dispatch_registry.register_node(
        kind, lambda x: ((x._base_array,), x._impl), unflatten
    )
    pxla.shard_arg_handlers[kind] = pxla.shard_arg_handlers[KeyArray]


def set_type_of(kind: type, type_of: Callable[[Any], Any]) -> None:
    """Let ``jax.typeof`` and ``jax.lax`` call ``type_of`` for objects of ``kind``."""
    core.pytype_aval_mappings[kind] = type_of
    dtypes.register_canonicalize_value_handler(kind, type_of)


def constants(program: Program) -> Sequence[Any]:
    """The values of ``program.constvars``; None for each that is not known."""
    return getattr(program, "consts", None) or [None] * len(program.constvars)


def shape_of(atom: Atom) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


def is_symbolic(size: Size) -> bool:
    """Whether ``jax.export`` leaves this size open."""
    return is_symbolic_dim(size)


def varying_axes(*avals: Aval) -> frozenset[str]:
    """The mesh axes along which any of these differs, inside a ``shard_map``."""
    axes: frozenset[str] = frozenset()
    for aval in avals:
        axes |= getattr(getattr(aval, "manual_axis_type", None), "varying", frozenset())
    return axes


def as_varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """``x`` as an array that may differ along ``axes``; it was the same everywhere."""
    new = axes - varying_axes(jax.typeof(x)) if axes else axes
    return lax.pcast(x, tuple(sorted(new)), to="varying") if new else x


def as_varying_as(others: Iterable[jax.Array], *arrays: jax.Array) -> list[jax.Array]:
    """``arrays``, marked as varying along the axes along which the ``others`` vary."""
    axes = varying_axes(*map(jax.typeof, others))
    return [as_varying(x, axes) for x in arrays]


def one_for(out: jax.Array) -> jax.Array:
    """The cotangent 1 of a scalar; what is unreduced over mesh axes in one is reduced in
    the other.
    """
    sharding = jax.typeof(out).to_ct_aval().sharding
    return lax.full_like(out, 1, shape=(), sharding=sharding)  # type: ignore[no-any-return]


def bind(
    eqn: Equation, operands: Sequence[Any], as_function: bool = False, **changed: Any
) -> list[Any]:
    """Runs one equation on ``operands``, its name stack and source line preserved.

    If all axes of a mesh are Auto they stay so, whatever the types of the equation say.

    With ``as_function``, for equations that have an :func:`operation`, as the call of a
    jitted function. JAX linearizes a primitive anew each time, which takes twice as long as
    to trace it, but a function once for all calls with the same types.
    """
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    trace = eqn.source_info.traceback
    around = jax.sharding.get_abstract_mesh()
    mesh = around if _is_auto(around) else eqn.ctx.cur_abstract_mesh
    run: Any = functools.partial(eqn.primitive.bind, **params)
    if as_function:
        run = _function(eqn.primitive, tuple(params.items()))
    with (
        source_info_util.user_context(trace, name_stack=stack),
        eqn.ctx.manager,
        jax.sharding.use_abstract_mesh(mesh),
    ):
        out = run(*operands)
    return list(out) if eqn.primitive.multiple_results else [out]


@functools.lru_cache(maxsize=1024)
def _function(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    def function(*operands: jax.Array) -> Any:
        return primitive.bind(*operands, **dict(params))

    function.__name__ = primitive.name
    return jax.jit(function, inline=True)


def operation(eqn: Equation) -> Hashable:
    """Equal for equations that do the same to arrays of the same types.

    None for all but JAX's own primitives without functions or programs inside.
    """
    values = itertools.chain.from_iterable(
        x if isinstance(x, tuple) else (x,) for x in eqn.params.values()
    )
    has_inside = any(callable(x) or isinstance(x, PROGRAMS) for x in values)
    is_own = PRIMITIVES.get(eqn.primitive.name) is eqn.primitive
    if has_inside or not is_own or eqn.effects or "_prim" in eqn.params:
        return None
    key = eqn.primitive, *eqn.params.items(), *(x.aval for x in eqn.invars)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def evaluate(
    program: Program,
    operands: Sequence[jax.Array],
    replace: Callable[[Atom, jax.Array], jax.Array],
) -> list[jax.Array]:
    """The outputs of a program whose every variable passes through ``replace``.

    ``replace(variable, array)`` gives the array that the rest of the program reads.
    """
    values = dict(zip(program.invars, operands, strict=True))
    values.update(zip(program.constvars, constants(program), strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in program.eqns:
        outputs = bind(eqn, list(map(read, eqn.invars)))
        values.update(zip(eqn.outvars, map(replace, eqn.outvars, outputs), strict=True))
    return list(map(read, program.outvars))


def inputs_used(program: Any, outputs: Sequence[bool]) -> list[bool]:
    """Which inputs of a closed program these outputs depend on."""
    return pe.dce_jaxpr(program.jaxpr, list(outputs))[1]


def eval_minimal(program: Any, outputs: Sequence[bool], args: Sequence[Any]) -> list[Any]:
    """These outputs of a closed program, running no more than they need."""
    less, used = pe.dce_jaxpr(program.jaxpr, list(outputs))
    return jax.core.eval_jaxpr(less, program.consts, *itertools.compress(args, used))


def has_auto_axes(eqn: Equation) -> bool:
    """Whether it was traced on Auto axes: XLA decides how arrays are split, not types."""
    return _is_auto(eqn.ctx.cur_abstract_mesh)


def _is_auto(mesh: jax.sharding.AbstractMesh) -> bool:
    return not mesh.empty and mesh.are_all_axes_auto


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried."""
    if "ft_in" in params:
        operands = params["ft_in"]  # (constants, carried, scanned over), nested or flat
        if hasattr(operands, "elts"):
            consts, carry, _ = map(len, operands.elts)
        else:
            consts, carry, _ = (part.num_leaves for part in operands.tree.children())
        return consts, carry
    return params["num_consts"], params["num_carry"]


def scan_options(params: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments with which ``lax.scan`` makes the same loop."""
    # An open length must come from what is scanned over.
    names = ["length"] * (not is_symbolic(params["length"])) + ["reverse", "unroll"]
    return {name: params[name] for name in names}


def remat_options(params: dict[str, Any], passed: Sequence[bool]) -> dict[str, Any]:
    """The keyword arguments with which ``jax.checkpoint`` wraps the same function.

    That function takes one more operand first, and only the ``passed`` ones of the others.
    """
    prevent_cse = params.get("prevent_cse", True)
    if isinstance(prevent_cse, tuple):
        prevent_cse = (True, *itertools.compress(prevent_cse, passed))
    return {"policy": params["policy"], "prevent_cse": prevent_cse}


def user_line(source: Source) -> UserLine:
    """The line of the user's program that made an equation with this ``source_info``."""
    trace: Any = getattr(source, "traceback", None)
    frames = zip(*trace.raw_frames(), strict=True) if trace else ()
    return pick_user_line(
        (code.co_filename, trace.code_addr2line(code, at)) for code, at in frames
    )


def described(eqn: Equation, source: Source) -> str:
    """``reduce_sum in lamb``: the primitive, and the maker of the innermost closure."""
    codes = source.traceback.raw_frames()[0] if source.traceback else ()
    names = (x.co_qualname for x in codes if not x.co_filename.startswith(JAX_FOLDER))
    makers = (f" in {x.split('.')[0]}" for x in names if "<locals>" in x)
    return kind(eqn) + next(makers, "")


def is_library_call(eqn: Equation) -> bool:
    """True for a call of one of JAX's own jitted functions, such as ``jnp.take``.

    JAX keeps its trace, with the lines of its first caller, for every later call.
    """
    return _file_called(eqn).startswith(JAX_FOLDER)


def is_call_of_ours(eqn: Equation) -> bool:
    """True for a call of a function of this package, such as ``scatter_add``."""
    return _file_called(eqn).startswith(OUR_FOLDER)


def _file_called(eqn: Equation) -> str:
    """The file of the function that an equation calls, as far as is known."""
    params = parameters(eqn)
    program = params["traced"].jaxpr if "traced" in params else body(eqn)
    info = getattr(program, "debug_info", None)
    return getattr(info, "func_filename", None) or ""


# What ``call_hi_primitive`` calls (jax 0.12 with ``jax_remat3``, ``jax_custom_jvp3`` and
# ``jax_custom_vjp3``), by the names of the primitives that it replaces.
_HI_PRIMITIVES = {
    "RematTraced": "checkpoint",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
}


def kind(eqn: Equation) -> str:
    """The name of the primitive, or of what a ``call_hi_primitive`` calls."""
    if "_prim" not in eqn.params:
        return eqn.primitive.name
    called = type(eqn.params["_prim"]).__name__
    return _HI_PRIMITIVES.get(called, called)


def parameters(eqn: Equation) -> dict[str, Any]:
    """The parameters of the primitive, or of what a ``call_hi_primitive`` calls."""
    return eqn.params["_prim"].params if "_prim" in eqn.params else eqn.params


def functions_behind(eqn: Equation) -> frozenset[Any]:
    """The functions of the user, or of JAX, that the parameters of an equation lead to.

    JAX wraps those of a ``custom_jvp`` or ``custom_vjp`` in other closures at each call: of
    its own functions the code counts, and what they close over.
    """
    functions: set[Any] = set()
    seen: set[int] = set()
    called = vars(eqn.params["_prim"]) if "_prim" in eqn.params else {}
    left = [*parameters(eqn).values(), *called.values()]
    while left:
        x = left.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, types.FunctionType):
            if x.__code__.co_filename.startswith(JAX_FOLDER):
                functions.add(x.__code__)
                left += [*(x.__closure__ or ()), *(x.__defaults__ or ())]
            else:
                functions.add(x)
        elif isinstance(x, types.CellType):
            with contextlib.suppress(ValueError):  # nothing is in it yet
                left.append(x.cell_contents)
        elif isinstance(x, linear_util.WrappedFun):
            left += [x.f, getattr(x, "f_transformed", None)]
        elif isinstance(x, functools.partial):
            left += [x.func, *x.args]
        elif isinstance(x, tuple | list):
            left += x
    return frozenset(functions)


def body(eqn: Equation) -> Program:
    """The sub-program of a call, a loop or a rematerialisation."""
    params = parameters(eqn)
    if "call_jaxpr" not in params and "jaxpr" not in params:
        return _expanded(eqn)
    return params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"]


def _expanded(eqn: Equation) -> Program:
    """What a ``call_hi_primitive`` computes, without its derivative."""
    called = eqn.params["_prim"]

    def expand(*operands: jax.Array) -> list[Any]:
        return jax.tree.leaves(called.expand(*called.in_tree.unflatten(operands)))

    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    return jax.make_jaxpr(expand)(*avals)


def programs_among(eqn: Equation) -> list[Program]:
    """The sub-programs that are parameters of an equation."""
    called = vars(eqn.params["_prim"]) if "_prim" in eqn.params else {}
    if "traced" in called:
        return [_expanded(eqn)]
    values = (parameters(eqn) | called).values()
    return [x for x in values if hasattr(x, "invars")]


def has_started_devices() -> bool:
    """Whether JAX has started its backends."""
    return xla_bridge.backends_are_initialized()


def usual_promotion(fun: F) -> F:
    """``fun`` with JAX's usual dtype promotion, even if the user's program is strict.

    ``jax_numpy_dtype_promotion="strict"`` is for the program's own arrays: the arithmetic
    of Optax, which ours equals to the bit, multiplies float32 by an int32 step.
    """
    return jax.numpy_dtype_promotion("standard")(fun)  # type: ignore[no-any-return]


def flatten(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Any]:
    """The leaves of a pytree, and its structure."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    return leaves, structure


def broadcast_prefix(
    prefix: PyTree,
    tree: PyTree,
    wanted: str,
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[Any]:
    """The value of a pytree prefix, in which None is one, for each leaf of ``tree``.

    ``wanted`` is the text of the error for another structure. ``jax.tree.broadcast`` counts
    the leaves of ``tree`` without ``is_leaf``.
    """
    values: list[Any] = []

    def spread(value: Any, part: PyTree) -> None:
        values.extend([value] * len(flatten(part, is_leaf=is_leaf)[0]))

    try:
        ends = lambda x: x is None or (is_leaf is not None and is_leaf(x))  # noqa: E731
        jax.tree.map(spread, prefix, tree, is_leaf=ends)
    except ValueError as error:
        raise ValueError(f"{wanted}; {error}") from None
    return values


# ``jnp.sum(slices)`` and ``array + slices`` both ask the slices for an array through
# ``__jax_array__``. The first must get one; the second must not, or Python never reaches
# ``IndexedSlices.__radd__``, which adds the rows in place. JAX calls it straight from the
# operator's own function, ``_operator_add``. Should that change, the sum is right, but
# dense, and a test fails.
_OPERATORS = {f"_operator_{name}" for name in ("add", "sub", "mul", "radd", "rsub", "rmul")}


def called_by_jax_operator() -> bool:
    """True inside ``__jax_array__`` when ``array + slices`` (or ``-``, ``*``) asked."""
    return sys._getframe(2).f_code.co_name in _OPERATORS


def called_by_any_jax_operator() -> bool:
    """The same for all operators, ``array @ x`` and ``array < x`` included."""
    return sys._getframe(2).f_code.co_name.startswith("_operator_")


#: What to type for functions that map over two trees.
_OF_TREES = (
    "jslices.adam for optax.adam (and so on), jslices.apply_updates for eqx.apply_updates, "
    "jslices.optim.multi_steps for optax.MultiSteps, jslices.tree.map for jax.tree.map"
)


# Where two trees differ JAX's error does not mention slices. It calls only ``tree_flatten``
# of ours, so slices say there what to type instead. The name is that of JAX 0.10 and 0.12;
# should it change, JAX's own error comes back, and tests fail.


def refuse_other_tree(slices: Any) -> None:
    """Raise in ``slices.tree_flatten`` if JAX is about to say that another tree differs.

    Raises:
      ValueError: if the other tree has something else in place of the slices.
    """
    frame = sys._getframe(2).f_back  # who called JAX's tree_flatten
    if frame is None or frame.f_code.co_name != "_prefix_error":
        return
    other = frame.f_locals.get("full_tree")
    has_no_rows = getattr(slices.values, "shape", ())[:1] == (0,)
    if frame.f_locals.get("prefix_tree") is not slices or hasattr(other, "dense_shape"):
        return
    if type(other) in (tuple, list, dict):  # a prefix of arguments, of in_specs
        return
    path = jax.tree_util.keystr(frame.f_locals.get("key_path", ()))
    instead = "an array" if hasattr(other, "shape") else f"a {type(other).__name__}"
    zeros = "; no gradient comes into it: sparse=False in jslices.grad gives zeros"
    raise ValueError(
        f"different types at key path {path or '[]'}: IndexedSlices, where another tree "
        f"has {instead}{zeros if has_no_rows else ''}; type "
        + (instead_of_optax() or _OF_TREES)
    )
