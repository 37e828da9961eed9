"""Moving rows, gradients and ids over the devices of a mesh."""
