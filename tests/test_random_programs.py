"""Random programs: tables, ids, reads and control flow of every kind, against jax.grad.

Hypothesis draws a program as text, so that a failing one is printed, as small as it can be
made, as code that runs by itself. ``jax.grad`` of the same text is what is right; only
``js.embedding_lookup``, which has its own meaning of bad ids, is written in plain JAX there.
"""

import math
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PROGRAMS, dense, numpy_tree
from hypothesis import given, note, settings
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun

import jslices as js

PREAMBLE = """\
import jax, jax.numpy as jnp, jslices as js, numpy as np
from jax import lax
from jax.experimental import sparse
from jslices import embedding_lookup

def array(shape, dtype, seed):
    numbers = np.random.default_rng(seed).permutation(np.prod(shape, dtype=int))
    return jax.device_put(np.asarray((numbers.reshape(shape) % 61 - 20) / 16, dtype))

def total(x):  # tells all elements apart, and a missing row from others
    weights = (1 + np.arange(x.size) % 7).reshape(x.shape)
    total = jnp.sum(lax.select(x != x, jnp.full_like(x, 9), x) * weights.astype(x.dtype))
    return total.real.astype("float32")

def lookup(table, ids, mode="fill"):  # what js.embedding_lookup means
    ids = jnp.asarray(ids)
    near = ids.clip(0, ids.dtype.type(min(len(table) - 1, jnp.iinfo(ids.dtype).max)))
    rows = table[near.astype(int)]
    good = jnp.expand_dims(near == ids, [*range(ids.ndim, rows.ndim)])
    return rows if mode == "clip" else jnp.where(good, rows, jnp.nan)

def gather(table, ids, sizes, mode):  # windows that start at rows, and columns, `ids`
    ids = jnp.stack(ids, -1) if type(ids) is tuple else jnp.asarray(ids)[..., None]
    axes = tuple(range(ids.ndim - 1, ids.ndim - 1 + table.ndim))
    numbers = lax.GatherDimensionNumbers(axes, (), tuple(range(ids.shape[-1])))
    return lax.gather(table, ids, numbers, (*sizes, *table.shape[len(sizes):]), mode=mode)

def slice_p(table, *starts, sizes):
    sizes = (*sizes, *table.shape[len(sizes):])
    starts += (starts[0].dtype.type(0),) * (table.ndim - len(starts))
    return lax.dynamic_slice_p.bind(table, *map(jnp.asarray, starts), slice_sizes=sizes)

def equal(ids, table):
    ids = jnp.asarray(ids)[..., None]
    numbers = lax.broadcasted_iota(ids.dtype, (*ids.shape[:-1], len(table)), ids.ndim - 1)
    return (numbers == ids).astype(table.dtype)

def matrix(ids, table):  # two numbers for each id, one of them padding
    ids = jnp.asarray(ids).reshape(-1).astype(int)
    n = len(ids)
    places = [[*range(n), *range(n, 0, -1)], jnp.concatenate([ids, ids // 2])]
    data = (ids % 3).astype(table.dtype)
    places = jnp.stack(list(map(jnp.asarray, places)), axis=1)
    return sparse.BCOO((jnp.concatenate([data, data]), places), shape=(n, len(table)))

def jvp_by(f, by):  # f with `by` times its derivative
    g = jax.custom_jvp(f)
    g.defjvp(lambda x, dx: (f(*x), by * jax.jvp(f, x, dx)[1]))
    return g

def vjp_by(f, by):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: jax.vjp(f, x), lambda pull, dy: (by * pull(dy)[0],))
    return g

def grad_by(f, by):
    pull_by = lambda pull: lambda dy: (by * pull(dy)[0],)
    return jax.custom_gradient(lambda x: (lambda y, pull: (y, pull_by(pull)))(*jax.vjp(f, x)))

def second(grad):  # a loss made of the gradient of the loss
    whole = lambda g: g.to_dense() if js.is_slices(g) else g
    return lambda P, A: sum(
        total(whole(g)) for g in jax.tree.leaves(grad(loss)(P, A), is_leaf=js.is_slices)
    )
"""


