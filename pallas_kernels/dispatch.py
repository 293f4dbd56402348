"""Decides what runs: a kernel if one fits and the program is lowered for NVIDIA, otherwise XLA.

Tracing decides which kernel fits, by the sizes and the GPU of this process. Without a GPU, as when
a program is compiled ahead of time, it assumes a Hopper GPU. Lowering decides between the kernel
and XLA (`lax.platform_dependent`).
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import kernels, reference, shim
from .geometry import mosaic_tile, triton_tile
from .layout import Layout
from .swizzle import Swizzle

Seed = tuple[jax.Array, jax.Array]
BACKENDS = ("xla", "mosaic", "triton")
_AMPERE, _HOPPER = 8, 9


def quantize(
    x: jax.Array,
    layout: Layout,
    *,
    seed: Seed | None,
    swizzle: Swizzle | None,
    backend: str | None,
) -> jax.Array:
    """Return the wires of the rows of x: [W, size] -> uint8[W, num_bytes].

    Raises:
      ValueError: the backend is unknown, or takes no such blocks.
    """
    chosen = _backend(backend, layout, **kernels.sizes_of_floats(layout, x.shape[0], 1, x.dtype))
    plain = functools.partial(reference.quantize, layout=layout, seed=seed, swizzle=swizzle)
    if chosen is None:
        return plain(x)

    def fast(x: jax.Array, *, interpret: bool = False) -> jax.Array:
        wires = chosen.quantize(x, layout, _packed(seed), swizzle, interpret=interpret)
        tail = x[:, layout.size - layout.tail :]
        return _patched(wires, reference.quantize_rest(tail, layout, seed, swizzle))

    return _on_nvidia(backend, fast, plain, x)


def dequant_sum(data: jax.Array, layout: Layout, *, dtype: Any, backend: str | None) -> jax.Array:
    """Sum N wires each in float32 and round to dtype: uint8[N, W, num_bytes] -> dtype[W, size].

    Raises:
      ValueError: as for `quantize`.
    """
    num_sources, num_wires, _ = data.shape
    sizes = kernels.sizes_of_floats(layout, num_wires, num_sources, dtype)
    chosen = _backend(backend, layout, **sizes)
    plain = functools.partial(reference.dequant_sum, layout=layout, dtype=dtype)
    if chosen is None:
        return plain(data)

    def fast(data: jax.Array, *, interpret: bool = False) -> jax.Array:
        x = chosen.dequant_sum(data, layout, dtype, interpret=interpret)
        if not layout.tail:
            return x
        rest = reference.dequant_sum_rest(data, layout, dtype)
        return _patched(x, [(layout.size - layout.tail, rest)])

    return _on_nvidia(backend, fast, plain, data)


def dequant_reduce(
    data: jax.Array, layout: Layout, out: Layout, *, seed: Seed | None, backend: str | None
) -> jax.Array:
    """Return the wires of sums of N wires each: uint8[N, W, num_bytes] -> uint8[W, out.num_bytes].

    Raises:
      ValueError: as for `quantize`.
    """
    if layout.block == out.block and layout.rotated and out.rotated:
        # The rotation is linear, so the rotated elements are summed, and nothing is rotated back.
        layout, out = layout.as_rotated_data(), out.as_rotated_data()
    if layout.block != out.block or layout.rotated or out.rotated:
        total = dequant_sum(data, layout, dtype=jnp.float32, backend=backend)
        return quantize(total, out, seed=seed, swizzle=None, backend=backend)
    num_sources, num_wires, _ = data.shape
    sizes = kernels.sizes_of_wires(layout, out, num_wires, num_sources)
    chosen = _backend(backend, layout, out, **sizes)
    plain = functools.partial(reference.dequant_reduce, layout=layout, out=out, seed=seed)
    if chosen is None:
        return plain(data)

    def fast(data: jax.Array, *, interpret: bool = False) -> jax.Array:
        wires = chosen.dequant_reduce(data, layout, out, _packed(seed), interpret=interpret)
        rest = reference.dequant_sum_rest(data, layout, jnp.float32)
        return _patched(wires, reference.quantize_rest(rest, out, seed))

    return _on_nvidia(backend, fast, plain, data)


def _backend(backend: str | None, *layouts: Layout, **sizes: int) -> Any:
    """Return the module with the functions of the kernels, mosaic.py or triton.py; None for the XLA
    reference."""
    if backend not in (None, *BACKENDS):
        raise ValueError(
            f"backend={backend!r}: take one of {', '.join(BACKENDS)}, or None to have one chosen"
        )
    if backend == "xla":
        return None
    fits = {
        "mosaic": shim.has_mosaic() and mosaic_tile(*layouts, **sizes) is not None,
        "triton": shim.has_triton() and triton_tile(*layouts, **sizes) is not None,
    }
    if backend is None:
        capability = _compute_capability()
        if fits["mosaic"] and (capability is None or capability >= _HOPPER):
            backend = "mosaic"
        elif fits["triton"] and capability is not None and capability >= _AMPERE:
            # jax-triton asks the GPU about itself, and ahead of time there is none.
            backend = "triton"
        else:
            if capability == _AMPERE and not shim.has_triton():
                _warn_of_xla()
            return None
    elif backend == "triton" and not shim.has_triton():
        raise ValueError(
            "backend='triton' needs the packages jax-triton and triton>=3.7, which are not there; "
            'pip install "zeroxla[triton]" brings it on Linux, or use backend=None'
        )
    elif not fits[backend]:
        raise ValueError(
            f"backend={backend!r} does not take {sizes['num_wires']} wires of "
            f"{layouts[0].size} elements in blocks of {layouts[0].block}, as "
            f"{' to '.join(str(layout.rule) for layout in layouts)} "
            f"with JAX {jax.__version__} (pallas_kernels/geometry.py says what it takes, and "
            "Mosaic needs JAX 0.11); use backend=None, which finds one that does"
        )
    return importlib.import_module(f".{backend}", __package__)


@functools.cache
def _warn_of_xla() -> None:
    """Warn, once in a process, that a GPU runs without the kernels that there are for it."""
    warnings.warn(
        "wires are quantized by XLA on this GPU, because its kernels need the packages jax-triton "
        'and triton>=3.7; pip install "zeroxla[triton]" brings them on Linux, and backend="xla" '
        "says that XLA is meant",
        stacklevel=2,
    )


def _on_nvidia(
    backend: str | None,
    fast: Callable[..., jax.Array],
    plain: Callable[..., jax.Array],
    x: jax.Array,
) -> jax.Array:
    """Run `fast` on NVIDIA GPUs and `plain` elsewhere.

    If the caller named a backend, `fast` runs everywhere; without a GPU in the backend's
    interpreter.
    """
    if backend is not None:
        return fast(x, interpret=jax.default_backend() != "gpu")
    return lax.platform_dependent(x, cuda=fast, default=plain)


def _compute_capability() -> int | None:
    """Return the major compute capability of this process's GPU; None without a GPU, and 0 for a
    GPU that is not NVIDIA's, for which no kernel is lowered."""
    if jax.default_backend() != "gpu":
        return None
    major = str(getattr(jax.devices()[0], "compute_capability", "")).split(".")[0]
    return int(major) if major.isdigit() else 0


def _packed(seed: Seed | None) -> jax.Array | None:
    return None if seed is None else jnp.stack(seed)


def _patched(x: jax.Array, patches: list[tuple[int, jax.Array]]) -> jax.Array:
    """Write each patch [W, m] into x [W, n], from the patch's column on; return the result."""
    for at, patch in patches:
        x = lax.dynamic_update_slice(x, patch, (0, at))
    return x
