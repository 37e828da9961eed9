"""Saved variables put where they belong: into a template, onto a sharding."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jslices._errors import InvalidArgumentError
from jslices.checkpoint.archive import Archive, Index
from jslices.checkpoint.leaves import Spec, as_leaf
from jslices.checkpoint.memory import dtype_named

_NUMBERS = {"bool": "b", "int": "iu", "float": "f", "complex": "c"}


def misfit(name: str, spec: Spec, template: Any, reshape: bool) -> str | None:
    """Why a saved variable cannot become what ``template`` is; None if it can."""
    wanted = _wanted(name, template)
    saved = f"{name!r} was saved as {_shown(spec)}"
    if not _same_kind(spec, wanted):
        return f"{saved}, but {_shown(wanted)} is wanted"
    if spec.dtype != wanted.dtype and not _is_number_for(spec, wanted):
        return f"{saved}, but the dtype {wanted.dtype} is wanted; convert it afterwards"
    if spec.kind in ("str", "bytes") or spec.shape == wanted.shape:
        return None
    if reshape and math.prod(spec.shape) == math.prod(wanted.shape):
        return None
    advice = (
        "the number of elements differs"
        if reshape
        else "Saver(reshape=True) allows another shape of as many elements"
    )
    return f"{saved}, but the shape {wanted.shape} is wanted; {advice}"


def place(archive: Archive, name: str, template: Any) -> Any:
    """A saved variable as what ``template`` is, on the devices that it is on."""
    spec = archive.specs[name]
    if isinstance(template, np.ndarray | np.generic):
        return _array(archive, name, template)
    if isinstance(template, bool | int | float | complex):
        return type(template)(archive.read(name).item())
    if isinstance(template, str | bytes):
        return original(archive, name)
    sharding: Any = getattr(template, "sharding", None)
    if isinstance(template, jax.Array) and len(sharding.device_set) == 1:
        sharding = sharding if getattr(template, "committed", False) else None
    if spec.kind.startswith("key:"):
        return jax.device_put(original(archive, name).reshape(template.shape), sharding)
    if spec.kind not in _NUMBERS:
        check_width(name, spec)
    shape = tuple(template.shape)
    if shape != spec.shape or sharding is None or len(sharding.device_set) == 1:
        return jax.device_put(_array(archive, name, template), sharding)
    boxes: dict[str, np.ndarray] = {}

    def box(index: Index | None) -> np.ndarray:
        key = str(index)  # what is replicated is read once
        if key not in boxes:
            boxes[key] = archive.read(name, index)
        return boxes[key]

    return jax.make_array_from_callback(shape, sharding, box)


def _array(archive: Archive, name: str, template: Any) -> np.ndarray:
    array = archive.read(name)
    if archive.specs[name].kind in _NUMBERS:  # NumPy refuses one that does not fit
        array = np.asarray(array.item(), template.dtype)
    return array.reshape(template.shape)


def original(archive: Archive, name: str) -> Any:
    """A saved variable as what it was."""
    spec, array = archive.specs[name], archive.read(name)
    if spec.kind == "numpy":
        return array
    if spec.kind.startswith("key:"):
        implementation = spec.kind.removeprefix("key:")
        return jax.random.wrap_key_data(jax.device_put(array), impl=implementation)
    if spec.kind in ("str", "bytes"):
        return array.tobytes().decode() if spec.kind == "str" else array.tobytes()
    if spec.kind in _NUMBERS:
        return array.item()
    check_width(name, spec)
    return jax.device_put(array)


def check_width(name: str, spec: Spec) -> None:
    """Refuses what JAX would silently make narrower."""
    dtype = dtype_named(spec.dtype)
    if dtype.kind not in "biufcV":
        raise InvalidArgumentError(
            f"{name!r} was saved as NumPy's {dtype}; JAX has no such arrays. Give an array "
            "of NumPy's in its place in `variables`"
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise InvalidArgumentError(
            f"{name!r} was saved as {dtype}, which JAX would make narrower; set "
            "jax.config.update('jax_enable_x64', True), or give an array of NumPy's in "
            "its place in `variables`"
        )


def _wanted(name: str, template: Any) -> Spec:
    if isinstance(template, jax.ShapeDtypeStruct):
        if not jnp.issubdtype(template.dtype, jax.dtypes.prng_key):
            return Spec("jax", np.dtype(template.dtype).name, tuple(template.shape))
        data = jax.eval_shape(jax.random.key_data, template)
        return Spec("key:", "uint32", tuple(data.shape))
    if isinstance(template, jax.Array) and template.is_deleted():  # donated: still a shape
        return _wanted(name, jax.ShapeDtypeStruct(template.shape, template.dtype))
    return as_leaf(name, template).spec


def _same_kind(spec: Spec, wanted: Spec) -> bool:
    """True unless one is random keys or a string and the other is not."""
    if wanted.kind == "key:":
        return spec.kind.startswith("key:")
    kinds = {spec.kind, wanted.kind}
    special = any(k.partition(":")[0] in ("key", "str", "bytes") for k in kinds)
    return len(kinds) == 1 or not special


def _is_number_for(spec: Spec, wanted: Spec) -> bool:
    """Numbers of Python's have no width."""
    for one, other in ((spec, wanted), (wanted, spec)):
        if one.kind in _NUMBERS:
            return dtype_named(other.dtype).kind in _NUMBERS[one.kind]
    return False


def _shown(spec: Spec) -> str:
    if spec.kind.startswith("key"):
        return f"random keys ({spec.kind.removeprefix('key:') or 'of any kind'})"
    if spec.kind in ("str", "bytes"):
        return f"a Python {spec.kind}"
    return f"{spec.dtype}[{', '.join(map(str, spec.shape))}]"
