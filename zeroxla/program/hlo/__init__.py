"""Read the collectives out of HLO text, with how often a step runs each of them.

HLO text is what `compiled.as_text()` and `lowered.as_text(dialect="hlo", debug_info=True)` give. It
is read as text because that is the only public form of a compiled program that names every
collective, its wire dtype and its device groups, on every backend. The grammar followed here is
that of XLA's own hlo_parser, as printed by JAX 0.10.2 to 0.12 for CPUs and GPUs.

A program is a list of computations; a computation is a list of instructions. A collective inside
a loop runs once per trip, so the walk from the entry multiplies the trip counts of all loops
around it.
"""

from zeroxla.program.hlo.collectives import Collective, collectives
from zeroxla.program.hlo.replica_groups import replica_groups
from zeroxla.program.hlo.text import Instruction, Module, parse

__all__ = ["Collective", "Instruction", "Module", "collectives", "parse", "replica_groups"]
