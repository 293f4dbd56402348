"""What differs between the supported JAX versions (0.10.2 to 0.12), and what only JAX's private
modules offer. No other file of zeroxla knows either.

Come here when a new JAX breaks something. Names of primitives are in `primitives`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax._src import clusters, config, core, distributed, source_info_util, xla_bridge
from jax._src.compute_on import extend_compute_type
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.interpreters import partial_eval
from jax.experimental import compute_on

from zeroxla.program.primitives import CALLS, CUSTOM_RULES, REMATS

JAX_VERSION: tuple[int, ...] = jax.__version_info__[:3]

COMPUTE_ON = "compute_on"
"""The primitive that a function from `compute_on_host` becomes in a trace."""

CUDNN_VERSION = 91000
"""Programs for absent GPUs are traced for cuDNN 9.10, as the descriptions in `mesh/targets/`."""

_absent: contextvars.ContextVar[Any] = contextvars.ContextVar("absent_device", default=None)
"""The device for which JAX's checks of cuDNN are answered; None lets JAX look at its own."""


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Return (jaxpr with `invars`, `constvars`, `eqns`, `outvars`; values of the constvars).

    In JAX 0.10 an equation's jaxpr is either closed (a pair of jaxpr and constants) or open. Since
    0.11 there is one class, which may carry its own constants.
    """
    if isinstance(jaxpr, jex.ClosedJaxpr):  # pyright: ignore[reportPrivateImportUsage]
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        return inner, tuple(jaxpr.consts)
    return jaxpr, tuple(getattr(jaxpr, "consts", None) or ())


def without_dead_code(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Open a closed jaxpr and drop the equations that no output needs, also in loop and remat
    bodies. Flax's nnx transforms leave such ones: they return every parameter that they are given.
    """
    jaxpr, consts = open_jaxpr(jaxpr)
    used = [True] * len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(jaxpr, used, instantiate=True)[0], consts


def inlined_jaxpr(eqn: Any) -> Any | None:
    """Return the body of a call, such as `jit`; None for every other equation."""
    return _body(eqn.params) if eqn.primitive.name in CALLS else None


def forward_jaxpr(eqn: Any) -> Any | None:
    """Return the body of an equation that runs it once in forward; None for every other equation.

    These are calls, custom rules and `jax.checkpoint`. A program with them inlined computes the
    same, but its derivative does not use the rules.
    """
    once = eqn.primitive.name in CALLS | CUSTOM_RULES | REMATS
    return _body(eqn.params) if once else None


def _body(params: dict[str, Any]) -> Any:
    return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return (number of constants, number of carries) of a `scan` equation.

    JAX 0.10 has them as parameters; since 0.11 they follow from the tree of its operands.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def has_effects(eqn: Any) -> bool:
    """Return whether an equation does more than compute. Naming mesh axes does not count."""
    return any(not isinstance(effect, core.NamedAxisEffect) for effect in eqn.effects)


def branches_for(params: dict[str, Any], platform: str) -> Sequence[Any]:
    """Return the branches of a `cond` equation that a platform may take.

    These are all branches. If `jax.lax.platform_dependent` made the equation, it is the platform's
    own branch alone.
    """
    branches, platforms = params["branches"], params.get("branches_platforms")
    if platforms is None:
        return branches
    name = {"gpu": "cuda"}.get(platform, platform)
    return [
        next(b for b, names in zip(branches, platforms, strict=True) if not names or name in names)
    ]


