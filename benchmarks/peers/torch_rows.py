"""The rows of PyTorch itself: one step function each, the model and optimizer behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peers import task
from peers.model import GPT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

StepFunction = Callable[[Tensor], float]
"""One step on a rank's tokens int64[B, LENGTH + 1]; returns the rank's loss, in nats."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of every row."""
    return torch.optim.AdamW(
        parameters, lr=task.LEARNING_RATE, weight_decay=task.WEIGHT_DECAY, fused=True
    )


def make_step(row: str, *, every: int = task.EVERY) -> StepFunction:
    """Return the step function of a row.

    Args:
      row: "alone", "ddp", "fsdp2", "hsdp" or "diloco".
      every: steps between two exchanges of "diloco".
    """
    if row == "diloco":
        return DiLoCo(every)
    model = {"alone": GPT, "ddp": _ddp, "fsdp2": _fsdp2, "hsdp": _hsdp}[row]()
    optimizer = adamw(model.parameters())

    def step(tokens_BL: Tensor) -> float:
        loss = model(tokens_BL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


class DiLoCo:
    """DDP inside each host. Hosts exchange what they have changed (arXiv 2311.08105), in float32.

    Args:
      every: steps between two exchanges.
    """

    def __init__(self, every: int) -> None:
        shape = (task.HOSTS, task.RANKS_PER_HOST)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("across", "inside"))
        self._across, self._inside = mesh.get_group("across"), mesh.get_group("inside")
        self._model = DistributedDataParallel(
            GPT(), process_group=self._inside, gradient_as_bucket_view=True
        )
        self._optimizer = adamw(self._model.parameters())
        self._outer = nn.Parameter(self._own().clone())
        self._outer.grad = torch.empty_like(self._outer)
        self._sgd = torch.optim.SGD([self._outer], lr=0.7, momentum=0.9, nesterov=True)
        self._every, self._num_steps = every, 0

    def __call__(self, tokens_BL: Tensor) -> float:
        loss = self._model(tokens_BL)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._num_steps += 1
        if self._num_steps % self._every == 0:
            self._exchange()
        return loss.item()

    @torch.no_grad()
    def _exchange(self) -> None:
        # Each rank of a host sends its own part: the host sends every number once in each move.
        parts = (self._outer - self._own()).tensor_split(task.RANKS_PER_HOST)
        part = parts[dist.get_rank(self._inside)].clone()
        dist.all_reduce(part, group=self._across)
        dist.all_gather_into_tensor(self._outer.grad, part / task.HOSTS, group=self._inside)
        self._sgd.step()
        # A copy: parameters become views of the vector that they are set from.
        vector_to_parameters(self._outer.detach().clone(), self._model.parameters())

    def _own(self) -> Tensor:
        return parameters_to_vector(self._model.parameters()).detach()


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
