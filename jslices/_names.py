"""The likely meaning of an unknown name of a module."""

import difflib
import sys
from types import ModuleType
from typing import NoReturn

_MODULES = "jslices", "jslices.errors", "jslices.optim", "jslices.tree"
#: Names of other libraries, and former names here.
_INSTEAD = {
    "clip_global_norm": "jslices.optim.clip_by_global_norm",
    "clip_row_norms": "jslices.optim.clip_rows_by_norm",
    "exact_step": "jslices.train_step",
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


def no_such_name(module: str, name: str) -> NoReturn:
    """Raise an AttributeError that says what to type.

    That is the same name in another module, ``tree.map`` for ``tree_map``, or one that is
    spelled almost alike.
    """
    text = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(text)
    hint = _INSTEAD.get(name)
    names = {
        public: f"{home}.{public}"
        for home in (*_MODULES, module)
        for public, value in vars(sys.modules[home]).items()
        if not (public.startswith("_") or isinstance(value, ModuleType))
    }
    bare = name.removeprefix("tree_")
    bare = bare if bare in names else bare.lower()  # the classes of PyTorch and Keras
    near = [bare] if bare in names else difflib.get_close_matches(bare, names, 1, 0.8)
    if hint is None and near:
        hint = names[near[0]]
    raise AttributeError(text if hint is None else f"{text}; type {hint}")
