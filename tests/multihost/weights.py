"""Weights of several processes: read by all, written by the first.

    python weights.py HUB OUT

HUB is a Hugging Face folder; exports go to OUT. Run by every process of a launch.
"""

import contextlib
import sys
from pathlib import Path

from tools.disk import files_limited_to


def main(hub, out):
    import zeroxla

    zeroxla.initialize()
    import jax
    import numpy as np

    from zeroxla.checkpoint.weights.export import export_params
    from zeroxla.checkpoint.weights.pretrained import from_pretrained
    from zeroxla.models import from_hugging_face

    first = jax.process_index() == 0
    model = from_hugging_face(hub)
    step = zeroxla.make_step(model, zeroxla.make_mesh())
    step.abstract_state({"tokens": np.zeros((8, 9), np.int32)})
    state = from_pretrained(model, hub, step)
    # Of the others the folder does not count: it cannot even be made.
    folder = Path(out) / "good" if first else Path("/dev/null/nowhere")
    files = export_params(state, folder, model=model, max_shard_size="100KB")
    print(f"files: {len(files)}", flush=True)
    with files_limited_to(10_000) if first else contextlib.nullcontext():
        try:
            export_params(state, Path(out) / "bad", model=model)
        except ValueError as error:
            print(f"failure: {error}", flush=True)
    missing = hub if first else "/dev/null/nowhere"
    try:
        from_pretrained(model, missing, step)
    except ValueError as error:
        print(f"unread: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
