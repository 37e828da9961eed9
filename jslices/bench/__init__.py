"""The measurement of a user's own sizes, row gradients against dense ones."""
