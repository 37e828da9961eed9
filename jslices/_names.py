"""The names that a module makes public, and the likely meaning of others."""

import difflib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

_MODULES = "jslices", "jslices.errors", "jslices.optim", "jslices.tree"
#: Names of other libraries, and former names here.
_INSTEAD = {
    "clip_global_norm": "jslices.optim.clip_by_global_norm",
    "clip_row_norms": "jslices.optim.clip_rows_by_norm",
    "exact_step": "jslices.train_step",
    "proof": "jslices.testing",
    "reduce_stacked": "jslices.sum_stacked",
    "MultiSteps": "jslices.optim.multi_steps",
    "multi_transform": "jslices.optim.partition",
    "trace": "jslices.sgd(learning_rate, momentum)",
    "add": "g1 + g2, or jslices.tree.map(operator.add, g1, g2)",
    "norm": "jslices.global_norm",
    "psum": "jslices.all_reduce_slices(grads, axis, 'sum')",
    "pmean": "jslices.all_reduce_slices(grads, axis)",
    "lookup": "jslices.embedding_lookup",
    "Optimizer": "jslices.keras.Optimizer",
    "LazyAdam": "jslices.adam",
    "SparseAdam": "jslices.adam",
}


def public(module: str) -> tuple[list[str], Callable[[], list[str]]]:
    """``__all__`` and ``__dir__``: what a module defines, and what a package imports."""
    it = sys.modules[module]
    imported = hasattr(it, "__path__")

    def its(x: object) -> bool:
        defined = getattr(x, "__module__", "") == module
        return defined or (imported and not isinstance(x, ModuleType))

    names = [name for name, x in vars(it).items() if not name.startswith("_") and its(x)]
    return names, names.copy


def no_such_name(module: str, name: str) -> NoReturn:
    """Raise an AttributeError that says what to type.

    The same name in another module, ``tree.map`` for ``tree_map``, or one spelled alike.
    """
    text = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(text)
    hint = _INSTEAD.get(name)
    homes = *_MODULES, module
    names = {own: f"{home}.{own}" for home in homes for own in sys.modules[home].__all__}
    bare = name.removeprefix("tree_")
    bare = bare if bare in names else bare.lower()  # the classes of PyTorch and Keras
    near = [bare] if bare in names else difflib.get_close_matches(bare, names, 1, 0.8)
    if hint is None and near:
        hint = names[near[0]]
    raise AttributeError(text if hint is None else f"{text}; type {hint}")
