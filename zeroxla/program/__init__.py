"""Traced programs as data: equations, loops, names of primitives, compiled text."""
