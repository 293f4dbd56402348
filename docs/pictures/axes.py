"""Draw docs/pictures/axes_*.png: GPT-2 over tensor and over context, Mixtral 8x7B over experts.

    python docs/pictures/axes.py [folder]

Nothing is computed: the plans are those of steps that have been given shapes alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import optax

import zeroxla
from zeroxla import inspect
from zeroxla.models import GPT, Mixtral


def main(folder: Path) -> None:
    zeroxla.simulate(4)
    matplotlib.rcParams["svg.hashsalt"] = "zeroxla"
    gpt = GPT(vocab=50304)
    draw(folder / "axes_tensor.png", gpt, {"tensor": 4}, 1024)
    draw(folder / "axes_context.png", gpt, {"context": 4}, 1024)
    draw(folder / "axes_expert.png", Mixtral.mixtral_8x7b(), {"expert": 4}, 4096)


def draw(path: Path, model: Any, axes: dict[str, int], length: int) -> None:
    """Draw a step on four devices with four rows, of so many positions."""
    step = zeroxla.make_step(model, zeroxla.make_mesh(**axes), optax.adamw(1e-4))
    step.abstract_state({"tokens": jax.ShapeDtypeStruct((4, length + 1), jnp.int32)})
    inspect.plot_axes(step, path=path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
