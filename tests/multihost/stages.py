"""A short training of a pipeline, the same in one process and in several.

    python stages.py FOLDER CASE

Run by every process of a launch; the first one writes FOLDER/CASE.npz, with what `train` returns.
FOLDER/CASE gets a checkpoint and an export.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np

ROWS, LENGTH, NUM_STEPS = 8, 16, 3


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh, and the pipeline on it."""

    mesh: tuple[int, int, int]  # pipe, nodes, devices
    model: str = "gpt"
    layers: int = 3  # of the GPT; its blocks are stored on their stage where these have as many
    measured: bool = False  # cut by the time that layers take
    schedule: str = "1f1b"
    weights: str = "step"
    zero: str = "zero3"


CASES = {
    "a stage a process": Case((2, 1, 1), model="listed", measured=True),
    "two devices a stage": Case((2, 1, 2), layers=4, schedule="zb-h1", weights="tick"),
    "stages inside processes": Case((2, 2, 1), layers=4, schedule="gpipe", weights="tick"),
    "quantized": Case((2, 2, 2), zero="zeropp_hq"),
}


def tokens(step):
    return np.random.default_rng(step).integers(0, 64, (ROWS, LENGTH + 1), dtype=np.int32)


def make_step(pipeline, mesh, *, microbatches=1, weights="step", zero="zero3"):
    import optax

    import zeroxla

    config = getattr(zeroxla.ZeroConfig, zero)(persistence_threshold=100, hpz_size=1)
    options = {"config": config, "microbatches": microbatches, "weights": weights}
    return zeroxla.make_step(pipeline, mesh, optax.adam(1e-2), **options)


def train(step, save=lambda state: state):
    """Take some steps.

    Args:
      step: of a pipeline, on a mesh with stages or without.
      save: called before the last step with the state; returns the one to go on with.

    Returns:
      The losses, that of the validation last, and the parameters before the last step.
    """
    import jax

    import zeroxla

    index, count = zeroxla.process_shard(step.mesh)

    def batch(i):
        rows = np.split(tokens(i), count)[index]
        return zeroxla.global_batch({"tokens": rows}, step.mesh)

    state, losses = step.init(jax.random.key(0), batch(0)), []
    for i in range(NUM_STEPS):
        if i == NUM_STEPS - 1:
            params = jax.tree_util.tree_leaves_with_path(zeroxla.full_params(state))
            state = save(state)
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    losses.append(float(step.eval(state, batch(NUM_STEPS))["loss"]))
    return {"losses": losses, **{jax.tree_util.keystr(path): x for path, x in params}}


def pipeline_of(case):
    import flax.linen as nn

    import zeroxla
    from zeroxla.models import GPT
    from zeroxla.models.losses import next_token_loss

    if case.model == "gpt":
        model = GPT.tiny(layers=case.layers)
        return zeroxla.Pipeline.from_model(model, schedule=case.schedule)
    embed = nn.Embed(64, 20)
    layers = [
        zeroxla.TiedLayer("embed", embed),
        *(nn.Dense(33), nn.gelu, nn.Dense(20)),
        zeroxla.TiedLayer("embed", embed, forward=lambda module, x: module.attend(x)),
    ]
    return zeroxla.Pipeline(
        layers,
        next_token_loss,
        inputs=lambda batch: batch["tokens"][:, :-1],
        partition=zeroxla.Profile(measure=True) if case.measured else "uniform",
        schedule=case.schedule,
    )


def step_of(case):
    import zeroxla

    pipe, nodes, devices = case.mesh
    mesh = zeroxla.make_mesh(pipe=pipe, nodes=nodes, devices_per_node=devices)
    return make_step(pipeline_of(case), mesh, microbatches=2, weights=case.weights, zero=case.zero)


def main(folder, name):
    import zeroxla

    zeroxla.initialize()
    import jax

    from zeroxla.checkpoint.weights.export import export_params

    step, saved = step_of(CASES[name]), Path(folder) / name

    def save(state):
        """Save; return what was saved, read again."""
        with zeroxla.Checkpointer(saved) as checkpointer:
            checkpointer.save(NUM_STEPS - 1, state)
            export_params(state, saved / "export")
            return checkpointer.restore(step).state

    place = [d.process_index for d in step.mesh.devices.flat]
    print(f"{name}: {place}, part {zeroxla.process_shard(step.mesh)}", flush=True)
    found = train(step, save)
    if jax.process_index() == 0:
        np.savez(Path(folder) / f"{name}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
