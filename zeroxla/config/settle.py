"""`settle`: checks the fields of a `ZeroConfig` one by one, and gives each its final form."""

from __future__ import annotations

import math
from typing import Any

from zeroxla.config.memory import memory_bytes
from zeroxla.config.offload import Offload
from zeroxla.config.outer import Outer
from zeroxla.config.rewrite import Rewrite
from zeroxla.config.splits import Splits
from zeroxla.config.undecided import check_undecided, undecided
from zeroxla.config.values import dtype_name, patterns, whole_number

DTYPES = ("compute_dtype", "gather_dtype", "reduce_dtype")
COUNTS = {
    "accumulate": 1,
    "micro_batch": 1,
    "unit_elements": 1,
    "prefetch_bucket": 0,
    "max_live_parameters": 0,
    "max_reuse_distance": 0,
    "persistence_threshold": 0,
    "model_persistence_cap": 0,
    "quantize_threshold": 0,
    "loss_scale_window": 1,
}
"""The fields that are whole numbers, and the least value of each."""

KINDS = {"offload": Offload, "outer": Outer, "splits": Splits, "rewrite": Rewrite}
PATTERNS = ("frozen", "unquantized")


def settle(config: Any) -> None:
    """Check the fields of new options, and replace what has several forms.

    Args:
      config: a `ZeroConfig` that is being made.

    Raises:
      ValueError: a field has a value that it cannot have.
    """

    def put(name: str, value: object) -> None:
        object.__setattr__(config, name, value)

    for name in DTYPES:
        put(name, dtype_name(name, getattr(config, name), name != "compute_dtype"))
    for name, least in COUNTS.items():
        if name not in undecided(config):
            put(name, whole_number(name, getattr(config, name), least))
    if not 0 < config.init_loss_scale < math.inf:
        raise ValueError(
            f"init_loss_scale={config.init_loss_scale} must be a finite number above 0, such as "
            "2.0**15"
        )
    put("memory", memory_bytes("memory", config.memory))
    if isinstance(config.rewrite, bool):
        put("rewrite", Rewrite() if config.rewrite else None)
    if not isinstance(config.owners, bool):
        raise ValueError(f"owners={config.owners!r} must be True or False")
    for name in PATTERNS:
        put(name, patterns(name, getattr(config, name)))
    for name, kind in KINDS.items():
        value = getattr(config, name)
        if not isinstance(value, kind) and (value is not None or kind is Offload):
            raise ValueError(f"{name}={value!r} is none; give a zeroxla.{kind.__name__}")
    _check_budget(config)
    check_undecided(config)


def _check_budget(config: Any) -> None:
    """Check the options of a memory budget against each other."""
    if config.remat not in ("respect", "replace"):
        raise ValueError(f"remat={config.remat!r} is neither 'respect' nor 'replace'")
    if config.memory is None:
        alone = {
            "remat='replace'": config.remat != "respect",
            "Offload(activations='host')": config.offload.activations != "none",
        }
        if given := [name for name, is_given in alone.items() if is_given]:
            raise ValueError(
                f"{' and '.join(given)}: without effect, no budget decides what backward computes "
                "again; give memory=, such as memory='24GB'"
            )
    elif config.offload.on_disk:
        raise ValueError(
            f"memory={config.memory!r} with a state on disk: its step is several programs, which "
            "the budget does not see; use Offload with 'host', or leave memory= out"
        )
