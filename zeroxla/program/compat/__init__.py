"""What differs between the supported JAX versions (0.10.2 to 0.12), and what only JAX's private
modules offer. No other folder of zeroxla knows either.

Come here when a new JAX breaks something. Names of primitives are in `program/primitives.py`.
"""

from zeroxla.program.compat.axis_names import AxisNames, axes_of_one
from zeroxla.program.compat.clusters import cluster_parameters, own_devices
from zeroxla.program.compat.jaxprs import (
    array_type,
    as_remat,
    backward_jaxpr,
    bind_params,
    branches_for,
    call_equation,
    closing_rules,
    context_of,
    custom_rule_constants,
    custom_rule_name,
    forward_jaxpr,
    has_effects,
    inlined_jaxpr,
    is_by_platform,
    is_jaxpr,
    model_line,
    name_stack_of,
    open_jaxpr,
    rule_and_line,
    scan_counts,
    settings_of,
    source_line,
    without_dead_code,
)
from zeroxla.program.compat.layouts import layouts_ignored, note_layout, with_layout
from zeroxla.program.compat.redirect import redirect
from zeroxla.program.compat.runtime import (
    COMPUTE_ON,
    JAX_VERSION,
    backends_started,
    before_threads_end,
    compiler_options,
    compute_on_host,
    coordination_client,
)
from zeroxla.program.compat.tracing import mesh_context

__all__ = [
    "COMPUTE_ON",
    "JAX_VERSION",
    "AxisNames",
    "array_type",
    "as_remat",
    "axes_of_one",
    "backends_started",
    "backward_jaxpr",
    "before_threads_end",
    "bind_params",
    "branches_for",
    "call_equation",
    "closing_rules",
    "cluster_parameters",
    "compiler_options",
    "compute_on_host",
    "context_of",
    "coordination_client",
    "custom_rule_constants",
    "custom_rule_name",
    "forward_jaxpr",
    "has_effects",
    "inlined_jaxpr",
    "is_by_platform",
    "is_jaxpr",
    "layouts_ignored",
    "mesh_context",
    "model_line",
    "name_stack_of",
    "note_layout",
    "open_jaxpr",
    "own_devices",
    "redirect",
    "rule_and_line",
    "scan_counts",
    "settings_of",
    "source_line",
    "with_layout",
    "without_dead_code",
]
