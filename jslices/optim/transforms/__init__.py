"""What people do around an optimizer, on rows: before the update, and after it.

Before: clipping (``clipping``, ``clip_value``, and as links of a chain
``clip_transforms``), norms, summing micro-batches (``accumulate``) and duplicates
(``combine``), freezing rows (``mask``), looking for NaN (``finite``), gradients of single
examples (``per_example``). After: keeping rows short (``project``).
"""
