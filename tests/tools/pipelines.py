"""Small pipelines, and steps over their stages, for the tests of `zeroxla.pipeline`."""

import optax

import zeroxla
from tools.pipeline_equality import listed
from zeroxla import Machine, Pipeline, ZeroConfig
from zeroxla.models import GPT

FAST = Machine(flops_per_s=1e12, bytes_per_s=1e11)


MODELS = {
    "listed": lambda **options: listed(partition="uniform", **options),
    "listed, remat": lambda **options: listed(partition=[0, 1, 5, 6, 8], remat=2, **options),
    "gpt": lambda **options: Pipeline.from_model(GPT.tiny(layers=4), **options),
    "gpt, remat, untied": lambda **options: Pipeline.from_model(
        GPT.tiny(layers=5, remat=True, tie=False), **options
    ),
}


def step_of(pipeline, pipe, nodes, devices, m, *, weights="step", optimizer=None, **config):
    mesh = zeroxla.make_mesh(pipe=pipe, nodes=nodes, devices_per_node=devices)
    config = ZeroConfig(**{"persistence_threshold": 0, **config})
    optimizer = optimizer or optax.adam(1e-2)
    return zeroxla.make_step(
        pipeline, mesh, optimizer, config=config, microbatches=m, weights=weights
    )
