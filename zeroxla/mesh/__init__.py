"""Mesh axes, processes, and the placement of arrays and batches; devices and links as data."""
