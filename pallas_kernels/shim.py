"""Calls into Pallas and jax-triton that differ between the supported JAX versions, 0.10.2 to 0.12.

Pallas' GPU backends take 0.5 s to import, so functions import them when a kernel is traced.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

JAX_VERSION: tuple[int, ...] = jax.__version_info__[:3]


def has_mosaic() -> bool:
    """Return whether Pallas' Mosaic GPU backend can run the kernels, as it can since JAX 0.11. In
    JAX 0.10 it finds no layout for a row along its block, and has no interpreter."""
    return JAX_VERSION >= (0, 11, 0)


def mosaic_interpreter() -> Any:
    """Return the value of `plgpu.kernel(interpret=)` that runs a kernel on the CPU."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


def mosaic_load(ref: Any, layout: Any) -> jax.Array:
    """Load a reference's values into registers of the given layout."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.load(ref, layout=layout, optimized=False)


def mosaic_store(ref: Any, value: jax.Array) -> None:
    """Store registers to a reference."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def registers(lanes: int, vector: int) -> Any:
    """Return the layout of an array [T, C] in the registers of a warpgroup.

    Args:
      lanes: the number of lanes that lie side by side. The other lanes, and the warps, lie below.
      vector: the number of neighbours that one register of a lane holds.
    """
    below, across = 32 // lanes, lanes * vector
    return _tiled(((4 * below, across), (below, across), (vector,)), -3, -2)


def row_registers(lanes: int, count: int) -> Any:
    """Return the layout of an array [T, count] in which a lane holds whole rows.

    They are the rows of which `registers(lanes, ...)` gives the lane a part.
    """
    from jax.experimental.mosaic.gpu.fragmented_array import Replicated

    below = 32 // lanes
    return _tiled(((4 * below, count), (below, count), (count,)), -3, Replicated(lanes))


def _tiled(tiles: tuple[tuple[int, ...], ...], below: int, across: Any) -> Any:
    """Return a layout from the shapes of tiles within tiles, the outermost first, and from the dims
    along which lanes lie. A lane's vector lies along the last dim."""
    from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = TiledLayout(
        plgpu.Tiling(tiles),
        warp_dims=(below - 2,),
        lane_dims=(below, across),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(
        layout.tiling,
        warp_dims=layout.warp_dims,
        lane_dims=layout.lane_dims,
        vector_dim=layout.vector_dim,
    )


@functools.cache
def has_triton() -> bool:
    """Return whether jax-triton and Triton 3.7 or later are installed. Triton 3.6 passes no
    dataclass on to a function inside a kernel."""
    if importlib.util.find_spec("jax_triton") is None:
        return False
    try:
        major, minor, *_ = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (3, 7)


def triton_call(
    kernel: Any,
    operands: list[jax.Array],
    result: jax.ShapeDtypeStruct,
    programs: int,
    constants: Mapping[str, Any],
) -> jax.Array:
    """Run a Triton kernel of 4 warps, which rounds after every operation.

    Args:
      kernel: a function under `triton.jit`: (operands, the result, constants).
      operands: whole arrays in global memory.
      result: shape and dtype of what it writes.
      programs: how many programs run.
      constants: what the kernel knows when it is compiled, hashable.
    """
    call = _jax_triton().triton_call
    # Otherwise the compiler fuses a product and a sum into one operation.
    unfused: dict[str, Any] = {"enable_fp_fusion": False}
    if "out_type" in inspect.signature(call).parameters:  # since jax-triton 0.4
        given = {"out_type": result, "backend_options": unfused}
    else:
        given = {"out_shape": result, **unfused}
    return call(
        *operands, kernel=kernel, grid=(programs,), num_warps=4, num_stages=1, **given, **constants
    )


@functools.cache
def _jax_triton() -> Any:
    """Import jax-triton.

    JAX asks a primitive which of its operands are needed. Version 0.4.1 answers with a function of
    two arguments, and JAX 0.12 calls it with three. Without such a function JAX keeps or drops a
    kernel as a whole, which is right for kernels with one result.
    """
    from jax.interpreters import partial_eval

    library = importlib.import_module("jax_triton.triton_lib")
    partial_eval.dce_rules.pop(library.triton_kernel_call_p, None)
    return importlib.import_module("jax_triton")


def triton_compiled(
    function: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct], capability: int
) -> Any:
    """Compile the one Triton kernel in a function for a GPU that need not be there.

    Args:
      function: calls `triton_call` once.
      shapes: its arguments.
      capability: the compute capability, 80 for an A100. For 90 Triton compiles for sm_90a.

    Returns:
      Triton's CompiledKernel, whose `asm` has the code as "ttgir", "ptx" and "cubin".
    """
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    equations = jax.make_jaxpr(function)(*shapes).jaxpr.eqns
    (call,) = (eq for eq in equations if eq.primitive.name == "triton_kernel_call")
    # jax-triton 0.4 has constants and options in dicts of their own.
    kernel, options = call.params["fn"], call.params.get("backend_options", call.params)
    given = call.params.get("metaparams", call.params)
    constants = {name: given[name] for name in kernel.arg_names if name in given}
    kept = ("num_warps", "num_stages", "enable_fp_fusion")
    arrays: list[Any] = [x.aval for x in (*call.invars, *call.outvars)]
    pointers = [name for name in kernel.arg_names if name not in constants]
    signature = {n: _POINTERS[x.dtype.name] for n, x in zip(pointers, arrays, strict=True)}
    source = compiler.ASTSource(
        kernel,
        signature | dict.fromkeys(constants, "constexpr"),
        constants,
        # Arrays of JAX begin at a multiple of 16 bytes.
        {(i,): [["tt.divisibility", 16]] for i in range(len(arrays))},
    )
    return triton.compile(source, target=target, options={name: options[name] for name in kept})


_POINTERS = {
    "float32": "*fp32",
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "int32": "*i32",
    "uint8": "*u8",
}


def triton_interpreted(
    kernel: Any,
    operands: list[jax.Array],
    result: jax.ShapeDtypeStruct,
    programs: int,
    constants: Mapping[str, Any],
) -> jax.Array:
    """Do as `triton_call` does, on the CPU in Triton's interpreter.

    Raises:
      ValueError: Triton was imported without TRITON_INTERPRET=1, so it only compiles.
    """
    tl = importlib.import_module("triton.language")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if not isinstance(kernel, interpreter.InterpretedFunction):
        raise ValueError(
            "backend='triton' without a GPU runs in Triton's interpreter, and Triton was imported "
            "without it; set the environment variable TRITON_INTERPRET=1 before Python starts, or "
            "use backend=None"
        )

    def pointer(x: np.ndarray) -> Any:
        kind = tl.pointer_type(getattr(tl, x.dtype.name))
        address = np.array([x.ctypes.data], np.uint64)
        return tl.tensor(interpreter.TensorHandle(address, kind), kind)

    def run(*operands: Any) -> np.ndarray:
        out = np.zeros(result.shape, result.dtype)
        arrays = [*map(np.ascontiguousarray, operands), out]
        with np.errstate(all="ignore"):  # as on a GPU
            kernel[(programs,)](*map(pointer, arrays), **constants)
        return out

    return jax.pure_callback(run, result, *operands)
