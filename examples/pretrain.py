"""Train a byte-level GPT from scratch on text files, with checkpoints.

    python examples/pretrain.py --simulate 8 --data my_texts/ --run runs/pretrain

Interrupt it and start it again: it goes on where the last checkpoint is, on any number of devices.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import numpy as np
import optax

import zeroxla
from zeroxla.models import GPT


def read_text(folder: Path) -> np.ndarray:
    """Return the bytes of all text files of a folder, one file after the other."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in (".txt", ".md", ".py"))
    if not files:
        raise SystemExit(f"{folder} holds no .txt, .md or .py file; name another with --data")
    return np.frombuffer(b"\0".join(file.read_bytes() for file in files), np.uint8)


def batch_of(text: np.ndarray, number: int, rows: int, length: int) -> dict[str, np.ndarray]:
    """Return a batch of random pieces of the text. It depends on its number alone, so that a run
    which goes on sees the batches that it would have seen."""
    starts = np.random.default_rng(number).integers(0, len(text) - length - 1, rows)
    return {"tokens": np.stack([text[i : i + length + 1] for i in starts]).astype(np.int32)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT from scratch.")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent.parent / "docs")
    parser.add_argument("--run", type=Path, default=Path("runs/pretrain"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--simulate", type=int, default=0, help="devices to simulate on the CPU")
    args = parser.parse_args()

    if args.simulate:
        zeroxla.simulate(args.simulate)
    zeroxla.initialize()  # joins the processes of `zeroxla launch`; a process alone needs nothing
    mesh = zeroxla.make_mesh()
    model = GPT(
        vocab=256, length=args.length, layers=args.layers, width=args.width, heads=args.width // 32
    )
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, args.steps // 10, args.steps)
    step = zeroxla.make_step(model, mesh, optax.adamw(schedule))

    text = read_text(args.data)
    held_out, text = text[: len(text) // 20], text[len(text) // 20 :]
    validation = batch_of(held_out, 0, args.batch, args.length)
    index, count = zeroxla.process_shard(mesh)
    step.abstract_state(validation)  # lets the step see a batch: shapes and placement follow

    with zeroxla.Checkpointer(args.run.absolute(), keep=2, every=args.save_every) as checkpointer:
        if checkpointer.latest() is None:
            done, state = 0, step.init(jax.random.key(0), validation)
            print(step.describe())
        else:
            restored = checkpointer.restore(step)
            done, state = restored.number, restored.state
            print(f"goes on after step {done}")
        while done < args.steps:
            batch = batch_of(text, done, args.batch, args.length)
            batch = {"tokens": np.split(batch["tokens"], count)[index]}  # this process's rows
            state, metrics = step(state, zeroxla.global_batch(batch, mesh))
            done += 1
            checkpointer.save(done, state, force=done == args.steps)
            if done % 10 == 0 or done == args.steps:
                rows = {"tokens": np.split(validation["tokens"], count)[index]}
                loss = float(step.eval(state, zeroxla.global_batch(rows, mesh))["loss"])
                print(f"step {done}: loss {float(metrics['loss']):.3f}, validation {loss:.3f}")

    engine = zeroxla.HybridEngine(step)
    prompt = b"The "
    found = engine.generate(
        state,
        [list(prompt)],
        key=jax.random.key(1),
        max_new_tokens=min(80, args.length - len(prompt)),
        temperature=0.7,
    )
    print((prompt + bytes(found.tokens[0].tolist())).decode(errors="replace"))


if __name__ == "__main__":
    main()
