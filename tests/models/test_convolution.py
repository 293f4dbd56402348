"""The models' own convolution: Flax's values and gradients, by operations that are fast in
loops."""

from __future__ import annotations

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.quick import quick_compilation  # noqa: F401

from zeroxla.models.convolution import convolution

pytestmark = pytest.mark.usefixtures("quick_compilation")


def make(size, width, kernel, channels, features):
    rng = np.random.default_rng(size)
    image = rng.normal(size=(2, size, width, channels)).astype(np.float32)
    return image, rng.normal(size=(*kernel, channels, features)).astype(np.float32)


def gradients(conv):
    return jax.grad(lambda image, kernel: jnp.sum(conv(image, kernel) ** 2), argnums=(0, 1))


@pytest.mark.parametrize(
    ("size", "width", "kernel", "strides", "padding"),
    [
        (63, 64, (11, 11), (4, 4), ((2, 2), (2, 2))),
        (15, 9, (5, 3), (1, 2), ((2, 2), (1, 1))),
        (17, 17, (4, 4), (3, 3), ((0, 0), (0, 0))),
        (8, 7, (2, 5), (5, 1), ((0, 1), (3, 0))),
        (6, 6, (1, 1), (2, 2), ((0, 0), (0, 0))),
    ],
)
def test_gradients_are_those_of_jax(size, width, kernel, strides, padding):
    image, weights = make(size, width, kernel, 3, 4)

    def plain(image, kernel):
        order = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            image, kernel, strides, padding, dimension_numbers=order
        )

    def mine(image, kernel):
        return convolution(image, kernel, strides, padding)

    np.testing.assert_array_equal(mine(image, weights), plain(image, weights))
    for a, b in zip(gradients(mine)(image, weights), gradients(plain)(image, weights)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def test_inside_a_loop_every_convolution_has_the_fast_order():
    image, kernel = make(9, 9, (3, 3), 4, 4)
    module = nn.Conv(4, (3, 3), use_bias=False, conv_general_dilated=convolution)

    def loop(image, kernel):
        def turn(carry, _):
            step = gradients(
                lambda image, kernel: module.apply({"params": {"kernel": kernel}}, image)
            )
            return step(*carry), None

        return jax.lax.scan(turn, (image, kernel), None, length=2)[0]

    text = jax.jit(loop).lower(image, kernel).compile().as_text()
    orders = re.findall(r" convolution\(.*dim_labels=([\w>-]+)", text)
    assert len(orders) >= 3
    assert set(orders) == {"b01f_01io->b01f"}


def test_what_it_does_not_do_is_refused():
    image, _ = make(9, 9, (3, 3), 4, 4)
    module = nn.Conv(4, (3, 3), kernel_dilation=2, conv_general_dilated=convolution)
    with pytest.raises(NotImplementedError, match=r"rhs_dilation=\(2, 2\)"):
        module.init(jax.random.key(0), image)