def call_equation(eqn: Any, name_stack: Any, args: Sequence[Any]) -> list[Any]:
    """Bind an equation to `args` in its own context and under `name_stack`; return its results."""
    with context_of(eqn, name_stack):
        out = eqn.primitive.bind(*args, **bind_params(eqn.primitive, eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_params(primitive: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for binding an equation's primitive again.

    Raises:
      NotImplementedError: JAX is older than 0.10.
    """
    bound = primitive.get_bind_params(params)
    if isinstance(bound, tuple):  # JAX before 0.10 returned (subfuns, params)
        raise NotImplementedError(
            f"JAX {jax.__version__} is older than 0.10.2, the oldest supported version; upgrade jax"
        )
    return bound


def name_stack_of(eqn: Any) -> Any:
    """Return the `jax.named_scope` path of an equation."""
    return eqn.source_info.name_stack


@contextlib.contextmanager
def mesh_context(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Return a context for tracing a program that runs on `mesh`.

    In it `mesh` replaces the mesh that the user has set, if there is one. And a model that calls
    `jax.nn.dot_product_attention(implementation="cudnn")` is traced for the mesh's GPUs, although
    they may be absent: while it traces, JAX asks this process for cuDNN and a GPU.
    """
    is_set = not jax.sharding.get_abstract_mesh().empty
    token = _absent.set(_absent_device(mesh))
    try:
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            yield
    finally:
        _absent.reset(token)


def _absent_device(mesh: jax.sharding.Mesh) -> Any | None:
    """Return a device of the mesh, or the kind that an abstract mesh names; None if it is a GPU of
    this process, for which JAX's own checks hold."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        device = mesh.abstract_device or jax.devices()[0]
    else:
        device = mesh.devices.flat[0]
    if device.platform == "gpu" and jax.default_backend() == "gpu" and device in jax.devices():
        return None
    _answer_cudnn_checks()
    return device


@functools.cache
def _answer_cudnn_checks() -> None:
    """Let JAX's checks of cuDNN be answered for the device of `mesh_context`; elsewhere JAX's own
    functions run."""

    def answered(own: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
        def check(*args: Any) -> Any:
            device = _absent.get()
            return own(*args) if device is None else answer(_capability(device), *args)

        return check

    answers = {
        "check_cudnn_version": lambda mine: CUDNN_VERSION,
        "check_compute_capability": lambda mine, least: mine >= _numbers(least),
        "is_cuda_compute_capability_equal": lambda mine, wanted: mine == _numbers(wanted),
    }
    for name, answer in answers.items():
        setattr(cudnn, name, answered(getattr(cudnn, name), answer))


def _capability(device: Any) -> tuple[int, ...]:
    """Return the compute capability of a GPU, such as (9, 0).

    Raises:
      ValueError: the device has none from which cuDNN has attention, 8.0.
    """
    found = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
    if not found or _numbers(found) < (8, 0):
        what = f"{device.device_kind}, {f'compute capability {found}' if found else 'no GPU'}"
        raise ValueError(
            'the model calls jax.nn.dot_product_attention(implementation="cudnn"), a kernel of '
            f"NVIDIA GPUs from compute capability 8.0 on, and the mesh has {what}; plan it or "
            'compile it for such a GPU, or run it with implementation="xla"'
        )
    return _numbers(found)


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in str(capability).split("."))


def backends_started() -> bool:
    """Return whether JAX has made its devices. Their number cannot change afterwards."""
    return xla_bridge.backends_are_initialized()


def coordination_client() -> Any | None:
    """Return the client of `jax.distributed`'s key-value store; None if it was not initialized."""
    return distributed.global_state.client


def cluster_parameters(
    source: str,
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    timeout: float,
) -> tuple[str, int, int, Sequence[int] | None]:
    """Fill in the arguments that are None, as `jax.distributed.initialize` would.

    Args:
      source: where the given arguments come from; the error names it.
      coordinator: address of the coordinator, `host:port`.
      num_processes: the number of processes.
      process_id: this process's number.
      timeout: seconds to wait for the cluster's answer.

    Returns:
      (coordinator, number of processes, this process, its local devices; None for all of them).

    Raises:
      ValueError: JAX finds no cluster that tells what is missing.
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
    """Return the abstract value (`aval`) of an array."""
    return jax.core.ShapedArray(tuple(shape), dtype)  # pyright: ignore[reportAttributeAccessIssue]


def compiler_options(platform: str, *, prefetch: bool) -> dict[str, Any]:
    """Return the compiler options of a step on one platform. Other platforms reject them.

    They concern GPUs with gathers that run ahead. The first option gathers in each turn of a loop
    what the next turn needs. The second one is about copies: a loop copies what it keeps of each
    turn into a stack, beside the compute. XLA's scheduler takes such a copy to last 5 ms. To hide
    it, the scheduler leaves no matmuls for the gathers, unless this option sets copies apart.

    Args:
      platform: "cpu", "gpu" or "tpu".
      prefetch: whether gathers run ahead.
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
    """Return a function that the host computes. Its arguments and results are in host memory.

    Up to JAX 0.11.0 `compute_on` is a context that does not say where results are; `compute_on2` is
    the decorator.
    """
    decorate: Any = getattr(compute_on, "compute_on2", None) or compute_on.compute_on
    return decorate(fun, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)


@contextlib.contextmanager
def context_of(eqn: Any, name_stack: Any) -> Iterator[None]:
    """Return a context in which a primitive is bound with an equation's scopes and settings.

    An equation that does not say where it computes does so where the surrounding program does.
    """
    stack = source_info_util.current_name_stack() + name_stack
    user = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
    computes = config.compute_on_context_manager.value
    with user, eqn.ctx.manager, extend_compute_type(eqn.ctx.compute_type or computes):
        yield
