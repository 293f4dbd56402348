"""Any Flax model, unmodified, as two pure functions: `init` and `loss`.

    adapted = adapt(model)
    params, model_state = adapted.init(key, batch)
    loss, metrics, model_state = adapted.loss(params, model_state, batch, key, train=True)

The rest of zeroxla sees only these two. Each kind of model has a file: `linen`, `nnx`, `function`.
A model that `zeroxla.lora` gave adapters brings its own functions, from `zeroxla/frontend/lora`.
"""

from collections.abc import Callable
from typing import Any

import flax.linen

from zeroxla.frontend.base import Adapted, AdaptsItself, stream_key
from zeroxla.frontend.complex_leaves import with_real_parameters
from zeroxla.frontend.function import adapt_function
from zeroxla.frontend.linen import adapt_linen

__all__ = ["Adapted", "adapt", "stream_key"]

KINDS = (
    "a flax.linen module instance, `lambda rngs: nnx.Module`, an nnx.Module instance, "
    "or a pair (init(key, batch), loss(params, batch, key))"
)


def adapt(model: Any, loss: Callable[..., Any] | None = None) -> Adapted:
    """Turn a model into pure functions over nested dicts of arrays.

    Args:
      model: a flax.linen module; a callable that takes an `nnx.Rngs` and returns an nnx.Module
        (evaluated abstractly here: nothing is allocated); an nnx.Module instance (with a warning,
        because it was already allocated whole; `init` returns its present values); or a pair
        `(init(key, batch) -> params, loss(params, batch, key) -> scalar | (scalar, metrics))`
        whose params are any pytree of arrays; or any of these with adapters, from `zeroxla.lora`.
      loss: `loss(apply, batch, *, train) -> scalar | (scalar, metrics)`, where `apply` is the
        module itself, ready to be called: several times, with any arguments, its other methods too.
        None means the module's own method `loss(batch, *, train)`.

    Returns:
      An `Adapted`.

    Raises:
      TypeError: `model` is none of these kinds.
      ValueError: there is no loss, two losses, or one with another signature.
    """
    if isinstance(model, type):
        raise TypeError(
            f"model is the class {model.__name__}, not a model; pass {model.__name__}(...) of a "
            f"flax.linen module, or `lambda rngs: {model.__name__}(..., rngs=rngs)` of an nnx one"
        )
    if isinstance(model, AdaptsItself):
        return model.adapt(loss)
    if isinstance(model, flax.linen.Module):
        return with_real_parameters(adapt_linen(model, loss))
    if isinstance(model, tuple | list) and len(model) == 2 and all(map(callable, model)):
        if loss is not None:
            raise ValueError(
                "model is a pair (init, loss) and loss= is given too; give one loss: "
                "put it in the pair"
            )
        return with_real_parameters(adapt_function(*model))
    # flax.nnx takes as long to import as all of zeroxla: only those who use it wait.
    from zeroxla.frontend.nnx import adapt_nnx, is_nnx

    if is_nnx(model) or callable(model):
        return with_real_parameters(adapt_nnx(model, loss))
    raise TypeError(f"model is {model!r}, of type {type(model).__name__}; expected {KINDS}")
