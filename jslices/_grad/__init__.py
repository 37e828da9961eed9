"""Row gradients: trace the function, find the lookups, differentiate around them.

Read from the top:

    api         ``grad``, ``value_and_grad``, ``vjp``: plan a call, run it, assemble
    call        the arguments of a call, its leaves, and the program that is traced of it
    arguments   argnums and has_aux: which arguments are differentiated
    plan        what is read of the leaves, and which of them are sparse
    run         the planned call, with a cotangent slot in every read
    walk        the one walk over programs, that planner, runner and other checks visit by
    reads       the forms of a read of rows, keyed by primitive
    products    those that are products with one-hot and sparse matrices
    origins     how variables were computed, where that tells what is read
    rules       the steps that commute with a read, keyed by primitive; ``register_rowwise``
    custom      functions with derivatives of their own, as such steps
    views       variables in terms of the tables that they were computed from
    memo        plans and compiled programs, kept from call to call without ``jax.jit``
    nnx         models of Flax NNX: states differentiated, changes lost
    untouched   what the update of an optimizer does to rows without a gradient
    unread      the search for lookups that are not read as rows
    ids         ``lookup_ids``: the rows that a call is about to read
    explain     the report of a plan, the warning, the error
    exchange_report  its part on rows that go from device to device

All that depends on the JAX release is in ``jslices/_jax.py``.
"""
