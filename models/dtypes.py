"""The dtype policy of layers whose input is data: the parameters decide the dtype, not the data."""

from typing import Any

import jax.numpy as jnp


def follow_kernel(*arrays: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """Cast the inputs of a layer to its kernel's dtype: a `promote_dtype` for linen Dense and Conv.

    Flax itself promotes: a float32 image would make every activation of a bfloat16 model float32.

    Args:
      arrays: (inputs, kernel, bias or None), as linen passes them.
      dtype, inexact: linen's own arguments, which have no effect here.
    """
    kernel = arrays[1]
    return [None if array is None else jnp.asarray(array, kernel.dtype) for array in arrays]
