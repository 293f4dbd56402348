"""Builds the Flax classes of transformers, and calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from gauntlet_parts.case import Built
from gauntlet_parts.losses import (
    VOCABULARY,
    classification,
    cross_entropy,
    floats,
    labels,
    next_token,
    tokens,
)


def module_of(model: str, config: str, **options: Any) -> Any:
    """Return the linen module in a class of transformers, without dropout."""
    import transformers

    accept_old_clip()
    made = getattr(transformers, config)(**options)
    turn_off_dropout(made)
    return getattr(transformers, model).module_class(config=made, dtype=jnp.float32)


def accept_old_clip() -> None:
    """Let `jnp.clip` take the names a_min and a_max again, which transformers 4.53 uses.

    JAX removed them in 0.7. Nothing else of transformers' Flax classes needs help on JAX 0.12.
    """
    if getattr(jnp.clip, "takes_old_names", False):
        return
    clip = jnp.clip

    def old_clip(x: Any, min: Any = None, max: Any = None, **old: Any) -> Any:
        return clip(x, old.get("a_min", min), old.get("a_max", max))

    old_clip.takes_old_names = True
    jnp.clip = old_clip


def turn_off_dropout(config: Any) -> None:
    """Set every rate of dropout in a config to zero: the reference has other random keys."""
    for name, value in list(vars(config).items()):
        if ("drop" in name or "pdrop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            turn_off_dropout(value)


def names_of(module: Any) -> set[str]:
    """Return the names of the parameters of a module's call."""
    return set(inspect.signature(type(module).__call__).parameters)


def arguments_for(names: set[str], rows: Mapping[str, Any], train: bool) -> dict[str, Any]:
    """Return what a module's call needs beside its inputs: masks, positions and types of tokens."""
    found: dict[str, Any] = dict(rows)
    for prefix in ("", "decoder_"):
        ids = rows.get(f"{prefix}input_ids")
        if ids is None:
            continue
        positions = jnp.broadcast_to(jnp.arange(ids.shape[-1]), ids.shape)
        found[f"{prefix}attention_mask"] = jnp.ones_like(ids)
        found[f"{prefix}position_ids"] = positions
        found[f"{prefix}token_type_ids"] = jnp.zeros_like(ids)
    found |= {"deterministic": not train, "train": train, "head_mask": None}
    return {name: x for name, x in found.items() if name in names}


def caller(module: Any) -> Callable[..., Any]:
    """Return `call(apply, rows, train) -> the module's outputs`."""
    names = names_of(module)
    return lambda apply, rows, train: apply(**arguments_for(names, rows, train))


def logits_of(outputs: Any) -> Any:
    """Return the logits of a module's outputs."""
    return outputs.logits if hasattr(outputs, "logits") else outputs[0]


def language_model(model: str, config: str, **options: Any) -> Built:
    module = module_of(model, config, vocab_size=VOCABULARY, **options)
    call = caller(module)

    def logits(apply: Any, tokens: Any) -> Any:
        return logits_of(call(apply, {"input_ids": tokens}, False))

    batch = {"tokens": tokens(11)}
    return Built(model=module, loss=next_token(logits), batch=batch, logits=logits, context=32)


def encoder(model: str, config: str, *, length: int = 10, **options: Any) -> Built:
    module = module_of(model, config, vocab_size=VOCABULARY, **options)
    call = caller(module)

    def predicted(apply: Any, batch: Mapping[str, Any], train: bool) -> Any:
        return logits_of(call(apply, {"input_ids": batch["tokens"]}, train))

    batch = {"tokens": tokens(length), "label": tokens(length)[:, ::-1].copy()}
    return Built(model=module, loss=classification(predicted), batch=batch)


def encoder_decoder(model: str, config: str, **options: Any) -> Built:
    module = module_of(model, config, vocab_size=VOCABULARY, **options)
    call = caller(module)

    def loss(apply: Any, batch: Mapping[str, Any], *, train: bool) -> Any:
        row = batch["target"]
        rows = {"input_ids": batch["source"], "decoder_input_ids": row[:, :-1]}
        return cross_entropy(logits_of(call(apply, rows, train)), row[:, 1:])

    return Built(model=module, loss=loss, batch={"source": tokens(9), "target": tokens(7)})


def images(model: str, config: str, *, size: int = 16, **options: Any) -> Built:
    module = module_of(model, config, **options)
    call = caller(module)

    def predicted(apply: Any, batch: Mapping[str, Any], train: bool) -> Any:
        return logits_of(call(apply, {"pixel_values": batch["image"]}, train))

    batch = {"image": floats(size, size, 3), "label": labels(5)}
    return Built(model=module, loss=classification(predicted), batch=batch)
