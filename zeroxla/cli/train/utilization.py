"""MFU, the share of the devices' peak that a model's own work takes while it trains."""

from __future__ import annotations

import jax
import numpy as np

from zeroxla.mesh.machines import Machines


def peak_flops_per_s(kind: str, count: int) -> float | None:
    """Return the peak of `count` devices in products of their fastest dtype.

    Args:
      kind: JAX's name for the device, `device.device_kind`.
      count: the number of devices.

    Returns:
      FLOP/s; None if the table of devices (mesh/machines.toml) has no such GPU or TPU.
    """
    device = Machines.load().of_kind(kind)
    if device is None or device.platform == "cpu":
        return None
    return count * max(device.flops_per_s.values())


def flops_per_token(params: object) -> float:
    """Return the operations that a training step counts for each token: 6 for each parameter.

    Attention and recomputation do not count. Padding of split leaves and frozen leaves do.

    Args:
      params: a pytree of arrays or shapes.
    """
    return 6.0 * sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))
