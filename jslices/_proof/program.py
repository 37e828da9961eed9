"""A step with its compiled program: which array of the arguments is which parameter."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jslices._densify import DensificationWarning, human_bytes
from jslices._proof.hlo import Module


class Leaf(NamedTuple):
    """An array among the arguments or the results."""

    path: str  #: ``args[0]['table']``
    shape: tuple[int, ...]
    dtype: Any
    donated: bool = False
    parameter: int | None = None  #: its number in the program; None if jit has dropped it

    @property
    def nbytes(self) -> int:
        count: int = self.dtype.itemsize
        for dim in self.shape:
            count *= dim
        return count

    def __str__(self) -> str:
        kind = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        return f"{self.path} {kind} ({human_bytes(self.nbytes)})"


class Program(NamedTuple):
    """A compiled step."""

    name: str
    jaxpr: Any
    module: Module
    leaves: list[Leaf]
    outputs: list[Leaf]
    memory: tuple[int, int, int, int]  #: bytes of arguments, outputs, aliases, temporaries
    densified: list[str]  #: what jslices has warned of

    def name_of(self, leaf: Leaf) -> str:
        """That of an argument's instruction; empty if jit has dropped it."""
        parameters = self.module.parameters()
        return "" if leaf.parameter is None else parameters[leaf.parameter].name


def compiled(
    step: Callable[..., Any], args: Sequence[Any], donate_argnums: int | Sequence[int]
) -> Program:
    """Compiles a step for ``args``, without running it."""
    name = getattr(step, "__name__", "the step")
    if not callable(getattr(step, "trace", None)):
        step = jax.jit(step, donate_argnums=donate_argnums)
    elif isinstance(donate_argnums, int) or tuple(donate_argnums):
        raise ValueError(
            f"{name} is jitted already, and donates what its own jax.jit says; leave out "
            f"donate_argnums={donate_argnums} here, or pass the function that is not jitted"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = step.trace(*args)  # type: ignore[attr-defined]
        lowered = traced.lower()
        executable = lowered.compile()
    densified = []
    for warning in caught:
        # That a donated array is not usable is told by this module, and more of it.
        if "donated buffers were not usable" in str(warning.message):
            continue
        if issubclass(warning.category, DensificationWarning):
            densified.append(str(warning.message))
            continue
        warnings.warn_explicit(
            warning.message, warning.category, warning.filename, warning.lineno
        )
    memory = executable.memory_analysis()
    return Program(
        name,
        traced.jaxpr,
        Module(executable.as_text()),
        _leaves(lowered.args_info, executable.input_formats),
        [
            Leaf(f"result{jax.tree_util.keystr(path)}", x.shape, x.dtype)
            for path, x in jax.tree_util.tree_leaves_with_path(lowered.out_info)
        ],
        (
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
        ),
        densified,
    )


def _leaves(args_info: Any, formats: Any) -> list[Leaf]:
    infos = jax.tree_util.tree_leaves_with_path(args_info)
    is_format = lambda x: hasattr(x, "layout")  # noqa: E731
    leaves, number = [], 0
    for (path, info), form in zip(
        infos, jax.tree.leaves(formats, is_leaf=is_format), strict=True
    ):
        used = form.layout is not None
        base = "args" if path[0].idx == 0 else "kwargs"
        name = base + jax.tree_util.keystr(path[1:])
        leaves.append(
            Leaf(name, info.shape, info.dtype, info.donated, number if used else None)
        )
        number += used
    return leaves
