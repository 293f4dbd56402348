"""What quantize_accuracy.py measures: round trips by every scale rule, a dense search for steps.

T   blocks, one a row
B   elements of a block
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from zeroxla.quantize import WireFormat, dequantize, quantize

# Of the dense search; a step is peak / (2^(bits-1) x factor).
DENSE_FACTORS = {8: 0.98 * 1.002 ** np.arange(150), 4: 0.85 * 1.01 ** np.arange(190)}
_CHUNK = 1 << 16  # elements: what the processor's caches hold


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """Of one round trip from x to y.

    Attributes:
      rms: ||y - x|| / ||x||, in percent.
      cosine: of x and y.
      peak_bias: mean of (y - x) / x, in percent, at the element of largest magnitude of each block
        in which it is positive.
      drift: mean of y - x over the mean of |x|, in percent.
    """

    rms: float
    cosine: float
    peak_bias: float
    drift: float


def measure(x_TB: np.ndarray, y_TB: np.ndarray) -> Measures:
    """Return the measures of a round trip from x to y, computed in float64."""
    x_TB, y_TB = x_TB.astype(np.float64), y_TB.astype(np.float64)
    place_T1 = np.abs(x_TB).argmax(axis=1, keepdims=True)
    peak_T = np.take_along_axis(x_TB, place_T1, axis=1)[:, 0]
    there_T = np.take_along_axis(y_TB, place_T1, axis=1)[:, 0]
    positive = peak_T > 0
    bias = (there_T[positive] - peak_T[positive]) / peak_T[positive]
    norm_x, norm_y = np.linalg.norm(x_TB), np.linalg.norm(y_TB)
    return Measures(
        rms=100 * float(np.linalg.norm(y_TB - x_TB) / norm_x),
        cosine=float(np.vdot(x_TB, y_TB) / (norm_x * norm_y)),
        peak_bias=100 * float(bias.mean()),
        drift=100 * float((y_TB - x_TB).sum() / np.abs(x_TB).sum()),
    )


def squared_errors(x_TB: np.ndarray, y_TB: np.ndarray) -> np.ndarray:
    """Return the squared error of each block: float64[T]."""
    return ((y_TB.astype(np.float64) - x_TB) ** 2).sum(axis=1)


@functools.partial(jax.jit, static_argnames="format")
def _there_and_back(x: jax.Array, format: WireFormat) -> jax.Array:
    return dequantize(quantize(x, format), x.shape)


def round_trip(x_TB: np.ndarray, **options: Any) -> np.ndarray:
    """Return float32[T, B] after quantize and dequantize in blocks of B; options of WireFormat."""
    return np.asarray(_there_and_back(x_TB, WireFormat(block=x_TB.shape[1], **options)))


def plain(x_TB: np.ndarray, bits: int) -> np.ndarray:
    """Return float32[T, B] after a round trip with step = absmax / (2^(bits-1) - 1), in NumPy.

    Codes are symmetric, rounded half to even; no block may be all zeros.
    """
    largest_code = (1 << (bits - 1)) - 1
    step_T1 = np.abs(x_TB).max(axis=1, keepdims=True) / np.float32(largest_code)
    return np.clip(np.rint(x_TB / step_T1), -largest_code, largest_code) * step_T1


def compare(x_TB: np.ndarray, bits: int, *, symmetric: bool = True) -> dict[str, Any]:
    """Return the measures of every rule on one array, and how mse and DeepSpeed's rule compare.

    Returns:
      "measures": by rule; "plain" and rotated ones only where symmetric. "better", "worse": shares
      of the blocks with a smaller and a larger squared error under mse.
    """
    shared: dict[str, Any] = {"bits": bits, "symmetric": symmetric}
    results = {
        rule: round_trip(x_TB, scale=rule, **shared) for rule in ("bound", "deepspeed", "mse")
    }
    mse, deepspeed = (squared_errors(x_TB, results[rule]) for rule in ("mse", "deepspeed"))
    if symmetric:
        results["plain"] = plain(x_TB, bits)
        if bits == 4:
            for rule in ("bound", "mse"):
                results[f"{rule}, rotated"] = round_trip(x_TB, scale=rule, hadamard=32, **shared)
    return {
        "measures": {rule: dataclasses.asdict(measure(x_TB, y)) for rule, y in results.items()},
        "better": float((mse < deepspeed).mean()),
        "worse": float((mse > deepspeed).mean()),
    }


def search(x_TB: np.ndarray, bits: int) -> dict[str, float]:
    """Return RMS errors in percent: of "deepspeed", "mse" and the best of DENSE_FACTORS ("dense").

    All steps are float32. "dense" takes mse's step for a block where that is better.
    """
    shared: dict[str, Any] = {"bits": bits, "scale_dtype": "float32"}
    errors = {
        rule: squared_errors(x_TB, round_trip(x_TB, scale=rule, **shared))
        for rule in ("deepspeed", "mse")
    }
    errors["dense"] = np.minimum(least_errors(x_TB, bits, DENSE_FACTORS[bits]), errors["mse"])
    total = (x_TB.astype(np.float64) ** 2).sum()
    return {name: 100 * float(np.sqrt(e.sum() / total)) for name, e in errors.items()}


def least_errors(x_TB: np.ndarray, bits: int, factors: np.ndarray) -> np.ndarray:
    """Return each block's smallest squared error over steps peak / (2^(bits-1) x factor) of either
    sign: float64[T], computed in float32 NumPy, relative error about 1e-6."""
    rows = max(1, _CHUNK // x_TB.shape[1])
    return np.concatenate(
        [_least(x_TB[i : i + rows], bits, factors) for i in range(0, len(x_TB), rows)]
    )


def _least(x_TB: np.ndarray, bits: int, factors: np.ndarray) -> np.ndarray:
    half = 1 << (bits - 1)
    unit_TB = x_TB * (half / np.abs(x_TB).max(axis=1, keepdims=True))
    least_T = np.full(len(x_TB), np.inf)
    for factor in factors.astype(np.float32):
        scaled_TB = unit_TB * factor
        nearest_TB = np.rint(scaled_TB)
        for low, high in ((-half, half - 1), (1 - half, half)):
            error_TB = np.clip(nearest_TB, low, high) - scaled_TB
            squares_T = np.einsum("tb,tb->t", error_TB, error_TB) / np.float64(factor) ** 2
            np.minimum(least_T, squares_T, out=least_T)
    return least_T * (np.abs(x_TB).max(axis=1) / np.float64(half)) ** 2
