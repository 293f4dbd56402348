"""The options that may be left to a memory budget, with the value "auto"."""

from __future__ import annotations

import dataclasses
from typing import Any

AUTO = "auto"
LEAST = {"accumulate": 1, "hpz_size": 1}
"""The options, and the value under which states and batches are made before they are decided."""


def undecided(config: Any) -> tuple[str, ...]:
    """Return the names of the options of a `ZeroConfig` that a budget decides."""
    return tuple(name for name in LEAST if getattr(config, name) == AUTO)


def decided(config: Any, **values: Any) -> Any:
    """Return a config in which options are decided: those that are not given have the least value.

    Args:
      config: a `ZeroConfig`.
      values: the options, by name.
    """
    found = {name: values.get(name, LEAST[name]) for name in undecided(config)}
    if found.get("hpz_size") == 1 and config.offload.secondary != "none":
        found["offload"] = dataclasses.replace(config.offload, secondary="none")
    return dataclasses.replace(config, **found) if found else config


def check_undecided(config: Any) -> None:
    """Check a config whose options may be undecided.

    Raises:
      ValueError: there is no budget, or another option needs the value.
    """
    names = undecided(config)
    if names and config.memory is None:
        asked = " and ".join(f"{name}='auto'" for name in names)
        raise ValueError(
            f"{asked}: no budget decides it; give memory=, such as memory='24GB', or a number"
        )
    if config.accumulate == AUTO and config.micro_batch is not None:
        raise ValueError(
            f"accumulate='auto' with micro_batch={config.micro_batch}: the one decides the other; "
            "leave micro_batch out, or give accumulate as a number"
        )
    needs = {
        "inter_node_gather='step'": config.inter_node_gather == "step",
        "weight_differences": config.weight_differences is not None,
    }
    if config.hpz_size == AUTO and (
        given := [name for name, is_given in needs.items() if is_given]
    ):
        raise ValueError(
            f"hpz_size='auto' with {' and '.join(given)}, which needs secondary shards; set "
            'hpz_size="node"'
        )
