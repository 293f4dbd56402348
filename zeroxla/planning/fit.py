"""DeepSpeed's estimate of ZeRO-3's state, and the smallest cluster that holds a model."""

from __future__ import annotations

import math
from collections.abc import Callable

MAX_NODES = 1 << 20


def zero3_estimate(largest_unit: int, num_parameters: int, num_devices: int) -> float:
    """Return DeepSpeed's estimate of a device's bytes, `estimate_zero3_model_states_mem_needs`.

    It counts 4 bytes a parameter for the largest unit, which is whole while it computes. It counts
    18 bytes a parameter that all devices share: the 16-bit parameters and gradients, the float32
    master, Adam's two moments and float32 gradients. Activations are not counted.

    Args:
      largest_unit: the number of parameters of the largest unit.
      num_parameters: the number of parameters of the model.
      num_devices: the number of devices of the whole mesh.

    Source: DeepSpeed, runtime/zero/stage3.py, without offload.
    """
    return 4 * largest_unit + 18 * num_parameters / num_devices


def smallest(needs: Callable[[int], float], room: float, known: tuple[int, float]) -> int | None:
    """Return the least number of nodes on which a device has room; None if no number will do.

    The first guess takes a device's need to be a / n + b on n nodes: a part that nodes share and a
    part that stays. Two numbers of nodes give a and b. From the guess the search goes up or down.

    Args:
      needs: returns the bytes that a device needs, from the number of nodes.
      room: the bytes that a device has.
      known: a number of nodes that is too small, and the bytes that a device needs there.

    Cost: some five calls of `needs`.
    """
    first, most = known
    asked: dict[int, float] = {first: most}

    def fits(nodes: int) -> bool:
        if nodes not in asked:
            asked[nodes] = needs(nodes)
        return asked[nodes] <= room

    assert not fits(first)
    # The two numbers are far apart, so that the part that stays shows clearly.
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
