"""zeroxla: train Flax models that do not fit one device, with ZeRO-3 in JAX.

The public names, and the module that each is imported from when it is first used: `import zeroxla`
itself imports nothing, so that `zeroxla --help` answers at once.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:  # what follows in `_PLACES`, for those who read types
    from zeroxla import data, inspect, quantize, rlhf
    from zeroxla.checkpoint.checkpointer import Checkpointer, Restored
    from zeroxla.checkpoint.errors import SaveError
    from zeroxla.checkpoint.weights.adapter_export import export_adapter
    from zeroxla.checkpoint.weights.adapter_import import lora_from_adapter, read_adapter
    from zeroxla.checkpoint.weights.export import export_params
    from zeroxla.checkpoint.weights.pretrained import from_pretrained
    from zeroxla.cli.tracking.tracker import TrackedRun, Tracker
    from zeroxla.config.feedback import Feedback
    from zeroxla.config.offload import Offload
    from zeroxla.config.outer import Outer
    from zeroxla.config.rewrite import Rewrite
    from zeroxla.config.splits import Splits
    from zeroxla.config.wire_format import WireFormat
    from zeroxla.config.zero_config import ZeroConfig
    from zeroxla.frontend.lora.model import LoraModel, lora
    from zeroxla.hybrid.engine import HybridEngine
    from zeroxla.hybrid.prompts import Generated
    from zeroxla.hybrid.token_stream import StreamedTokens, TokenStream
    from zeroxla.inspect.check.check import check
    from zeroxla.inspect.check.check_report import CheckReport, CheckResult
    from zeroxla.mesh.batches import global_batch, process_shard
    from zeroxla.mesh.make_mesh import make_mesh
    from zeroxla.mesh.processes.start import initialize
    from zeroxla.mesh.simulate import simulate
    from zeroxla.pipeline.layer_cost import Machine
    from zeroxla.pipeline.layers import TiedLayer
    from zeroxla.pipeline.make_schedule import make_schedule
    from zeroxla.pipeline.pipeline import Pipeline
    from zeroxla.pipeline.profile import Profile
    from zeroxla.pipeline.schedule import Schedule
    from zeroxla.planning.explain.make import explain
    from zeroxla.planning.explain.report import Explanation
    from zeroxla.planning.make import plan
    from zeroxla.planning.plan import Plan
    from zeroxla.planning.search import Search, search_plans
    from zeroxla.step.islands.island import Island
    from zeroxla.step.islands.membership.coordinator import Coordinator
    from zeroxla.step.islands.outer_state import IslandState
    from zeroxla.step.make import init_from, make_step
    from zeroxla.step.memory.out_of_memory import DeviceMemoryError
    from zeroxla.step.state import LossScale, TrainState, full_params
    from zeroxla.step.step import Step

    __version__: str

__all__ = [  # noqa: RUF022 (grouped)
    # set-up
    "Offload",
    "Rewrite",
    "Splits",
    "ZeroConfig",
    "initialize",
    "make_mesh",
    "simulate",
    # training
    "DeviceMemoryError",
    "LossScale",
    "Step",
    "TrainState",
    "full_params",
    "global_batch",
    "init_from",
    "make_step",
    "process_shard",
    # data
    "data",
    # generation
    "Generated",
    "HybridEngine",
    "StreamedTokens",
    "TokenStream",
    # reinforcement learning
    "rlhf",
    # pipelines
    "Machine",
    "Pipeline",
    "Profile",
    "Schedule",
    "TiedLayer",
    "make_schedule",
    # islands
    "Coordinator",
    "Island",
    "IslandState",
    "Outer",
    # adapters
    "LoraModel",
    "lora",
    "lora_from_adapter",
    # wires
    "Feedback",
    "WireFormat",
    "quantize",
    # checkpoints and weights
    "Checkpointer",
    "Restored",
    "SaveError",
    "export_adapter",
    "export_params",
    "from_pretrained",
    "read_adapter",
    # reports
    "CheckReport",
    "CheckResult",
    "Explanation",
    "Plan",
    "Search",
    "TrackedRun",
    "Tracker",
    "check",
    "explain",
    "inspect",
    "plan",
    "search_plans",
]

_PLACES = {
    "checkpoint.checkpointer": ("Checkpointer", "Restored"),
    "checkpoint.errors": ("SaveError",),
    "checkpoint.weights.adapter_export": ("export_adapter",),
    "checkpoint.weights.adapter_import": ("lora_from_adapter", "read_adapter"),
    "checkpoint.weights.export": ("export_params",),
    "checkpoint.weights.pretrained": ("from_pretrained",),
    "cli.tracking.tracker": ("TrackedRun", "Tracker"),
    "config.feedback": ("Feedback",),
    "config.offload": ("Offload",),
    "config.outer": ("Outer",),
    "config.rewrite": ("Rewrite",),
    "config.splits": ("Splits",),
    "config.wire_format": ("WireFormat",),
    "config.zero_config": ("ZeroConfig",),
    "frontend.lora.model": ("LoraModel", "lora"),
    "hybrid.engine": ("HybridEngine",),
    "hybrid.prompts": ("Generated",),
    "hybrid.token_stream": ("StreamedTokens", "TokenStream"),
    "inspect.check.check": ("check",),
    "inspect.check.check_report": ("CheckReport", "CheckResult"),
    "step.islands.island": ("Island",),
    "step.islands.membership.coordinator": ("Coordinator",),
    "step.islands.outer_state": ("IslandState",),
    "mesh.batches": ("global_batch", "process_shard"),
    "mesh.make_mesh": ("make_mesh",),
    "mesh.processes.start": ("initialize",),
    "mesh.simulate": ("simulate",),
    "pipeline.layer_cost": ("Machine",),
    "pipeline.layers": ("TiedLayer",),
    "pipeline.make_schedule": ("make_schedule",),
    "pipeline.pipeline": ("Pipeline",),
    "pipeline.profile": ("Profile",),
    "pipeline.schedule": ("Schedule",),
    "planning.explain.make": ("explain",),
    "planning.explain.report": ("Explanation",),
    "planning.make": ("plan",),
    "planning.plan": ("Plan",),
    "planning.search": ("Search", "search_plans"),
    "step.make": ("init_from", "make_step"),
    "step.memory.out_of_memory": ("DeviceMemoryError",),
    "step.state": ("LossScale", "TrainState", "full_params"),
    "step.step": ("Step",),
}
_PLACE_OF = {name: f"zeroxla.{place}" for place, names in _PLACES.items() for name in names}
# Reached as attributes, too: public modules, and the folders that the repository links here.
_MODULES = ("data", "inspect", "models", "pallas_kernels", "quantize", "rlhf")


def __getattr__(name: str) -> _Any:
    """Import what a public name stands for, once."""
    if name in _PLACE_OF:
        value = getattr(_import_module(_PLACE_OF[name]), name)
    elif name in _MODULES:
        value = _import_module(f"zeroxla.{name}")
    elif name == "__version__":
        from importlib.metadata import version

        value = version("zeroxla")
    else:
        raise AttributeError(f"module 'zeroxla' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
