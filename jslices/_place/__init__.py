"""Where arrays are: meshes, types, layouts and the memory of this process."""
