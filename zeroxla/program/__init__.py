"""Traced and compiled programs as data: equations, loops, names of primitives, HLO text.

The lowest room: it imports nothing else of zeroxla.
"""
