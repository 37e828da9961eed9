"""What to write instead of a use that needs the whole table."""

_REPLICATED = (
    "inside a shard_map let the table differ between devices first, table = "
    "jax.lax.pcast(table, axis, to='varying'), and add the slices up with "
    "jslices.all_reduce_slices(slices, axis, 'sum')"
)
_BY_PRIMITIVE = {
    "dot_general": "a product with the whole table has a dense gradient: score only "
    "some rows, h @ table[candidates].T, or keep a separate output matrix",
    "transpose": "table.T is mostly the output layer of tied weights: score only some "
    "rows, h @ table[candidates].T, or keep a separate output matrix",
    "custom_jvp_call": "apply the function after the lookup, f(table[ids]), not before it",
    "custom_vjp_call": "apply the function after the lookup, f(table[ids]), not before it",
    "gather": "look up whole rows first: table[rows][..., columns]",
    "dynamic_slice": "look up whole rows first: table[rows][..., columns]",
    "slice": "look the rows up with an array of ids, table[jnp.arange(n)], if they are few",
    "squeeze": "look the row up with an array of ids, table[jnp.array([i])][0]",
    "scan": "let the loop's body read the table from outside, instead of carrying it or "
    "looping over its rows",
    "while": "a while loop hides the lookup; jax.lax.fori_loop with a fixed number of "
    "turns, or jax.lax.scan, does not",
    "cond": "do not return the table from a branch; look the rows up inside it",
    "sort": "sort the rows that were looked up, not the table",
    "pvary": _REPLICATED,
    "pcast": _REPLICATED,
    "shard_map": "call jslices.grad inside the shard_map, not around it",
}
_REDUCTION = (
    "penalise the rows that were looked up, (rows**2).sum(), or put "
    "jax.lax.stop_gradient round a mere measurement"
)
_OTHERWISE = (
    "look up the rows that are needed, table[ids], before this step, or put "
    "jax.lax.stop_gradient round it"
)


def instead_of(primitive: str) -> str:
    """A suggestion for a use by the primitive of this name."""
    if primitive.startswith("reduce_") or primitive in ("argmax", "argmin", "cumsum"):
        return _REDUCTION
    return _BY_PRIMITIVE.get(primitive, _OTHERWISE)
