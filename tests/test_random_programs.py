"""Random programs: tables, ids, reads and control flow of every kind, against jax.grad.

Hypothesis draws a program as text, so that a failing one is printed, as small as it can be
made, as code that runs by itself. ``jax.grad`` of the same text is what is right; only
``js.embedding_lookup``, with its own meaning of bad ids, is written in plain JAX there.
"""

import math
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import examples
from helpers import numpy_tree
from hypothesis import given, note
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

def scatter(table, number, mode):  # another row in the place of one
    rows = jnp.full(table.shape[1:], 0.5, table.dtype)
    numbers = lax.ScatterDimensionNumbers(tuple(range(rows.ndim)), (0,), (0,))
    return lax.scatter(table, jnp.asarray(number)[None], rows, numbers, mode=mode)

def slice_p(table, *starts, sizes):
    sizes = (*sizes, *table.shape[len(sizes):])
    starts += (starts[0].dtype.type(0),) * (table.ndim - len(starts))
    # XLA takes large constants for negative ones, if they are unsigned.
    starts = map(lax.optimization_barrier, map(jnp.asarray, starts))
    return lax.dynamic_slice_p.bind(table, *starts, slice_sizes=sizes)

def wide(ids, unsigned):  # if these are narrower than rows are many, XLA leaves the array
    return ids if ids.dtype != "int8" and unsigned else ids.astype(int)

def slice_inside(table, *starts, sizes):
    # XLA makes a slice of a slice one, whose start is the sum of both, wherever they end.
    inside = []
    for start, size, length in zip(starts, sizes, table.shape):
        last = min(length - size, jnp.iinfo(start.dtype).max)
        inside.append(jnp.clip(start, 0, start.dtype.type(last)))
    return slice_p(table, *inside, sizes=sizes)

def as_integers(ids, unsigned):  # the same rows
    most = min(jnp.iinfo(ids.dtype).max, 2**30)
    return jnp.minimum(ids, ids.dtype.type(most)).astype(int)

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
    by_pull = lambda y, pull: (y, lambda dy: (by * pull(dy)[0],))
    return jax.custom_gradient(lambda x: by_pull(*jax.vjp(f, x)))

def second(grad, loss):  # a loss made of the gradient of the loss
    whole = lambda g: g.to_dense() if js.is_slices(g) else g
    # Reads out of range send nothing back. The derivative of that by what the rows are
    # multiplied with is undefined: JAX takes another row's.
    fixed = lambda P: P | {k: lax.stop_gradient(P[k]) for k in "sw"}
    return lambda P, A: sum(
        total(whole(g))
        for g in jax.tree.leaves(grad(loss)(fixed(P), A), is_leaf=js.is_slices)
    )
