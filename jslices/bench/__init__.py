"""The command ``bench``: row gradients against dense ones, at a user's own sizes."""
