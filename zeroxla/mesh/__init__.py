"""Mesh axes, processes, and where arrays and batches lie on them; devices and links as data."""
