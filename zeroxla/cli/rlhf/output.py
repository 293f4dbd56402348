"""`RlhfOutput`: everything that `zeroxla rlhf` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from zeroxla.cli.train.output import Output, printable
from zeroxla.rlhf.loop import PHASES
from zeroxla.rlhf.phase_sums import PhasesMemory

NUM_LAST = 5
"""The number of iterations, at the end, whose mean reward is the run's result."""


class RlhfOutput(Output):
    """Prints in the first process, and nothing in the others."""

    def samples(self, title: str, samples: Sequence[tuple[str, str, float]]) -> None:
        """Print prompts, the actor's responses, and their rewards."""
        self.console.print(f"\n{title}:")
        for prompt, text, score in samples:
            line = Text.assemble(f"{score:6.2f}  ", on_a_line(prompt), (on_a_line(text), "bold"))
            self.console.print(line)

    def outcome(
        self, lines: Sequence[dict[str, Any]], reward: str, memory: PhasesMemory, path: Path
    ) -> None:
        """Print the actor's reward and divergence, and the time and memory of an iteration."""
        first, last = lines[0]["reward"], reached(lines)
        away = np.mean([line["kl"] for line in lines[-NUM_LAST:]])
        self.print(
            f"\nReward ({reward}) {first:.3f} at first, {last:.3f} in the last "
            f"{min(NUM_LAST, len(lines))} iterations; divergence from the reference {away:.3f} "
            "nats per token."
        )
        timed = lines[1:] or lines  # the first iteration compiles
        seconds = {name: float(np.mean([x[f"{name}_s"] for x in timed])) for name in PHASES}
        parts = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
        self.print(f"An iteration took {sum(seconds.values()):.2f} s: {parts}.")
        self.console.print(memory.table())
        self.print(f"Run folder: {path}")


def reached(lines: Sequence[dict[str, Any]]) -> float:
    """Return the mean reward of the last `NUM_LAST` iterations."""
    return float(np.mean([line["reward"] for line in lines[-NUM_LAST:]]))


def on_a_line(text: str) -> str:
    """Return a text on one line: an arrow stands for each end of a line."""
    return printable(text).replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}")


def as_text(samples: Sequence[tuple[str, str, float]]) -> str:
    """Return samples for a file, one line each, with the texts quoted as Python quotes them."""
    return "".join(f"{score:.4f}\t{prompt!r}\t{text!r}\n" for prompt, text, score in samples)