"""


NAMES = {}
exec(PREAMBLE, NAMES)


class Scope(NamedTuple):
    """The expressions from which a program is made."""

    tables: tuple  # of (code, shape)
    ids: tuple  # of (code, number of axes)
    dtypes: tuple  # of ids
    narrow: bool = True  # whether ids may be too narrow for all rows


# --- ids --------------------------------------------------------------------------------


def edges(height, dtype):
    """Row numbers at which something may change."""
    limits = jnp.iinfo(dtype)
    numbers = [0, 1, height - 1, height, -1, -height, -height - 1, limits.max, limits.min]
    numbers += [limits.max - 1, 2**31, 2**32, 2**32 + 1, 2**32 + height - 1, -(2**32)]
    return [number for number in numbers if limits.min <= number <= limits.max]


def numbers(pick, height, dtype, count=4):
    drawn = [pick(*edges(height, dtype)) for _ in range(count)]
    return f'np.array({drawn}, "{dtype}")'


SCALARS = ("({i}) + 1", "({i}) * 2", "-({i})", "({i}) // 2", "({i}) % 6")
SCALARS += ("abs(({i}) // 2)",)  # to XLA that of the least integer is positive
SCALARS += ("jnp.minimum({i}, 5)", "({i}) - 2", "jnp.invert({i})", "lax.stop_gradient({i})")
SCALARS += ("lax.while_loop(lambda i: (i > 3).any(), lambda i: i // 2, {i})",)
LISTS = ("({i})[::-1]", "({i})[1:]", "({i})[:0]", "jnp.sort({i})", "jnp.cumsum({i})")
LISTS += ("jnp.stack([{i}] * 2)[1]", "jnp.concatenate([{i}] * 2)[1:4]")


def ids(pick, scope, shape, axis, axes):
    """An expression of so many axes for numbers along an axis of a table."""
    height, tall = shape[axis], max(shape) > 127
    code, ndim = pick(("", 1), *[("", 1)] * 2 * tall, *scope.ids)
    if not code:
        code = numbers(pick, height, pick(*scope.dtypes, *["uint8"] * 9 * tall))
    if pick(False, True):
        cast = f'({{i}}).astype("{pick(*scope.dtypes)}")'
        code = pick(*SCALARS, cast, *LISTS * (ndim == axes == 1)).format(i=code)
    code = f"jnp.asarray({code})"
    if tall:
        code = f"wide({code}, {scope.narrow})"
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


def function(pick, depth=2):
    """A function with a derivative of its own, or around others."""
    inner = function(pick, depth - 1) + "(x)" if depth and pick(False, True) else "x"
    forms = "{}", "{} * 2", "jnp.sin({})", "{}[::-1]", "x * {}", "({}) - x.mean(0)[None]"
    body = pick(*forms, "({}).T").format(inner)
    wrap = pick("jvp_by({}, 2)", "vjp_by({}, 3)", "grad_by({}, 2)", "jax.jit({})")
    return wrap.format(f"lambda x: {body}")


#: Slices that start at a number.
STARTS = ("lax.dynamic_index_in_dim({t}, {i}, {axis}, {yes})",)
STARTS += ("lax.dynamic_slice_in_dim({t}, {i}, {some}, {axis})",)
STARTS += ("slice_p({t}, *[{i}] * {n}, sizes={sizes})",)
#: Functions that change the shape, some of them more often.
CHANGES = ("({t}).reshape(-1, *{shape}[2:])", "({t}).reshape(2, -1, *{shape}[1:])") * 2
CHANGES += ("{f}({t})", "lax.dynamic_slice({t}, {starts}, {sizes})", "({t})[None]") * 2
CHANGES += ("(lambda t: lax.pad(t, t.dtype.type(0.5), {widths}))({t})",) * 2
CHANGES += ("(lambda t: jnp.pad(t, [(1, 1)] + [(0, 0)] * (t.ndim - 1)))({t})",) * 2
CHANGES += ("scatter({t}, {i}, {m})",) * 2 + STARTS + STARTS[::2]
CHANGES += ("({t}).at[{i}].set(0.5, mode={m})", "({t}).at[{is}].set(0.5, mode={m})")
CHANGES += ("({t})[{all}{i}]", "({t})[{all}{ids}]", "jnp.moveaxis({t}, {axis}, 0)")
CHANGES += ("({t})[{all}-{some}:]", "({t})[{all}::{some}]")
CHANGES += ("(lambda t: jnp.stack([t, t * 2], {axis}))({t})",)
CHANGES += ("jnp.concatenate([{t}] * 2)[1:]",)
CHANGES += (*ALIKE, "jnp.repeat({t}, 2, {axis})", "jnp.broadcast_to({t}, (2, *{shape}))")


def changed(pick, scope, table):
    """A table made of a table."""
    code, shape = table
    axis, n = pick(*range(len(shape))), len(shape)
    some = pick(*range(1, shape[axis] + 1))
    tall = shape[axis] > 127  # as narrow numbers are for
    form = pick(*(STARTS if tall and pick(True, True, False) else CHANGES))
    holes = {
        "f": f"({function(pick)})" if "{f}" in form else "",
        "starts": [pick(*edges(shape[axis], "int8")) for _ in shape],
        "sizes": tuple(pick(size, 1, min(size, 2)) for size in shape),
        "widths": [(0, 0, 0)] * axis
        + [(pick(0, 1, -1), pick(0, 1), pick(0, 1))]
        + [(0, 0, 0)] * (n - axis - 1),
        "all": ":, " * axis,
        "m": pick("None", '"drop"', '"clip"'),
        "yes": pick(False, True),
    }
    holes |= {"axis": axis, "some": some, "n": n, "shape": shape}
    rows = {"i": 0, "is": 1, "ids": 2}
    plain = {name: f"np.zeros({(2,) * axes}, int)" for name, axes in rows.items()}
    drawn = {
        name: ids(pick, scope, shape, axis, axes) if f"{{{name}}}" in form else ""
        for name, axes in rows.items()
    }
    try:
        f = eval("lambda t: " + form.format(t="t", **plain, **holes), NAMES)
        new = jax.eval_shape(f, jax.ShapeDtypeStruct(shape, "float32")).shape
    except (TypeError, ValueError):
        return table  # of which this cannot be made
    fits = new and len(new) < 5 and 0 < math.prod(new) < 2000
    return (form.format(t=code, **drawn, **holes), new) if fits else table


# --- reads ------------------------------------------------------------------------------

MODES = ('"fill"', '"clip"', "None", '"wrap"')
#: Reads of rows, and then all of them.
SURE = ("({t})[{i}]", "embedding_lookup({t}, {i}, mode={m})", "(equal({i}, {t}) @ ({t}))")
SURE += ("jnp.take({t}, {i}, axis=0, mode={m})", "jax.nn.one_hot({i}, {n}) @ ({t})")
SURE += ("({t}).at[{i}].get(mode={m}, fill_value=0.5)", "matrix({i}, {t}) @ ({t})")
READS = (*SURE[:2], *SURE[1:6], "gather({t}, {i}, ({some},), {m})", "({t})[..., {i}]")
READS += ("jax.vmap(lambda k: lax.dynamic_index_in_dim({t}, k, 0))({i}.reshape(-1))",)
READS += ("jnp.tensordot(equal({i}, {t}), {t}, 1)", "slice_p({t}, {k}, sizes=({some},))")
READS += ("jax.vmap(lambda k: slice_p({t}, k, sizes=({some},)))({i}.reshape(-1))",)
READS += ("jnp.take({t}, {i}, axis=-1, mode={m})", "{t}", "{t}", "{t}")
TWO = ("({t})[{i}, {j}]", "({t})[{i}, :2]", "({t})[{i}, ::-1]", "({t})[{i}, 1]")
TWO += ("gather({t}, ({i}, {i}), ({some}, 1), {m})", "({t})[:, {j}]", "({t})[{i}, -1:]")
TWO += ("({t}).at[{i}, {j}].get(mode={m}, fill_value=0.5)", "({t})[{i}, {k}]")
TWO += ("({t}).at[{i}, :2].get(mode={m}, fill_value=0.5)",)
TWO += ("jax.vmap(lambda k: slice_p({t}, k, k, sizes=({some}, 1)))({i}.reshape(-1))",)


def read(pick, scope, table, sure):
    code, shape = table
    axes = pick(0, 1, 2)
    forms = SURE if sure else READS + TWO * (len(shape) > 1)
    form = pick(*forms)
    if "gather" in form or "vmap" in form:
        scope = scope._replace(narrow=False)
    modes = MODES if "take(" in form else MODES[:2]
    return form.format(
        t=code,
        n=shape[0],
        i=ids(pick, scope, shape, 0, axes) if "{i}" in form else "",
        j=ids(pick, scope, shape, -1, axes) if "{j}" in form else "",
        k=ids(pick, scope, shape, 0, 0) if "{k}" in form else "",
        m=pick(*modes) if "{m}" in form else "",
        some=pick(*range(1, shape[0] + 1)) if "{some}" in form else "",
    )


def one_loss(pick, scope, sure):
    """A scalar made of rows."""
    table = pick(*scope.tables[: 2 if sure else None])
    for _ in range(pick(0, 1) if sure else pick(0, 1, 1, 2, 2, 3)):
        if sure:
            table = pick(*ROWWISE).format(t=table[0]), table[1]
        else:
            table = changed(pick, scope, table)
    form = pick("total({})", "total(jnp.sin({}))", "total(({}) ** 2)")
    return form.format(read(pick, scope, table, sure))


def nested(pick, scope, sure, depth, level=0):
    """An expression for a scalar; ``level`` numbers the names it binds."""
    if not depth:
        return one_loss(pick, scope, sure)
    k, t = f"k{level}", f"t{level}"

    def inside(**more):
        new = {n: (*x, *getattr(scope, n)) for n, x in more.items()}
        narrow = scope.narrow and form not in ("vmap", "vmap_tables")
        new = scope._replace(**new, narrow=narrow)
        return nested(pick, new, sure, depth - 1, level + 1)

    def of_tables(form):
        code, (size, *shape) = pick(*scope.tables)
        if size > 6 or not shape:
            return inside()
        return form.format(t=t, inner=inside(tables=[(t, tuple(shape))]), table=code)

    many, one = (ids(pick, scope, (6,), 0, axes) for axes in (1, 0))
    counter = pick(many, f'jnp.arange(3, dtype="{pick(*scope.dtypes)}")')
    scalar = [(k, 0)]
    forms = {
        "add": lambda: f"({inside()} + {inside()} * P['s'][0])",
        "jit": lambda: f"jax.jit(lambda: {inside()})()",
        "checkpoint": lambda: f"jax.checkpoint(lambda P, A: {inside()})(P, A)",
        "cond": lambda: f"lax.cond({one} > 2, lambda: {inside()}, lambda: {inside()} * 2)",
        "switch": lambda: f"lax.switch({one}, [lambda: {inside()}, lambda: {inside()}])",
        "vmap": lambda: f"jax.vmap(lambda {k}: {inside(ids=scalar)})({counter}).sum()",
        "scan": lambda: (
            f"lax.scan(lambda c, {k}: (c / 2 + {inside(ids=scalar)}, "
            f"None), jnp.float32(0), {counter})[0]"
        ),
        "fori": lambda: (
            f"lax.fori_loop(0, 2, lambda {k}, c: c / 2 + "
            f"{inside(ids=scalar)}, jnp.float32(0))"
        ),
        "custom": lambda: f"({function(pick)})(({inside()})[None]).sum()",
    }
    not_rows = {  # or not always
        "grad": lambda: f"jax.grad(lambda P: {inside()})(P)['a'].sum()",
        "vmap_tables": lambda: of_tables("jax.vmap(lambda {t}: {inner})({table}).sum()"),
        "scan_tables": lambda: of_tables(
            "lax.scan(lambda c, {t}: (c, {inner}), 0, {table})[1].sum()"
        ),
    }
    forms |= {} if sure else not_rows
    form = pick(*forms)
    return forms[form]()


SHAPES = [(6, 3), (6, 2, 3), (300, 2, 1), (2, 4, 3), (6,), (300, 4, 1), (4, 4), (200, 3)]
FLOATS = ["float32"] * 3 + ["bfloat16", "float16", "complex64", "float64"]
INTEGERS = [f"{sign}int{bits}" for bits in (32, 8, 16, 64) for sign in ("", "u")]


class Program(NamedTuple):
    """A program, which is printed as code that runs by itself."""

    code: str
    x64: bool
    order: int  # of the derivative
    sure: bool  # that every gradient of a table is rows

    def __repr__(self):
        code = f'jax.config.update("jax_enable_x64", {self.x64})\n{self.code}'
        code += f"print({self.grad('js')}(P, A))\nembedding_lookup = lookup\n"
        return f"{PREAMBLE}\n{code}print({self.grad('jax')}(P, A))\n"

    def grad(self, module):
        """Code for the function that gives value and gradient."""
        loss = "loss" if self.order == 1 else f"second({module}.grad, loss)"
        return f"{module}.value_and_grad({loss})"

    def names(self, **more):
        """What the program defines: ``loss``, and its arguments ``P`` and ``A``."""
        names = NAMES | more
        exec(self.code, names)
        return names

    def result(self, module, jit, widen="wide"):
        """Value and gradients; or what :func:`run` takes, to compile many as one."""
        names = self.names(wide=NAMES[widen])
        if widen == "as_integers":
            names["slice_p"] = NAMES["slice_inside"]
        if module == "jax":
            names["embedding_lookup"] = NAMES["lookup"]
        f, args = eval(self.grad(module), names), (names["P"], names["A"])
        return (jax.make_jaxpr(f, return_shape=True)(*args), args) if jit else f(*args)


def program(pick, x64, sure=False):
    sure = sure or (pick(*range(6)) == 5 and not x64)
    dtypes = tuple(INTEGERS if x64 else INTEGERS[:6])
    shapes = {"a": (6, 3), "b": (6, 3), "c": pick(*SHAPES), "d": pick(*SHAPES)}
    kinds = FLOATS if x64 else FLOATS[:-1]
    params = [
        f'"{name}": array({shape}, "{"float32" if name in "ab" else pick(*kinds)}", {seed})'
        for seed, (name, shape) in enumerate(shapes.items())
    ]
    params += ['"w": array((3, 3), "float32", 5)', '"s": array((6,), "float32", 6)']
    args = [
        f'"{name}": jax.device_put({numbers(pick, height, pick(*dtypes))})'
        for name, height in [("i", 6), ("j", pick(3, 6, 300))]
    ]
    tables = tuple((f"P['{name}']", shape) for name, shape in shapes.items())
    scope = Scope(tables if sure else tables[2:], (("A['i']", 1), ("A['j']", 1)), dtypes)
    body = nested(pick, scope, sure, pick(0, 0, 0, 0, 1, 2))
    code = f"P = {{{', '.join(params)}}}\nA = {{{', '.join(args)}}}\n"
    code += f"def loss(P, A):\n    return {body}\n"
    many = " @ " in body and any(loop in body for loop in ("scan", "vmap", "fori"))
    # A function of all that is read has reads out of range in its second derivative, where
    # JAX counts rows that its first one leaves out.
    order = 1 if ")[None]).sum()" in body else pick(*[1] * 9, 2)
    return Program(code, x64, order, sure and not many)  # which stay products


@st.composite
def batches(draw, x64):
    """Programs, and whether they are compiled: ten as one, which is what takes least.

    One whose operations run one by one takes as long as these.
    """
    rng = draw(st.randoms(use_true_random=False))  # its numbers are drawn, and shrink
    pick = lambda *options: rng.choice(options)  # noqa: E731
    jit = pick(*[True] * 9, False)
    return [program(pick, x64) for _ in range(pick(1, *[10] * 9) if jit else 1)], jit


def run(traced):
    call = lambda program, args: jaxpr_as_fun(program[0])(*jax.tree.leaves(args))  # noqa: E731
    programs, args = zip(*traced, strict=True)
    outputs = jax.jit(lambda args: list(map(call, programs, args)))(args)
    shapes = [jax.tree.structure(shape) for _, shape in programs]
    return list(map(jax.tree.unflatten, shapes, outputs))


def by_jax(program, jit, widen="wide"):
    """What JAX gives; None if this is no program of JAX's."""
    try:
        return program.result("jax", jit, widen)
    except Exception:
        return None


