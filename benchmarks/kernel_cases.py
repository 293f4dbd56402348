"""What kernels.py times: the calls of zeroxla.quantize, on inputs of a given size, and a copy."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.quantize import (
    Wire,
    WireFormat,
    dequant_reduce,
    dequantize,
    quantize,
    swizzled_quantize,
)

ROTATED = ", rotated"
KERNELS = (
    "quantize",
    "dequantize",
    "swizzled_quantize",
    "dequant_reduce",
    f"quantize{ROTATED}",
    f"dequantize{ROTATED}",
)
NUM_SOURCES = 8  # of dequant_reduce
NODES, DEVICES = 2, 4  # of swizzled_quantize
BLOCK = 256
MIB = 1 << 20
_MOST_TURNS, _LEAST_TURNS = 25, 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kernel on one input.

    Attributes:
      kernel: of KERNELS.
      bits: of a code.
      dtype: of the array that is quantized, or that comes out; "" for dequant_reduce, which reads
        and writes wires.
      size: bytes of that array; of all sources of dequant_reduce.
    """

    kernel: str
    bits: int
    dtype: str
    size: int


def all_cases(kernels: Sequence[str], sizes: Sequence[int]) -> list[Case]:
    """Return the cases of these kernels and sizes (bytes) at both widths."""
    return [
        Case(kernel=kernel, bits=bits, dtype=dtype, size=size)
        for kernel, bits in itertools.product(kernels, (8, 4))
        for dtype in ([""] if kernel == "dequant_reduce" else ["float32", "bfloat16"])
        for size in sizes
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A case made ready.

    Attributes:
      call: the public function, with everything but its argument and `backend`.
      argument: what it takes: an array or wires, on the device.
      moved_bytes: read and written at least, from shapes and dtypes.
    """

    call: Callable[..., Any]
    argument: Any
    moved_bytes: int

    def on(self, backend: str) -> Callable[[], Any]:
        """Return a function without arguments that runs the compiled call on a backend."""
        return functools.partial(
            jax.jit(functools.partial(self.call, backend=backend)), self.argument
        )


def prepare(case: Case) -> Work:
    """Make the input of a case on the default device, from normal random numbers."""
    kernel = case.kernel.removesuffix(ROTATED)
    format = WireFormat(
        bits=case.bits, block=BLOCK, hadamard=32 if case.kernel.endswith(ROTATED) else 0
    )
    if kernel == "dequant_reduce":
        # As many whole blocks as a source of this size has.
        num_blocks = case.size // NUM_SOURCES // (format.num_bytes(1 << 20) // ((1 << 20) // BLOCK))
        size = num_blocks * BLOCK
        make = functools.partial(swizzled_quantize, nodes=NUM_SOURCES, devices=1, backend="xla")
        wires = jax.jit(lambda x: make(x, format))(_normal(NUM_SOURCES * size, "float32"))
        wires = Wire(wires.buffer[0], size, format)
        moved = wires.buffer.nbytes + format.num_bytes(size)
        return _ready(dequant_reduce, wires, moved)
    dtype = jnp.dtype(case.dtype)
    size = case.size // dtype.itemsize
    x = _normal(size, case.dtype)
    if kernel == "swizzled_quantize":
        call = functools.partial(swizzled_quantize, format=format, nodes=NODES, devices=DEVICES)
        count = NODES * DEVICES
        return _ready(call, x, case.size + count * format.num_bytes(size // count))
    moved = case.size + format.num_bytes(size)
    if kernel == "quantize":
        return _ready(functools.partial(quantize, format=format), x, moved)
    wire = jax.jit(lambda x: quantize(x, format, backend="xla"))(x)
    return _ready(functools.partial(dequantize, shape=(size,), dtype=dtype), wire, moved)


def _ready(call: Callable[..., Any], argument: Any, moved_bytes: int) -> Work:
    return Work(call=call, argument=jax.block_until_ready(argument), moved_bytes=moved_bytes)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _normal(size: int, dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (size,), dtype)


def copy_of(moved_bytes: int) -> Callable[[], Any]:
    """Return a function that reads half of so many bytes and writes the other half."""
    words = jax.block_until_ready(jnp.zeros(moved_bytes // 8, jnp.uint32))
    return functools.partial(jax.jit(lambda x: x + 1), words)


def num_different(a: Any, b: Any) -> int:
    """Return how many bytes of two wires differ, or how many elements of two arrays."""
    a, b = (x.buffer if isinstance(x, Wire) else x for x in (a, b))
    if jnp.issubdtype(a.dtype, jnp.floating):
        bits = jnp.uint32 if a.dtype == jnp.float32 else jnp.uint16
        a, b = (jax.lax.bitcast_convert_type(x, bits) for x in (a, b))
    return int(jnp.sum(a != b))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """Something to time.

    Attributes:
      name: of the backend or of the library's operation.
      call: starts it and returns its result.
      wait: blocks until a result is there.
    """

    name: str
    call: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready


def take_turns(runners: Sequence[Runner], *, budget_s: float) -> dict[str, list[float]]:
    """Return seconds of a call by name, one of each turn; the runners take turns.

    On a CPU each call is waited for. Elsewhere as many are queued as take 2 ms, so that the host's
    part is hidden where it can be.

    Args:
      runners: each was called before.
      budget_s: after which no further turn begins, beyond the first 5.
    """
    counts = {runner.name: 1 for runner in runners}
    if jax.default_backend() != "cpu":
        for runner in runners:
            once = min(_seconds(runner, 1) for _ in range(3))
            counts[runner.name] = min(50, max(1, round(2e-3 / once)))
    times: dict[str, list[float]] = {runner.name: [] for runner in runners}
    begin = time.perf_counter()
    for turn in range(_MOST_TURNS):
        if turn >= _LEAST_TURNS and time.perf_counter() - begin > budget_s:
            break
        for runner in runners:
            times[runner.name].append(_seconds(runner, counts[runner.name]))
    return times


def _seconds(runner: Runner, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        result = runner.call()
    runner.wait(result)
    return (time.perf_counter() - begin) / count


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of times / others, turn by turn."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))
