"""The closest operations of PyTorch, bitsandbytes and CuPy to those that kernels.py times.

None of them gives zeroxla's bits. "composite" is what one writes with a library's elementwise
operations: absmax of each block, divide, round, clip, convert, and pack at 4 bits; each operation
reads and writes memory.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
from kernel_cases import BLOCK, Runner

LIBRARIES = ("torch", "bitsandbytes", "cupy")
Call = Callable[[], Any]


def find(name: str) -> tuple[ModuleType | None, str]:
    """Return a library that can use JAX's default device, or None; and a sentence on it."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a library that is there may still fail on what it loads
        return None, f"{name}: not compared, it cannot be imported ({error})"
    on_cpu = jax.default_backend() == "cpu"
    if name == "cupy":
        usable = not on_cpu and module.cuda.is_available()
    else:
        usable = on_cpu or importlib.import_module("torch").cuda.is_available()
    if not usable:
        return None, f"{name}: not compared, it has no {jax.devices()[0].device_kind} device"
    return module, f"{name} {importlib.metadata.version(name)}"


def runners(modules: dict[str, ModuleType], kernel: str, x: jax.Array, bits: int) -> list[Runner]:
    """Return the operations closest to a kernel, with their inputs made of x.

    Args:
      modules: found libraries by name.
      kernel: "quantize" or "dequantize"; there is nothing close to the others.
      x: float32 or bfloat16, a whole number of blocks.
      bits: 8 or 4.
    """
    made = []
    for name, module in modules.items():
        calls = {"torch": _torch, "bitsandbytes": _bitsandbytes, "cupy": _cupy}[name]
        wait = functools.partial(_wait_cupy if name == "cupy" else _wait_torch, module)
        for operation, there, back in calls(module, x, bits):
            call = there if kernel == "quantize" else functools.partial(back, there())
            made.append(Runner(name=f"{name}: {operation}", call=call, wait=wait))
    return made


Operations = Iterator[tuple[str, Call, Callable[[Any], Any]]]  # name, quantize, dequantize


def _torch(torch: ModuleType, x: jax.Array, bits: int) -> Operations:
    x_TB = torch.from_dlpack(x).view(-1, BLOCK)
    half = 1 << (bits - 1)

    def there() -> Any:
        step = x_TB.abs().amax(1, keepdim=True).float() / (half - 0.5)
        code = (x_TB / step).round_().clamp_(-half, half - 1).to(torch.int8)
        return _packed(code, bits), step

    def back(wire: Any) -> Any:
        code, step = wire
        return (_unpacked(code, bits, torch.cat) * step).to(x_TB.dtype)

    yield "composite", there, back
    if bits == 8 and x_TB.dtype == torch.float32:
        zeros = torch.zeros(len(x_TB), dtype=torch.int64, device=x_TB.device)

        def per_channel() -> Any:
            step = x_TB.abs().amax(1) / (half - 0.5)
            return torch.quantize_per_channel(x_TB, step, zeros, 0, torch.qint8)

        yield "amax + quantize_per_channel", per_channel, lambda wire: wire.dequantize()


def _bitsandbytes(bitsandbytes: ModuleType, x: jax.Array, bits: int) -> Operations:
    functional = bitsandbytes.functional
    x_N = importlib.import_module("torch").from_dlpack(x)
    if bits == 8:
        yield (
            "quantize_blockwise",
            lambda: functional.quantize_blockwise(x_N, blocksize=BLOCK),
            lambda wire: functional.dequantize_blockwise(*wire),
        )
    else:
        yield (
            "quantize_4bit",
            lambda: functional.quantize_4bit(x_N, blocksize=BLOCK, quant_type="nf4"),
            lambda wire: functional.dequantize_4bit(*wire),
        )


def _cupy(cupy: ModuleType, x: jax.Array, bits: int) -> Operations:
    x_TB = cupy.from_dlpack(x).reshape(-1, BLOCK)
    half = 1 << (bits - 1)

    def there() -> Any:
        step = cupy.abs(x_TB).max(axis=1, keepdims=True).astype(cupy.float32) / (half - 0.5)
        code = cupy.clip(cupy.rint(x_TB / step), -half, half - 1).astype(cupy.int8)
        return _packed(code, bits), step

    def back(wire: Any) -> Any:
        code, step = wire
        return (_unpacked(code, bits, cupy.concatenate) * step).astype(x_TB.dtype)

    yield "composite", there, back


def _packed(code: Any, bits: int) -> Any:
    """Return int8 codes [T, BLOCK] of any array library, two a byte at 4 bits."""
    return code if bits == 8 else (code[:, : BLOCK // 2] & 15) | (code[:, BLOCK // 2 :] << 4)


def _unpacked(code: Any, bits: int, join: Callable[[list[Any], int], Any]) -> Any:
    """Return what `_packed` was given; `join` concatenates along a dim."""
    return code if bits == 8 else join([code << 4 >> 4, code >> 4], 1)


def _wait_torch(module: ModuleType, result: Any) -> None:
    if jax.default_backend() != "cpu":
        importlib.import_module("torch").cuda.synchronize()


def _wait_cupy(cupy: ModuleType, result: Any) -> None:
    cupy.cuda.get_current_stream().synchronize()