class Scope(NamedTuple):
    """The expressions from which a program is made."""

    tables: tuple  # of (code, shape)
    ids: tuple  # of (code, number of axes)
    dtypes: tuple  # of ids
    #: Whether they may be too narrow for all rows. In gathers and scatters XLA then reads
    #: and writes outside of arrays; JAX's slices, and jnp, see to it.
    narrow: bool = True


def pick(draw, *options):
    return draw(st.sampled_from(options))


# --- ids --------------------------------------------------------------------------------


def edges(height, dtype):
    """Row numbers at which something may change."""
    limits = jnp.iinfo(dtype)
    numbers = [0, 1, height - 1, height, -1, -height, -height - 1, limits.max, limits.min]
    numbers += [height // 2 + 1, limits.max - 1, 2**31, 2**32 + 1, -(2**32)]
    return [number for number in numbers if limits.min <= number <= limits.max]


def numbers(draw, height, dtype, count=4):
    some = st.sampled_from(edges(height, dtype))
    drawn = draw(st.lists(some, min_size=count, max_size=count))
    return f'np.array({drawn}, "{dtype}")'


SCALARS = ("({i}) + 1", "({i}) * 2", "-({i})", "({i}) // 2", "({i}) % 6", "abs({i})")
SCALARS += ("jnp.minimum({i}, 5)", "({i}) - 2", "jnp.invert({i})", "lax.stop_gradient({i})")
SCALARS += ("lax.while_loop(lambda i: (i > 3).any(), lambda i: i // 2, {i})",)
LISTS = ("({i})[::-1]", "({i})[1:]", "({i})[:0]", "jnp.sort({i})", "jnp.stack([{i}] * 2)[1]")
LISTS += ("jnp.concatenate([{i}, {i}])[1:4]", "jnp.unique({i}, size=3)", "jnp.cumsum({i})")


def ids(draw, scope, height, axes):
    """An expression for row numbers of so many axes."""
    code, ndim = pick(draw, ("", 1), *scope.ids)
    if not code:
        code = numbers(draw, height, pick(draw, *scope.dtypes))
    if draw(st.booleans()):
        cast = f'({{i}}).astype("{pick(draw, *scope.dtypes)}")'
        code = pick(draw, *SCALARS, cast, *LISTS * (ndim == axes == 1)).format(i=code)
    code = f"jnp.asarray({code})"
    if height > 127 and not scope.narrow:
        code += ".astype(int)"
    if ndim == 0:
        return code if axes == 0 else f"jnp.tile({code}, {(2,) * axes})"
    return code + ("[0]", "", ".reshape(2, 2)")[axes]


# --- tables -----------------------------------------------------------------------------

#: Functions of each row, after which a lookup still reads rows.
ROWWISE = ("({t}) * 2", "jnp.sin({t})", "-({t}) / 2", "lax.stop_gradient({t})")
ROWWISE += ("jax.nn.relu({t})", "lax.optimization_barrier({t})", "jvp_by(jnp.sin, 2)({t})")
ROWWISE += ('({t}).astype("bfloat16").astype("float32")', "({t})[::-1]")
ROWWISE += ("(lambda t: jnp.where(t > 0, t, 0.5 * t))({t})", "({t}).at[1].set(0.5)")
ROWWISE += ("(lambda t: t - t.mean(axis=1, keepdims=True))({t})", "({t}) @ P['w']")
ROWWISE += ("jnp.pad({t}, ((1, 0), (0, 0)))[:6]", "({t} + P['b']) * P['s'][:, None]")
ROWWISE += ("jnp.concatenate([P['b'], {t}])[2:8]", "({t}).reshape(6, 3, 1)[..., 0]")
#: Functions that keep the shape.
ALIKE = (*ROWWISE[:9], "jnp.roll({t}, 1, 0)", "jnp.flip({t})", "jnp.tanh({t}) * ({t})")
ALIKE += ('({t}).astype("float16")', "jnp.cumsum({t}, 0)", "jax.nn.softmax({t})")


def function(draw, depth=2):
    """A function with a derivative of its own, or around others."""
    inner = function(draw, depth - 1) + "(x)" if depth and draw(st.booleans()) else "x"
    forms = "{}", "{} * 2", "jnp.sin({})", "{}[::-1]", "({} - x.mean(0, keepdims=True))", "x * {}"
    body = pick(draw, *forms).format(inner)
    wrap = pick(draw, "jvp_by({}, 2)", "vjp_by({}, 3)", "grad_by({}, 2)", "jax.jit({})")
    return wrap.format(f"lambda x: {body}")


def changed(draw, scope, table):
    """A table made of a table."""
    code, shape = table
    height, *row = shape
    axis = draw(st.integers(0, len(shape) - 1))
    size = shape[axis]
    some = draw(st.integers(1, size))
    sizes = (*shape[:axis], some, *shape[axis + 1 :])
    i = lambda axes=0: ids(draw, scope, size, axes)  # noqa: E731
    mode = pick(draw, "None", '"drop"', '"clip"')

    def padded():
        low, high, within = (draw(st.integers(0, 2)) for _ in range(3))
        widths = [(0, 0, 0)] * len(shape)
        widths[axis] = low - 1, high, within
        new = list(shape)
        new[axis] += low - 1 + high + within * (size - 1)
        return f"(lambda t: lax.pad(t, t.dtype.type(0.5), {widths}))({code})", new

    def one():
        kept = draw(st.booleans())
        new = (*shape[:axis], *(1,) * kept, *shape[axis + 1 :])
        return f"lax.dynamic_index_in_dim({code}, {i()}, {axis}, {kept})", new

    def window():
        starts = [f"{i()}"] * len(shape)
        return f"slice_p({code}, {', '.join(starts)}, sizes={sizes})", sizes

    def public_window():
        starts = [draw(st.sampled_from(edges(size, "int8"))) for _ in shape]
        return f"lax.dynamic_slice({code}, {starts}, {sizes})", sizes

    def moved():
        new = list(shape)
        new.insert(0, new.pop(axis))
        return f"jnp.moveaxis({code}, {axis}, 0)", new

    def index(code_of_index):
        return f"({code})[{', '.join([':'] * axis + [code_of_index])}]"

    def along(new_size):
        return (*shape[:axis], new_size, *shape[axis + 1 :])

    forms = {
        "alike": lambda: (pick(draw, *ALIKE).format(t=code), shape),
        "function": lambda: (f"({function(draw)})({code})", shape),
        "pad": padded,
        "merge": lambda: (
            f"({code}).reshape({(math.prod(shape[:2]), *shape[2:])})",
            (math.prod(shape[:2]), *shape[2:]),
        ),
        "split": lambda: (f"({code}).reshape({(1, height, *row)})", (1, height, *row))
        if height % 2
        else (f"({code}).reshape({(2, height // 2, *row)})", (2, height // 2, *row)),
        "one": one,
        "window": window,
        "public_window": public_window,
        "in_dim": lambda: (
            f"lax.dynamic_slice_in_dim({code}, {i()}, {some}, {axis})",
            along(some),
        ),
        "set": lambda: (
            f"({code}).at[{pick(draw, i(), i(1))}].set(0.5, mode={mode})",
            shape,
        ),
        "moved": moved,
        "index": lambda: (index(f"{i()}"), (*shape[:axis], *shape[axis + 1 :])),
        "rows": lambda: (index(f"{i(2)}"), (*shape[:axis], 2, 2, *shape[axis + 1 :])),
        "slice": lambda: (index(f"{size - some}:"), along(some)),
        "stride": lambda: (index(f"::{some}"), along(-(-size // some))),
        "axis": lambda: (f"({code})[None]", (1, *shape)),
        "tile": lambda: (
            f"jnp.tile({code}, {(2, *(1,) * len(row))})",
            (2 * height, *row),
        ),
        "stack": lambda: (
            f"(lambda t: jnp.stack([t, t * 2], {axis}))({code})",
            (*shape[:axis], 2, *shape[axis:]),
        ),
        "concatenate": lambda: (
            f"(lambda t: jnp.concatenate([t, t[:1] * 2]))({code})",
            (height + 1, *row),
        ),
    }
    new_code, new_shape = forms[pick(draw, *forms)]()
    fits = new_shape and len(new_shape) < 5 and 0 < math.prod(new_shape) < 2000
    return (new_code, tuple(new_shape)) if fits and min(new_shape) > 0 else table


# --- reads ------------------------------------------------------------------------------

MODES = ('"fill"', '"clip"', "None", '"wrap"')
#: Reads of rows, and then all of them.
SURE = ("({t})[{i}]", "embedding_lookup({t}, {i}, mode={m})", "(equal({i}, {t}) @ ({t}))")
SURE += ("jnp.take({t}, {i}, axis=0, mode={m})", "jax.nn.one_hot({i}, {n}) @ ({t})")
SURE += ("({t}).at[{i}].get(mode={m}, fill_value=0.5)", "matrix({i}, {t}) @ ({t})")
READS = (*SURE[:2], *SURE[3:6], "gather({t}, {i}, ({some},), {m})", "({t})[..., {i}]")
READS += ("jax.vmap(lambda k: lax.dynamic_index_in_dim({t}, k, 0))({i}.reshape(-1))",)
READS += ("jnp.tensordot(equal({i}, {t}), {t}, 1)", "slice_p({t}, {k}, sizes=({some},))")
READS += ("jax.vmap(lambda k: slice_p({t}, k, sizes=({some},)))({i}.reshape(-1))",)
READS += ("jnp.take({t}, {i}, axis=-1, mode={m})", "{t}")
TWO = ("({t})[{i}, {j}]", "({t})[{i}, :2]", "({t})[{i}, ::-1]", "({t})[{i}, 1]")
TWO += ("gather({t}, ({i}, {i}), ({some}, 1), {m})", "({t})[:, {j}]", "({t})[{i}, -1:]")
TWO += ("({t}).at[{i}, {j}].get(mode={m}, fill_value=0.5)", "({t})[{i}, {k}]")
TWO += ("({t}).at[{i}, :2].get(mode={m}, fill_value=0.5)",)
TWO += ("jax.vmap(lambda k: slice_p({t}, k, k, sizes=({some}, 1)))({i}.reshape(-1))",)


def read(draw, scope, table, sure):
    code, shape = table
    axes = draw(st.integers(0, 2))
    forms = SURE if sure else READS + TWO * (len(shape) > 1)
    form = pick(draw, *forms)
    if "gather" in form or "vmap" in form:
        scope = scope._replace(narrow=False)
    modes = MODES if "take(" in form else MODES[:2]
    return form.format(
        t=code,
        n=shape[0],
        i=ids(draw, scope, shape[0], axes) if "{i}" in form else "",
        j=ids(draw, scope, shape[-1], axes) if "{j}" in form else "",
        k=ids(draw, scope, shape[0], 0) if "{k}" in form else "",
        m=pick(draw, *modes) if "{m}" in form else "",
        some=draw(st.integers(1, shape[0])) if "{some}" in form else "",
    )


def one_loss(draw, scope, sure):
    """A scalar made of rows."""
    table = pick(draw, *scope.tables[: 2 if sure else None])
    for _ in range(draw(st.integers(0, 1 if sure else 3))):
        if sure:
            table = pick(draw, *ROWWISE).format(t=table[0]), table[1]
        else:
            table = changed(draw, scope, table)
    form = pick(draw, "total({})", "total(jnp.sin({}))", "total(({}) ** 2)")
    return form.format(read(draw, scope, table, sure))


def nested(draw, scope, sure, depth, level=0):
    """An expression for a scalar; ``level`` numbers the names it binds."""
    if not depth:
        return one_loss(draw, scope, sure)
    k, t = f"k{level}", f"t{level}"

    def inside(**more):
        new = {n: (*x, *getattr(scope, n)) for n, x in more.items()}
        narrow = scope.narrow and form not in ("vmap", "vmap_tables")
        new = scope._replace(**new, narrow=narrow)
        return nested(draw, new, sure, depth - 1, level + 1)

    def of_tables(form):
        code, (size, *shape) = pick(draw, *scope.tables)
        for _ in range(draw(st.integers(0, 1))):
            code, (size, *shape) = changed(draw, scope, (code, (size, *shape)))
        if size > 6 or not shape:
            return inside()
        return form.format(t=t, inner=inside(tables=[(t, tuple(shape))]), table=code)

    many, one = (ids(draw, scope, 6, axes) for axes in (1, 0))
    counter = pick(draw, many, f'jnp.arange(3, dtype="{pick(draw, *scope.dtypes)}")')
    scalar = [(k, 0)]
    forms = {
        "add": lambda: f"({inside()} + {inside()} * P['s'][0])",
        "jit": lambda: f"jax.jit(lambda: {inside()})()",
        "checkpoint": lambda: f"jax.checkpoint(lambda P, A: {inside()})(P, A)",
        "cond": lambda: f"lax.cond({one} > 2, lambda: {inside()}, lambda: {inside()} * 2)",
        "switch": lambda: f"lax.switch({one}, [lambda: {inside()}, lambda: {inside()}])",
        "vmap": lambda: f"jax.vmap(lambda {k}: {inside(ids=scalar)})({counter}).sum()",
        "scan": lambda: f"lax.scan(lambda c, {k}: (c / 2 + {inside(ids=scalar)}, "
        f"None), jnp.float32(0), {counter})[0]",
        "fori": lambda: f"lax.fori_loop(0, 2, lambda {k}, c: c / 2 + "
        f"{inside(ids=scalar)}, jnp.float32(0))",
        "custom": lambda: f"({function(draw)})(({inside()})[None]).sum()",
    }
    dense = {  # some of them
        "grad": lambda: f"jax.grad(lambda P: {inside()})(P)['a'].sum()",
        "vmap_tables": lambda: of_tables("jax.vmap(lambda {t}: {inner})({table}).sum()"),
        "scan_tables": lambda: of_tables(
            "lax.scan(lambda c, {t}: (c, {inner}), 0, {table})[1].sum()"
        ),
    }
    forms |= {} if sure else dense
    form = pick(draw, *forms)
    return forms[form]()


SHAPES = [(6, 3), (6, 2, 3), (300, 2, 1), (2, 4, 3), (6,), (300, 2), (4, 4), (200, 3)]
FLOATS = ["float32"] * 3 + ["bfloat16", "float16", "complex64", "float64"]
INTEGERS = [f"{sign}int{bits}" for bits in (32, 8, 16, 64) for sign in ("", "u")]


class Program(NamedTuple):
    """A program, which is printed as code that runs by itself."""

    code: str
    order: int  # of the derivative
    sure: bool  # that every gradient of a table is rows

    def __repr__(self):
        grads = (self.grad(module) for module in ("js", "jax"))
        return (PREAMBLE + self.code + "print({}(P, A))\nembedding_lookup = lookup\n"
                "print({}(P, A))\n").format(*grads)

    def grad(self, module):
        """Code for the function that gives value and gradient."""
        loss = "loss" if self.order == 1 else f"second({module}.grad)"
        return f"{module}.value_and_grad({loss})"

    def of(self, module):
        """This function, and what it is called with."""
        names = {}
        exec(PREAMBLE + self.code, names)
        if module == "jax":
            names["embedding_lookup"] = names["lookup"]
        return eval(self.grad(module), names), (names["P"], names["A"])


def program(draw, x64):
    sure = pick(draw, False, False, False, True) and not x64
    dtypes = tuple(INTEGERS if x64 else INTEGERS[:6])
    shapes = {"a": (6, 3), "b": (6, 3), "c": pick(draw, *SHAPES), "d": pick(draw, *SHAPES)}
    kinds = FLOATS if x64 else FLOATS[:-1]
    params = [
        f'"{name}": array({shape}, "{"float32" if name in "ab" else pick(draw, *kinds)}", {seed})'
        for seed, (name, shape) in enumerate(shapes.items())
    ]
    params += ['"w": array((3, 3), "float32", 5)', '"s": array((6,), "float32", 6)']
    args = [
        f'"{name}": jax.device_put({numbers(draw, height, pick(draw, *dtypes))})'
        for name, height in [("i", 6), ("j", pick(draw, 3, 6, 300))]
    ]
    tables = tuple((f"P['{name}']", shape) for name, shape in shapes.items())
    scope = Scope(tables, (("A['i']", 1), ("A['j']", 1)), dtypes)
    body = nested(draw, scope, sure, draw(st.sampled_from([0, 0, 0, 1, 1, 2])))
    code = f"jax.config.update('jax_enable_x64', {x64})\n" if x64 else ""
    code += f"P = {{{', '.join(params)}}}\nA = {{{', '.join(args)}}}\n"
    return Program(code + f"def loss(P, A):\n    return {body}\n", pick(draw, 1, 1, 2), sure)


class Batch(NamedTuple):
    """Programs that are compiled as one, or not at all."""

    x64: bool
    jit: bool
    programs: list


@st.composite
def batches(draw):
    x64 = draw(st.booleans())
    some = st.lists(st.composite(program)(x64), min_size=pick(draw, 1, 10, 10), max_size=10)
    return Batch(x64, pick(draw, True, True, False), draw(some))


def outcomes(batch):
    """For each program that JAX takes, what jslices and what JAX gives, and the program."""
    traced, found = [], []
    for program in batch.programs:
        theirs, args = program.of("jax")
        try:
            wanted = jax.make_jaxpr(theirs, return_shape=True)(*args) if batch.jit else theirs(*args)
        except Exception:  # no program of JAX's
            continue
        try:
            ours, args = program.of("js")
            if batch.jit:
                traced.append((jax.make_jaxpr(ours, return_shape=True)(*args), wanted, args))
                found.append(program)
            else:
                yield ours(*args), wanted, program
        except Exception:
            note(program)
            raise
    if not traced:
        return
    call = lambda x, args: jaxpr_as_fun(x[0])(*jax.tree.leaves(args))
    @jax.jit
    def run(args):
        return [(call(ours, a), call(theirs, a)) for (ours, theirs, _), a in zip(traced, args)]
    results = run([args for *_, args in traced])
    for (ours, theirs), (x, y, _), program in zip(results, traced, found, strict=True):
        yield *(jax.tree.unflatten(jax.tree.structure(t[1]), r) for t, r in ((x, ours), (y, theirs))), program


def check(batch):
    with jax.enable_x64(batch.x64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found, wanted, program in outcomes(batch):
            try:
                close(found, wanted, 3e-2 if "float16" in program.code else 1e-3)
                if program.sure and program.order == 1:
                    assert all(js.is_slices(found[1][name]) for name in "ab")
            except AssertionError:
                note(program)
                raise


def close(found, wanted, rtol):
    found, wanted = numpy_tree(found), numpy_tree(wanted)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        wide = complex if np.iscomplexobj(x) else float
        x, y = x.astype(wide), y.astype(wide)
        size = np.abs(y[np.isfinite(y)]).max(initial=1)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol / 30 * size)
