"""Every kernel with every kind of wire, against the XLA reference: bits.

The reference runs twice, on the GPU and on the host's CPU; a kernel must give the bits of both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from kernel_cases import num_different

from gpu_parts.findings import Finding, NotHereError, Program, bounded
from gpu_parts.place import Place
from zeroxla.pallas_kernels import shim
from zeroxla.quantize import (
    Wire,
    WireFormat,
    dequant_reduce,
    dequantize,
    quantize,
    swizzled_quantize,
)

FORMATS = (
    *(WireFormat(bits=bits, block=block) for bits in (8, 4) for block in (128, 256, 2048)),
    *(WireFormat(bits=bits, hadamard=32, block=block) for bits in (8, 4) for block in (128, 256)),
    *(WireFormat(bits=bits, rounding="stochastic") for bits in (8, 4)),
    WireFormat(bits=8, symmetric=False, scale="mse"),
    WireFormat(bits=4, symmetric=False, block=128),
    WireFormat(bits=4, scale="bound", symmetric=False, hadamard=32, block=128),
    WireFormat(bits=8, scale="mse", scale_dtype="bfloat16"),
    WireFormat(bits=8, scale="deepspeed", symmetric=False),
    WireFormat(bits=4, scale="deepspeed"),
    WireFormat(bits=8, block=17),
    WireFormat(bits=4, block=100),
)
SMALL_FORMATS = (FORMATS[1], FORMATS[4], FORMATS[6], FORMATS[10], FORMATS[13])
NODES, DEVICES = 2, 4
SIZE, SMALL_SIZE = (1 << 22) + 77, 8 * 1024 + 77


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A public function with one kind of wire.

    Attributes:
      name: the function's name, and the dtype of its floats.
      function: `(argument, backend=)` -> an array or a wire.
      make: returns the argument, on the default device.
    """

    name: str
    function: Callable[..., Any]
    make: Callable[[], Any]

    def on(self, backend: str) -> Callable[[Any], Any]:
        """Return the jitted function of the argument on a backend."""
        return jax.jit(functools.partial(self.function, backend=backend))


def calls(place: Place) -> Iterator[tuple[WireFormat, list[Call]]]:
    """Yield every kind of wire and the calls that are made with it.

    They are quantization of one of the two dtypes, back to the other one, and one of the two
    functions of several wires; the kinds of wires take turns.
    """
    size, formats = (SMALL_SIZE, SMALL_FORMATS) if place.small else (SIZE, FORMATS)
    even = size // (NODES * DEVICES) * NODES * DEVICES
    for i, format in enumerate(formats):
        dtypes = ("float32", "bfloat16") if i % 2 else ("bfloat16", "float32")
        key = jax.random.key(1) if format.rounding == "stochastic" else None
        quantized = Call(
            name=f"quantize {dtypes[0]}",
            function=functools.partial(quantize, format=format, key=key),
            make=functools.partial(_floats, size, dtypes[0]),
        )
        back = Call(
            name=f"dequantize {dtypes[1]}",
            function=functools.partial(dequantize, shape=(size,), dtype=jnp.dtype(dtypes[1])),
            make=functools.partial(_wire, format, size),
        )
        swizzled = functools.partial(
            swizzled_quantize, format=format, nodes=NODES, devices=DEVICES, key=key
        )
        several = Call(
            name=f"swizzled_quantize {dtypes[1]}",
            function=swizzled,
            make=functools.partial(_floats, even, dtypes[1]),
        )
        if i % 4 < 2 and key is None:
            several = Call(
                name="dequant_reduce",
                function=dequant_reduce,
                make=functools.partial(_sources, format, even),
            )
        # What is read does not depend on how it was rounded.
        yield format, [quantized, several] if key is not None else [quantized, back, several]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _floats(size: int, dtype: str) -> jax.Array:
    """Return normal numbers with a few outliers, a block of zeros and a block of one number."""
    x = jax.random.normal(jax.random.key(0), (size,), jnp.float32)
    x = jnp.where(jnp.arange(size) % 4099 == 7, 100 * x, x)
    x = x.at[:4096].set(0).at[4096:8192].set(0.3)
    return x.astype(dtype)


