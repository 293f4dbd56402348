"""What would hold it: DeepSpeed's estimate of ZeRO-3's state, and the smallest cluster."""

from __future__ import annotations

import math
from collections.abc import Callable

MAX_NODES = 1 << 20


def zero3_estimate(largest_unit: int, num_parameters: int, num_devices: int) -> float:
    """Return the bytes of a device that `estimate_zero3_model_states_mem_needs` of DeepSpeed says.

    4 bytes a parameter of the largest unit, which is whole at a time, and 18 bytes a parameter that
    all devices share: 16 bits and gradients in 16 bits, float32 master, Adam's two moments, and
    float32 gradients. No activations.

    Args:
      largest_unit, num_parameters: numbers of parameters.
      num_devices: of the whole mesh.

    Source: DeepSpeed, runtime/zero/stage3.py, without offload.
    """
    return 4 * largest_unit + 18 * num_parameters / num_devices


def smallest(needs: Callable[[int], float], room: float, known: tuple[int, float]) -> int | None:
    """Return the least number of nodes on which a device has room; None if no number will do.

    What a device needs is taken to be a part that stays and a part that nodes share, a / n + b:
    found from two numbers of nodes, then tried and mended.

    Args:
      needs: bytes of a device, by the number of nodes.
      room: bytes that it has.
      known: nodes that are too few, and what they need.

    Cost: `needs` is called some five times.
    """
    first, most = known
    asked: dict[int, float] = {first: most}

    def fits(nodes: int) -> bool:
        if nodes not in asked:
            asked[nodes] = needs(nodes)
        return asked[nodes] <= room

    assert not fits(first)
    # Far apart, so that the part that stays is seen well.
    far = 64 * first
    asked[far] = needs(far)
    shared = (asked[first] - asked[far]) / (1 / first - 1 / far)
    stays = asked[far] - shared / far
    if stays >= room or shared <= 0:
        return None
    guess = max(math.ceil(shared / (room - stays)), first + 1)
    if guess > MAX_NODES:
        return None
    while not fits(guess):
        guess += max(1, guess // 50)
    while guess - 1 > first and fits(guess - 1):
        guess -= 1
    return guess
