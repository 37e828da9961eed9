"""Row gradients: trace the function, find the lookups, differentiate around them.

Read from the top:

    api         ``grad``, ``value_and_grad``, ``vjp``: plan a call, run it, assemble
    plan        one call: its traced program, its leaves, which of them are sparse
    interpret   the one walk over the program, which plans its lookups or runs them
    rules       the steps that commute with a lookup; ``register_rowwise``
    custom      functions with derivatives of their own, as such steps
    lookups     the forms of a lookup
    views       what a variable is, in terms of the tables that it was computed from
    memo        what is kept from call to call where there is no ``jax.jit``
    unread      lookups that are not read as rows: what to warn of
    ids         ``lookup_ids``: the rows that a call is about to read
    explain     what is said of a plan: the report, the warning, the error

All that depends on the JAX release stands in ``jslices/_jax.py``.
"""
