"""Training, generation and scores, the same in one process and in several.

    python generation.py FILE

Run by every process of a launch; each writes what `generate` returns into FILE, its number before
the suffix.
"""

import sys
from pathlib import Path

import numpy as np

PROMPTS = [[3, 4, 5], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11], [5, 5, 5, 5]]
ROWS = np.arange(27).reshape(3, 9) % 24


def generate():
    """Train GPT for some steps on 2 nodes of 2 devices; return tokens and scores of it."""
    import jax

    import zeroxla
    from zeroxla.models import GPT

    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=2)
    step = zeroxla.make_step(GPT.tiny(), mesh, config=zeroxla.ZeroConfig(persistence_threshold=0))
    index, count = zeroxla.process_shard(mesh)
    tokens = np.random.default_rng(0).integers(0, 24, (8, 17)).astype(np.int32)
    batch = zeroxla.global_batch({"tokens": np.split(tokens, count)[index]}, mesh)
    state = step.init(jax.random.key(0), batch)
    for _ in range(3):
        state, _ = step(state, batch)
    found = {}
    for tensor in (1, 2):
        engine = zeroxla.HybridEngine(step, tensor=tensor)
        drawn = engine.generate(state, PROMPTS, key=jax.random.key(3), max_new_tokens=6)
        found |= {
            f"tokens {tensor}": drawn.tokens,
            f"logprobs {tensor}": drawn.logprobs,
            f"lengths {tensor}": drawn.lengths,
            f"scores {tensor}": engine.logprobs(state, ROWS),
            f"logits {tensor}": engine.logits(state, ROWS),
            f"values {tensor}": engine.values(state, ROWS),
            **{f"{name} {tensor}": x for name, x in streamed(engine, state).items()},
        }
    return found, engine, state


def streamed(engine, state):
    """Return the tokens of a stream; of another one that is left after two of them, too."""
    import jax

    options = {"key": jax.random.key(3), "max_new_tokens": 6}
    with engine.stream(state, PROMPTS, **options) as stream:
        left = [next(stream).tokens for _ in range(2)]
    items = list(engine.stream(state, PROMPTS, every=4, **options))
    return {
        "left": np.stack(left, axis=1),
        "streamed": np.stack([item.tokens for item in items], axis=1),
        "streamed logprobs": np.stack([item.logprobs for item in items], axis=1),
    }


def main(file):
    import zeroxla

    zeroxla.initialize()
    import jax

    file, me = Path(file), jax.process_index()
    found, engine, state = generate()
    np.savez(file.with_stem(f"{file.stem}_{me}"), **found)
    try:
        engine.logprobs(state, ROWS + me)
    except ValueError as error:
        print("refused:", str(error).splitlines()[0], flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
