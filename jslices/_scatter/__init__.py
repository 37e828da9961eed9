"""Writing rows of an array: TensorFlow's ``scatter_*`` as pure functions.

Where they differ from TensorFlow's on purpose, docs/operations.md says so.
"""
