"""Reads the collectives out of HLO text, and how often a step runs each of them.

`compiled.as_text()` and `lowered.as_text(dialect="hlo", debug_info=True)` give HLO text. It is the
only public form of a compiled program that names every collective, its wire dtype and its device
groups on every backend. This reader follows the grammar of XLA's own hlo_parser, as JAX 0.10.2 to
0.12 print it for CPUs and GPUs.

A program is a list of computations; a computation is a list of instructions. A collective inside a
loop runs once per trip, so its count is the product of the trip counts of all loops around it.
"""

from zeroxla.program.hlo.collectives import Collective, collectives
from zeroxla.program.hlo.replica_groups import replica_groups
from zeroxla.program.hlo.text import Instruction, Module, parse

__all__ = ["Collective", "Instruction", "Module", "collectives", "parse", "replica_groups"]
