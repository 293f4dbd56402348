"""Two islands train one model and exchange what they have learned every few steps.

    zeroxla launch --islands 2 -- python examples/two_islands.py

Each island is a program of its own on its own devices, and reads its own part of the data. Between
exchanges nothing crosses the network between them. On two hosts:

    export ZEROXLA_ISLANDS_TOKEN=...                    # the same secret everywhere
    zeroxla coordinate --islands 2 --listen 0.0.0.0:7000                      # on one of them
    zeroxla island --join HOST:7000 -- python examples/two_islands.py         # on each
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import numpy as np
import optax

import zeroxla
from zeroxla.models import GPT


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one model on two islands.")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent.parent / "docs")
    parser.add_argument("--run", type=Path, default=Path("runs/islands"))
    parser.add_argument("--steps", type=int, default=100, help="of each island")
    parser.add_argument("--every", type=int, default=20, help="steps between exchanges")
    parser.add_argument("--bits", type=int, default=4, choices=[4, 8], help="of what is exchanged")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()

    zeroxla.initialize()
    mesh = zeroxla.make_mesh()
    text = b"\0".join(file.read_bytes() for file in sorted(args.data.rglob("*.md")))
    text = np.frombuffer(text, np.uint8)

    def batch_of(part: int, number: int) -> dict[str, np.ndarray]:
        # Island `part` never draws what another island draws.
        starts = np.random.default_rng([part, number]).integers(
            0, len(text) - args.length - 1, args.batch
        )
        return {"tokens": np.stack([text[i : i + args.length + 1] for i in starts]).astype(int)}

    wire = zeroxla.WireFormat(bits=args.bits)
    config = zeroxla.ZeroConfig(outer=zeroxla.Outer(every=args.every, wire=wire))
    model = GPT(vocab=256, length=args.length, layers=2, width=args.width, heads=4)
    step = zeroxla.make_step(model, mesh, optax.adamw(3e-3), config=config)
    with zeroxla.Island(step) as island:
        validation = batch_of(1000, 0)
        state = island.init(jax.random.key(0), validation)  # the same key on all islands
        for number in range(island.position.batches, args.steps):
            state, metrics = island(state, batch_of(island.slot, number))
            if "outer_bytes" in metrics:
                print(
                    f"island {island.slot}, step {number + 1}: loss {float(metrics['loss']):.3f}; "
                    f"exchanged {metrics['outer_bytes'] / 1e3:,.0f} kB with "
                    f"{metrics['outer_islands'] - 1} other",
                    flush=True,
                )
        state = island.settle(state)  # merges what is under way
        shared = island.shared(state)  # what all islands have learned
        loss = float(step.eval(shared, validation)["loss"])
        print(f"island {island.slot}: validation loss {loss:.3f} of the shared model", flush=True)
        if island.slot == 0:
            zeroxla.export_params(shared, args.run, model=model)
            print(f"wrote {args.run}")


if __name__ == "__main__":
    main()
