"""Reading rows of a table, with a gradient that consists of rows.

Where they differ from TensorFlow's on purpose, docs/operations.md says so.
"""