def check(programs, jit):
    with jax.enable_x64(programs[0].x64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = [by_jax(program, jit) for program in programs]
        programs = [p for p, y in zip(programs, wanted, strict=True) if y is not None]
        wanted = [y for y in wanted if y is not None]
        found = [showing(program, Program.result, "js", jit) for program in programs]
        if jit and programs:
            results = run([*found, *wanted])
            found, wanted = results[: len(programs)], results[len(programs) :]
        for program, x, y in zip(programs, found, wanted, strict=True):
            showing(program, compare, x, y, jit)


def showing(program, f, *args):
    """``f(program, *args)``; if that fails, the program is printed."""
    try:
        return f(program, *args)
    except Exception:
        note(program)
        raise


def compare(program, found, wanted, jit):
    # Second derivatives of 16 bits cancel: 5 % of the largest were seen.
    rtol = 0.1 if "float16" in program.code else 1e-3
    if not all(close(x, rtol, y) for x, y in pairs_of(found, wanted)):
        # Of starts too narrow or too large for a slice JAX makes this or that, by turns.
        others = by_jax(program, not jit), by_jax(program, jit, "as_integers")
        others = [run([y])[0] if type(y[0]) is tuple else y for y in others]
        pairs = (pairs_of(found, y) for y in [wanted, *others])
        for (x, y), *more in zip(*pairs, strict=True):
            assert close(x, rtol, y, *(z for _, z in more)), f"jslices: {x}\nJAX: {y}"
    if program.sure and program.order == 1:
        assert all(js.is_slices(found[1][name]) for name in "ab")


def pairs_of(found, wanted):
    found, wanted = numpy_tree(found), numpy_tree(wanted)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    return list(zip(*map(jax.tree.leaves, (found, wanted)), strict=True))


def close(x, rtol, *wanted):
    """Whether all elements of an array are those of one of the others."""
    good = np.zeros(x.shape, bool)
    for y in wanted:
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        y = np.asarray(y, complex if np.iscomplexobj(y) else float)
        size = np.abs(y[np.isfinite(y)]).max(initial=1)
        atol = (rtol if rtol > 1e-2 else rtol / 30) * size
        good |= np.isclose(x.astype(y.dtype), y, rtol, atol, equal_nan=True)
    return good.all()


BOTH = pytest.mark.parametrize("x64", [False, True])


@BOTH
@examples(6)  # of ten programs each, but for a few
@given(data=st.data())
def test_a_few_random_programs(x64, data):
    check(*data.draw(batches(x64)))


@pytest.mark.fuzz
@pytest.mark.slow
@BOTH
@examples(140)
@given(data=st.data())
def test_random_programs(x64, data):
    check(*data.draw(batches(x64)))


def test_the_fuzz_can_fail():
    """A wrong value, a wrong gradient and a dense one are noticed."""
    code = "P = {{name: array((6, 3), 'float32', 0) for name in 'ab'}}\nA = {{}}\n"
    code += "embedding_lookup = lambda t, i: {}\ndef loss(P, A):\n"
    code += "    return total(embedding_lookup(P['a'], jnp.array([1, 7])))\n"
    check([Program(code.format("lookup(t, i)"), False, 1, True)], True)
    for wrong in (
        "t",
        "lookup(t[::-1], i)",
        "lookup(lax.stop_gradient(t), i)",
        "lookup(t.cumsum(0), i)",
    ):
        bad = Program(code.format(wrong), False, 1, True)
        with pytest.raises(AssertionError):
            compare(bad, bad.result("js", False), bad.result("jax", False), False)
