"""Data and formats for tests and benchmarks of wires: distributions, and covers of formats."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tools import quantize_oracle
from zeroxla.quantize import Wire, WireFormat, dequantize, quantize

DTYPES = ("float32", "bfloat16", "float16")
BLOCKS = (16, 17, 100, 256, 1000, 2048, 16384)
LENGTHS = (1, 7, 255, 256, 257, 50257)
LARGEST = float(np.finfo(np.float32).max)

Distribution = Callable[[np.random.Generator, int], np.ndarray]


def _one_outlier(rng: np.random.Generator, n: int) -> np.ndarray:
    x = rng.normal(size=n)
    x[rng.integers(n)] = -1000.0
    return x


def _denormal(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.normal(size=n) * 2.0 ** rng.integers(-149, -124, n)


def _huge(rng: np.random.Generator, n: int) -> np.ndarray:
    x = rng.uniform(-LARGEST, LARGEST, n)
    x[:: max(n // 7, 1)] = LARGEST
    return x


def _tiny(rng: np.random.Generator, n: int) -> np.ndarray:
    # On both sides of 2^-90, below which a block is zero.
    return rng.choice([-1.0, 1.0], n) * 2.0 ** rng.uniform(-94, -86, n)


DISTRIBUTIONS: dict[str, Distribution] = {
    "normal": lambda rng, n: rng.normal(size=n),
    "heavy_tailed": lambda rng, n: rng.standard_t(2, n) * 1e-3,
    "constant": lambda rng, n: np.full(n, 0.3),
    "constant_negative": lambda rng, n: np.full(n, -7e4),
    "zeros": lambda rng, n: np.zeros(n),
    "one_outlier": _one_outlier,
    "denormal": _denormal,
    "huge": _huge,
    "tiny": _tiny,
    "large": lambda rng, n: rng.uniform(-1, 1, n) * (2.0**126 - 2.0**102),
    "far_from_zero": lambda rng, n: 1e4 + rng.normal(size=n),
    "last_bits": lambda rng, n: 3.0 + rng.integers(-3, 4, n) * 2.0**-22,
    "few_values": lambda rng, n: rng.integers(-8, 8, n) * 0.125,
}
"""Functions by name, from (generator, length) to float64 numbers, which are to be `cast`."""


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return x rounded to a dtype. Numbers that would overflow become the dtype's largest one."""
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -largest, largest).astype(dtype)


def sample(name: str, n: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Return n numbers of a distribution in a dtype."""
    return cast(DISTRIBUTIONS[name](np.random.default_rng(seed), n), dtype)


def options(format: WireFormat) -> dict[str, Any]:
    """Return the arguments of the oracle's functions for a format."""
    return {
        "bits": format.bits,
        "block": format.block,
        "symmetric": format.symmetric,
        "scale": format.scale,
        "short": format.scale_dtype == "bfloat16",
        "rotated": format.hadamard == 32,
    }


def name_of(format: WireFormat) -> str:
    """Return a short name for test ids."""
    words = [f"int{format.bits}", f"block{format.block}", "sym" if format.symmetric else "asym"]
    words += [str(format.scale), str(format.scale_dtype)]
    words += ["hadamard"] if format.hadamard else []
    words += ["stochastic"] if format.rounding == "stochastic" else []
    return "-".join(words)


# One compilation for each format, size and dtype, however many tests ask.
quantized = jax.jit(quantize, static_argnames=("format", "backend"))
restored = jax.jit(dequantize, static_argnames=("shape", "dtype", "backend"))


def differences(
    format: WireFormat, n: int, dtype: str, names: Sequence[str], backend: str | None = None
) -> list[str]:
    """Return where quantize and dequantize differ from the oracle; an empty list if nowhere.

    Args:
      format: the format of the wires.
      n: number of elements.
      dtype: the dtype of the data, and of the values that wires are restored to.
      names: names of distributions.
      backend: as for `quantize`.
    """
    found = []
    for name in names:
        x = sample(name, n, dtype)
        expected = quantize_oracle.quantize(x, **options(format))
        wire = quantized(x, format, backend=backend)
        assert wire.buffer.shape == expected.shape
        if not np.array_equal(wire.buffer, expected):
            found.append(f"the wire of {name}")
        values = quantize_oracle.dequantize(expected, n, **options(format))
        with np.errstate(over="ignore"):
            values = values.astype(dtype)
        wire = Wire(jnp.asarray(expected), n, format)
        if not same_bits(np.asarray(restored(wire, (n,), dtype, backend=backend)), values):
            found.append(f"the values of {name}")
    return found


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are equal, with the signs of zeros; all NaNs count as equal."""
    assert a.dtype == b.dtype
    nan = np.isnan(a)
    return np.array_equal(nan, np.isnan(b)) and a[~nan].tobytes() == b[~nan].tobytes()


FORMATS: dict[str, Sequence[Any]] = {
    "bits": (8, 4),
    "symmetric": (True, False),
    "scale": ("bound", "mse", "deepspeed"),
    "scale_dtype": ("float32", "bfloat16"),
    "hadamard": (0, 32),
    "block": BLOCKS,
}


def allowed(row: Mapping[str, Any]) -> bool:
    """Whether WireFormat takes these options together."""
    return not row["hadamard"] or (row["scale"] != "deepspeed" and row["block"] % 32 == 0)


def product(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every allowed combination of one value of each factor."""
    rows = (dict(zip(factors, values)) for values in itertools.product(*factors.values()))
    return [row for row in rows if allowed(row)]


def pairs(row: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the pairs of (factor, value) of a row."""
    return itertools.combinations(row.items(), 2)


def cover(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return some of the product's rows, in which every pair occurs that occurs in the product.

    The choice is greedy: each time the first of the rows with most pairs not met yet.
    """
    rows = product(factors)
    number: dict[Any, int] = {}
    table = np.array([[number.setdefault(p, len(number)) for p in pairs(row)] for row in rows])
    missing, chosen = np.ones(len(number), bool), []
    while missing.any():
        i = int(missing[table].sum(axis=1).argmax())
        missing[table[i]] = False
        chosen.append(rows[i])
    return chosen


def format_of(row: Mapping[str, Any]) -> WireFormat:
    """Return the format of a row."""
    return WireFormat(**{name: row[name] for name in FORMATS})
