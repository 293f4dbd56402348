"""The rows of PyTorch itself: one step function each, the model and optimizer behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peers import task
from peers.model import GPT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

StepFunction = Callable[[Tensor], float]
"""One step on a rank's tokens int64[B, LENGTH + 1]; returns the rank's loss, in nats."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of every row."""
    return torch.optim.AdamW(
        parameters, lr=task.LEARNING_RATE, weight_decay=task.WEIGHT_DECAY, fused=True
    )


def make_step(row: str) -> StepFunction:
    """Return the step function of a row: "alone", "ddp", "fsdp2" or "hsdp"."""
    model = {"alone": GPT, "ddp": _ddp, "fsdp2": _fsdp2, "hsdp": _hsdp}[row]()
    optimizer = adamw(model.parameters())

    def step(tokens_BL: Tensor) -> float:
        loss = model(tokens_BL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _ddp() -> nn.Module:
    return DistributedDataParallel(GPT(), gradient_as_bucket_view=True)


def _fsdp2() -> nn.Module:
    return _sharded(init_device_mesh("cpu", (task.WORLD,)))


def _hsdp() -> nn.Module:
    # The first dim of a 2-D mesh replicates: between hosts.
    shape = (task.HOSTS, task.RANKS_PER_HOST)
    return _sharded(init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))


def _sharded(mesh: DeviceMesh) -> nn.Module:
    model = GPT()
    for unit in (*model.h, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    return model
