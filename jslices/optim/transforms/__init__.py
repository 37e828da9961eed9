"""Gradient transformations and wrappers of optimizers.

``norms`` measures gradients and ``clip`` limits them; ``chain`` puts transformations one
after the other, ``partition`` gives parameters different ones; ``accumulate`` and
``multi_steps`` add up the gradients of micro-batches; ``per_example`` clips those of single
examples; ``rows`` freezes rows and limits their norms; ``from_optax`` lifts any
transformation of Optax to rows.
"""
