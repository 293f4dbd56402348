"""Training in stages along the mesh axis `pipe`. Begin with `pipeline`."""