def _wire(format: WireFormat, size: int) -> Wire:
    return jax.jit(lambda x: quantize(x, format, backend="xla"))(_floats(size, "float32"))


def _sources(format: WireFormat, size: int) -> Wire:
    make = functools.partial(swizzled_quantize, nodes=NODES * DEVICES, devices=1, backend="xla")
    wires = jax.jit(lambda x: make(x, format))(_floats(size, "float32"))
    return Wire(wires.buffer[0], size // (NODES * DEVICES), format)


def measure(place: Place) -> Iterator[Finding]:
    """Run every call on every backend that this GPU has.

    Yields a line for each kind of wire, and one for each call that does not run.
    """
    backends = backends_of(place)
    took, host = dict.fromkeys(backends, 0), jax.devices("cpu")[0]
    for format, made in calls(place):
        different, runs = 0, dict.fromkeys(("xla", *backends), 0)
        for call in made:
            found, errors = results(call, backends)
            for backend, text in errors.items():
                name = f"{call.name}, {backend}, {describe(format)}"
                yield Finding(name=name, text=f"failed: {text}", failed=True)
            expected = call.on("xla")(jax.device_put(call.make(), host))
            for backend, result in found.items():
                runs[backend] += 1
                different += num_different(jax.device_put(result, host), expected)
                if backend != "xla":
                    took[backend] += 1
                    different += num_different(result, found["xla"])
        ran = ", ".join(f"{name} {num}" for name, num in runs.items())
        names = ", ".join(call.name for call in made)
        text = f"{describe(format)}: {names}; calls by {ran}: bytes or elements that differ"
        yield bounded(text, different, 0)
    for backend, num in took.items():
        if not num:
            yield Finding(name=backend, text="took none of the wires", failed=True)


def results(call: Call, backends: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the results of a call by backend, the reference's among them, and the errors of the
    backends that failed. A backend that does not take such blocks is in neither."""
    argument = call.make()
    found, errors = {"xla": call.on("xla")(argument)}, {}
    for backend in backends:
        try:
            found[backend] = jax.block_until_ready(call.on(backend)(argument))
        except Exception as error:  # whatever a compiler says: the other calls go on
            if not isinstance(error, ValueError) or "does not take" not in str(error):
                errors[backend] = str(error).strip().partition("\n")[0][:200]
    return found, errors


def describe(format: WireFormat) -> str:
    """Return the options of a wire that differ from the defaults, and its bits and block."""
    words = [f"int{format.bits}", f"block {format.block}"]
    words += ["offsets"] * (not format.symmetric) + ["rotated"] * bool(format.hadamard)
    words += ["stochastic"] * (format.rounding == "stochastic")
    words += [format.scale] if format.scale else []
    return " ".join(words + ([f"{format.scale_dtype} steps"] if format.scale_dtype else []))


def backends_of(place: Place) -> tuple[str, ...]:
    """Return the kernels' backends that the devices of this process run; simulated devices run all
    of them in Pallas' interpreter."""
    capability = 9.0 if place.simulated else place.capability()
    found = ("mosaic",) * (capability >= 9 and shim.has_mosaic())
    return (*found, *("triton",) * (capability >= 8 and shim.has_triton()))


def programs(place: Place) -> Iterator[Program]:
    """Yield every call with the backend that a Hopper takes by itself."""
    for format, made in calls(place):
        for call in made:
            yield Program(
                name=f"{call.name}, {describe(format)}",
                lower=functools.partial(_lower, place, call),
            )


def _lower(place: Place, call: Call) -> jax.stages.Lowered:
    """Lower a call with the backend that is taken by itself.

    Raises:
      NotHereError: that is no Mosaic kernel. Triton asks the GPU that is there about itself.
    """
    lowered = place.lower(call.function, jax.eval_shape(call.make))
    if "mosaic_gpu" not in lowered.as_text():
        raise NotHereError("no kernel for Hopper takes such blocks, and Triton needs its GPU")
    return lowered
