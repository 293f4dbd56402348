"""zeroxla: train Flax models that do not fit one device, with ZeRO-3 in JAX."""

from importlib.metadata import version as _version

from zeroxla import inspect, quantize, rlhf
from zeroxla.checkpoint.checkpointer import Checkpointer, Restored
from zeroxla.checkpoint.errors import SaveError
from zeroxla.checkpoint.weights.export import export_params
from zeroxla.checkpoint.weights.pretrained import from_pretrained
from zeroxla.config.feedback import Feedback
from zeroxla.config.offload import Offload
from zeroxla.config.wire_format import WireFormat
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.frontend.lora.model import LoraModel, lora
from zeroxla.hybrid.engine import HybridEngine
from zeroxla.hybrid.prompts import Generated
from zeroxla.mesh.batches import global_batch, process_shard
from zeroxla.mesh.make_mesh import make_mesh
from zeroxla.mesh.processes.start import initialize
from zeroxla.mesh.simulate import simulate
from zeroxla.pipeline.layer_cost import Machine
from zeroxla.pipeline.layers import TiedLayer
from zeroxla.pipeline.pipeline import Pipeline
from zeroxla.pipeline.profile import Profile
from zeroxla.pipeline.schedule import Schedule, make_schedule
from zeroxla.planning.make import plan
from zeroxla.planning.plan import Plan
from zeroxla.planning.search import Search, search_plans
from zeroxla.step.make import make_step
from zeroxla.step.state import LossScale, TrainState, full_params
from zeroxla.step.step import Step

__all__ = [  # noqa: RUF022 (grouped)
    # set-up
    "Offload",
    "ZeroConfig",
    "initialize",
    "make_mesh",
    "simulate",
    # training
    "LossScale",
    "Step",
    "TrainState",
    "full_params",
    "global_batch",
    "make_step",
    "process_shard",
    # generation
    "Generated",
    "HybridEngine",
    # reinforcement learning
    "rlhf",
    # pipelines
    "Machine",
    "Pipeline",
    "Profile",
    "Schedule",
    "TiedLayer",
    "make_schedule",
    # adapters
    "LoraModel",
    "lora",
    # wires
    "Feedback",
    "WireFormat",
    "quantize",
    # checkpoints and weights
    "Checkpointer",
    "Restored",
    "SaveError",
    "export_params",
    "from_pretrained",
    # reports
    "Plan",
    "Search",
    "inspect",
    "plan",
    "search_plans",
]

__version__ = _version("zeroxla")
