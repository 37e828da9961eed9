"""docs/optimizers.md is true: its numbers are recomputed, no optimizer is missing."""

import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jslices as js

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "optimizers.md"
V, D = 10**9, 128
EXPORTED = {
    name
    for name, thing in vars(js).items()
    if inspect.isfunction(thing)
    and inspect.get_annotations(thing).get("return") is js.GradientTransformation
}


def rows(header):
    """The cells of the table that starts with ``header``."""
    _, _, table = PAGE.read_text().partition(header)
    lines = table.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


STATE = rows("| optimizer | untouched rows |")
EQUAL = rows("| optimizer | dense gradients |")


def make(call, **more):
    """The optimizer that a cell such as ``adam(lr)`` names, a keyword added."""
    name = call[: call.index("(")]
    args = re.sub(r"\)`$", "", call[len(name) + 1 :])
    known = {"make": getattr(js, name[1:]), "optax": optax, "lr": 0.1, "more": more}
    return eval(f"make({args}, **more)", known)


def state_bytes(tx, rows=V):
    table = jax.ShapeDtypeStruct((rows, D), jnp.float32)
    leaves = jax.tree.leaves(jax.eval_shape(tx.init, table))
    return sum(x.size * x.dtype.itemsize for x in leaves)


def row_bytes(tx):
    """What one row more costs: leaves out what a table has once."""
    return state_bytes(tx, 1001) - state_bytes(tx, 1000)


def numbers(cell):
    """``2 D + 5`` as a number."""
    assert re.fullmatch(r"(\d+ )?D( \+ \d+)?|\d+", cell), cell
    return eval(cell.replace(" D", " * D"), {"D": D})


@pytest.mark.parametrize("cells", STATE, ids=lambda cells: cells[0])
def test_state(cells):
    call, untouched, lazy, exact, lazy_bytes, exact_bytes = cells
    tx = make(call)
    assert lazy_bytes == f"{state_bytes(tx) / 1e9:,.0f} GB"
    assert 4 * numbers(lazy) == row_bytes(tx)
    if (exact, exact_bytes) == ("-", "-"):
        assert untouched in ("lazy", "as dense")
        name = call[1 : call.index("(")]
        if "untouched" in inspect.signature(getattr(js, name)).parameters:
            with pytest.raises(ValueError, match="there is no exact form"):
                make(call, untouched="exact")
    else:
        tx = make(call, untouched="exact")
        assert exact_bytes == f"{state_bytes(tx) / 1e9:,.0f} GB"
        assert 4 * numbers(exact) == row_bytes(tx)
        assert untouched == ("lazy or exact" if tx.catches_up else "as dense")


def test_state_under_a_schedule():
    """Is that of a constant rate."""
    for name in {cells[0][1:].partition("(")[0] for cells in STATE if cells[3] != "-"}:
        constant, scheduled = (
            row_bytes(getattr(js, name)(rate, untouched="exact"))
            for rate in (0.1, optax.linear_schedule(0.1, 0.0, 9))
        )
        assert constant == scheduled


def test_no_optimizer_is_missing():
    assert {"sgd", "adafactor", "from_optax"} < EXPORTED
    assert {cells[0][1:].partition("(")[0] for cells in STATE} == EXPORTED
    assert {cells[0].strip("`") for cells in EQUAL} == EXPORTED


@pytest.mark.parametrize("name, equal, _", EQUAL, ids=lambda cell: cell)
def test_names_of_optax_are_what_the_docstrings_say(name, equal, _):
    doc = inspect.getdoc(getattr(js, name.strip("`")))
    theirs = re.findall(r"`(optax\.\w+)`", equal)
    assert all(f"``{their}``" in doc and hasattr(optax, their[6:]) for their in theirs)
    assert bool(theirs) == (name.strip("`") in dir(optax))


@pytest.mark.parametrize("name", sorted(EXPORTED))
def test_docstrings_say_what_untouched_rows_do(name):
    doc = inspect.getdoc(getattr(js, name))
    assert re.search(r"^Untouched rows: (lazy( or exact)?|as dense)\. ", doc, re.M)
    kinds = {cells[1] for cells in STATE if cells[0].startswith(f"`{name}(")}
    assert re.search(r"^Untouched rows: ([\w ]*)\.", doc, re.M)[1] in kinds
