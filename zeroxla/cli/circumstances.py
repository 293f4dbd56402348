"""What a run depends on besides its options: its data, its mesh, and versions."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import flax
import jax
import optax
from jax.sharding import Mesh


def circumstances(data: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Return what a run depends on besides its options, for config.json.

    Args:
      data: a record of the data, by its name; see `Job.open_run`.
      mesh: the run's mesh.
    """
    return {
        **data,
        "mesh": dict(mesh.shape),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
        },
    }


def check_same(stored: Mapping[str, Any], now: Mapping[str, Any], data: str) -> None:
    """Check that a resumed run finds the data that it began with. Its mesh may be another.

    Raises:
      ValueError: with both records, and the remedy.
    """
    if stored[data] != now[data]:
        raise ValueError(
            f"the run began with other {data}: {stored[data]} then, {now[data]} now; give --data "
            "as it was, or start a new run without --resume"
        )
