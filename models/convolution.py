"""A convolution whose gradients are also fast on CPUs inside control flow.

XLA's CPU backend has fast code for convolutions of [B, H, W, C] with [h, w, in, out]. It brings
other convolutions into that order, but only outside of loops and branches. A gradient inside one,
as in a pipeline or with micro-batches, takes some 20 times as long. Here the gradients are written
in that order. On other backends the transposes become part of the convolutions.

Shape letters: B batch, I input features, O output features; H and W height and width of the image,
h and w of the kernel, y and x of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

_ORDER = ("NHWC", "HWIO", "NHWC")
_PLAIN = {
    "lhs_dilation": (1, 1),
    "rhs_dilation": (1, 1),
    "feature_group_count": 1,
    "precision": None,
}
_Pads = tuple[tuple[int, int], tuple[int, int]]


def convolution(
    image_BHWI: jax.Array,
    kernel_hwIO: jax.Array,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **others: Any,
) -> jax.Array:
    """Return the convolution [B, y, x, O]; pass it as `conv_general_dilated` to `flax.linen.Conv`.

    Args:
      image_BHWI, kernel_hwIO: image and kernel as Flax stores them, in one dtype.
      strides, padding: strides and padding of the two spatial dims. Padding may be "SAME" or
        "VALID".
      others: further arguments of `jax.lax.conv_general_dilated`; only their defaults are allowed.

    Raises:
      NotImplementedError: dilation, groups or another precision.
    """
    for name, value in _PLAIN.items():
        if others.get(name, value) != value:
            raise NotImplementedError(f"{name}={others[name]}; use Flax's own convolution")
    if isinstance(padding, str):
        sizes, window = image_BHWI.shape[1:3], kernel_hwIO.shape[:2]
        padding = lax.padtype_to_pads(sizes, window, strides, padding)
    (top, bottom), (left, right) = padding
    pads = ((int(top), int(bottom)), (int(left), int(right)))
    return _convolve(image_BHWI, kernel_hwIO, (int(strides[0]), int(strides[1])), pads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve(image: jax.Array, kernel: jax.Array, strides: tuple[int, int], pads: _Pads):
    return lax.conv_general_dilated(image, kernel, strides, pads, dimension_numbers=_ORDER)


def _forward(image: jax.Array, kernel: jax.Array, strides: tuple[int, int], pads: _Pads) -> Any:
    return _convolve(image, kernel, strides, pads), (image, kernel)


def _backward(
    strides: tuple[int, int], pads: _Pads, kept: tuple[jax.Array, jax.Array], grad_ByxO: jax.Array
) -> tuple[jax.Array, jax.Array]:
    image_BHWI, kernel_hwIO = kept
    sizes, kernel = image_BHWI.shape[1:3], kernel_hwIO.shape[:2]
    # The number of pixels from the begin of the first window to the begin of the last one.
    spans = [stride * (n - 1) + 1 for stride, n in zip(strides, grad_ByxO.shape[1:3])]
    before = [k - 1 - pad for k, (pad, _) in zip(kernel, pads)]
    to_image = lax.conv_general_dilated(
        grad_ByxO,
        kernel_hwIO[::-1, ::-1].swapaxes(2, 3),
        (1, 1),
        [(low, n + k - 1 - span - low) for low, n, k, span in zip(before, sizes, kernel, spans)],
        lhs_dilation=strides,
        dimension_numbers=_ORDER,
    )
    to_kernel_IhwO = lax.conv_general_dilated(
        image_BHWI.transpose(3, 1, 2, 0),
        grad_ByxO.transpose(1, 2, 0, 3),
        (1, 1),
        [(low, k - 1 + span - n - low) for (low, _), n, k, span in zip(pads, sizes, kernel, spans)],
        rhs_dilation=strides,
        dimension_numbers=_ORDER,
    )
    return to_image, to_kernel_IhwO.transpose(1, 2, 0, 3)


_convolve.defvjp(_forward, _backward)
