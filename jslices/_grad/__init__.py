"""Row gradients: trace the function, find the lookups, differentiate around them.

``api`` is the public face. ``walk`` reads the traced program and decides for every array
whether it is only ever looked up; ``evaluate`` runs the program again with a slot in
every lookup. Both follow ``rules`` (steps that commute with a lookup), ``lookups`` (how
rows are read), ``views`` (what a variable is in terms of tables) and ``renumber`` (views
that number their rows otherwise). All that depends on
the JAX release stands in ``compat``.
"""
