"""`RunsOn`: what rewritten programs run on, as far as their form depends on it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunsOn:
    """The devices of a mesh.

    Attributes:
      cpus: whether they are CPUs, for which XLA cannot compile all products of 16-bit arrays that
        are added up in float32.
      split_axes: whether axes split the work on one row. What runs in a branch (`cond`) is not
        split, so a program then has no branches.
    """

    cpus: bool
    split_axes: bool
