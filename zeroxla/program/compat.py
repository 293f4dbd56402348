"""Every difference between the supported JAX versions (0.10.2 to 0.12), in one place.

The rest of the library reads jaxprs only through these functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax._src import clusters, config, core, distributed, source_info_util, xla_bridge
from jax._src.compute_on import extend_compute_type
from jax._src.interpreters import partial_eval
from jax.experimental import compute_on

JAX_VERSION: tuple[int, ...] = jax.__version_info__[:3]

COMPUTE_ON = "compute_on"
"""The equation of what `compute_on_host` returns."""

# Equations whose body belongs to the surrounding program: inlining them changes no semantics.
_INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}

# Equations whose body says what they compute, forward: rules of differentiation around it.
_FORWARD = _INLINED | {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}

# Equations that talk to other devices: each must run exactly where it stands.
_COLLECTIVES = frozenset(
    {
        "all_gather",
        "all_gather_invariant",
        "all_to_all",
        "pbroadcast",
        "pmax",
        "pmin",
        "ppermute",
        "psum",
        "psum2",
        "psum_invariant",
        "pvary",
        "ragged_all_to_all",
        "reduce_scatter",
    }
)


def is_collective(eqn: Any) -> bool:
    """Return whether an equation is a collective (a model's own, such as a synchronised norm's)."""
    return eqn.primitive.name in _COLLECTIVES


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Return (jaxpr with `invars`, `constvars`, `eqns`, `outvars`; values of the constvars).

    Up to 0.11 a sub-jaxpr is either closed (a pair of jaxpr and consts) or open; 0.12 has one class
    that may carry its own consts.
    """
    if isinstance(jaxpr, jex.ClosedJaxpr):  # pyright: ignore[reportPrivateImportUsage]
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        return inner, tuple(jaxpr.consts)
    return jaxpr, tuple(getattr(jaxpr, "consts", None) or ())


def without_dead_code(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Return a closed jaxpr, opened, without equations that no output needs, loop and remat bodies
    included (flax's nnx transforms return every parameter that they were given)."""
    jaxpr, consts = open_jaxpr(jaxpr)
    used = [True] * len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(jaxpr, used, instantiate=True)[0], consts


def inlined_jaxpr(eqn: Any) -> Any | None:
    """Return the body of a `jit`-like equation, or None for every other equation."""
    key = _INLINED.get(eqn.primitive.name)
    return None if key is None else eqn.params[key]


def forward_jaxpr(eqn: Any) -> Any | None:
    """Return the body of an equation that only has one in order to be differentiated in its own way
    or to be recomputed, of a `jit`-like one too, or None for every other equation."""
    key = _FORWARD.get(eqn.primitive.name)
    return None if key is None else eqn.params[key]


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return (number of constants, number of carries) of a `scan` equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def has_effects(eqn: Any) -> bool:
    """Return whether an equation does more than compute; that it names mesh axes is nothing."""
    return any(not isinstance(effect, core.NamedAxisEffect) for effect in eqn.effects)


def branches_for(params: dict[str, Any], platform: str) -> Sequence[Any]:
    """Return the branches of a `cond` equation that a platform may take: all, or the one that
    `jax.lax.platform_dependent` has for it."""
    branches, platforms = params["branches"], params.get("branches_platforms")
    if platforms is None:
        return branches
    name = {"gpu": "cuda"}.get(platform, platform)
    return [
        next(b for b, names in zip(branches, platforms, strict=True) if not names or name in names)
    ]


def call_equation(eqn: Any, name_stack: Any, args: Sequence[Any]) -> list[Any]:
    """Bind an equation to `args` under its own context and name stack; return its results."""
    with context_of(eqn, name_stack):
        out = eqn.primitive.bind(*args, **bind_params(eqn.primitive, eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_params(primitive: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments with which an equation's primitive is bound again."""
    bound = primitive.get_bind_params(params)
    if isinstance(bound, tuple):  # JAX before 0.10 returned (subfuns, params)
        raise NotImplementedError(
            f"JAX {jax.__version__} is older than 0.10.2, the oldest supported version; upgrade jax"
        )
    return bound


def name_stack_of(eqn: Any) -> Any:
    """Return the `jax.named_scope` path of an equation."""
    return eqn.source_info.name_stack


def mesh_context(mesh: jax.sharding.Mesh) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which `mesh` replaces a mesh that the user has set, if any."""
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def backends_started() -> bool:
    """Return whether JAX has made its devices, after which their number cannot change."""
    return xla_bridge.backends_are_initialized()


def coordination_client() -> Any | None:
    """Return the client of `jax.distributed`'s key-value store; None for a single process."""
    return distributed.global_state.client


def cluster_parameters(
    source: str,
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    timeout: float,
) -> tuple[str, int, int, Sequence[int] | None]:
    """Return what `jax.distributed.initialize` would find for what is not given: (coordinator,
    number of processes, this process, the local devices that are its own or None for all).

    Raises:
      ValueError: it finds nothing; names `source`, who told the rest.
    """
    if None in (coordinator, num_processes, process_id):
        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, num_processes, process_id, None, None, round(timeout)
        )
    else:
        found = (coordinator, num_processes, process_id, None)
    coordinator, num_processes, process_id, devices = found
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            f"JAX does not find the coordinator from what {source} says; pass coordinator=, "
            "num_processes= and process_id= to zeroxla.initialize"
        )
    return coordinator, num_processes, process_id, devices


def array_type(shape: Sequence[int], dtype: Any) -> Any:
    """Return the abstract value of an array."""
    return jax.core.ShapedArray(tuple(shape), dtype)  # pyright: ignore[reportAttributeAccessIssue]


def compiler_options(platform: str, *, prefetch: bool) -> dict[str, Any]:
    """Return the compiler options of a step, for one kind of device. Other backends reject them.

    On GPUs, where gathers run ahead, what a loop's turn needs is gathered in the turn before. The
    second option: a loop copies what it keeps of each turn into a stack, beside the compute. XLA's
    scheduler takes such a copy for 5 ms long and, to hide it, leaves no matmuls for the gathers,
    unless copies are kept apart from the rest.
    """
    if platform != "gpu" or not prefetch:
        return {}
    if JAX_VERSION < (0, 11, 1):
        return {"xla_gpu_enable_pipelined_all_gather": True}
    return {
        "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
        "xla_gpu_experimental_enable_selective_memcpy_overlap": True,
    }


def compute_on_host(fun: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
    """Return a function that the host computes, of arrays in its memory, into its memory.

    Up to 0.11 `compute_on` is a context, which does not say where results are.
    """
    decorate: Any = getattr(compute_on, "compute_on2", None) or compute_on.compute_on
    return decorate(fun, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)


@contextlib.contextmanager
def context_of(eqn: Any, name_stack: Any) -> Iterator[None]:
    """Return a context in which a primitive is bound as in an equation: its names, its settings;
    on the host where one that does not say is bound there."""
    stack = source_info_util.current_name_stack() + name_stack
    user = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
    computes = config.compute_on_context_manager.value
    with user, eqn.ctx.manager, extend_compute_type(eqn.ctx.compute_type or computes):
        yield
