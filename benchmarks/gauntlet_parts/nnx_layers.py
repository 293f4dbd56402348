"""Every public layer of flax.nnx, by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from gauntlet_parts.case import Built, Case
from gauntlet_parts.linen_layers import call_x, two_inputs
from gauntlet_parts.losses import floats, to_waves, tokens

LEFT_OUT = {
    "Module": "the base class",
    "RNNCellBase": "the base class of cells",
    "Dict": "holds modules; it is in the case of containers",
    "List": "holds modules; it is in the case of containers",
    "Dropout": "has no parameters; it is in the sequence of layers",
    "RoPE": "has no parameters",
}
"""Classes of flax.nnx that are no case of their own, and why."""


def built(
    make: Callable[[nnx.Rngs], nnx.Module], *shape: int, call: Any = call_x, x: Any = None
) -> Built:
    """Return a layer with a batch {"x": floats [ROWS, *shape]}."""
    batch = {"x": floats(*shape) if x is None else x}
    return Built(model=make, loss=to_waves(call), batch=batch)


def updated(apply: Any, batch: Any, train: bool) -> Any:
    return apply(batch["x"], update_stats=train)


def attend(apply: Any, batch: Any, train: bool) -> Any:
    return apply(batch["x"], decode=False)


class Containers(nnx.Module):
    """Modules in a list and in a dict."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.heads = nnx.Dict({"out": nnx.Linear(8, 4, rngs=rngs)})

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + jax.nn.gelu(layer(x))
        return self.heads["out"](x)


class Scanned(nnx.Module):
    """Four stacked blocks in a loop."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def blocks(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(8, 8, rngs=rngs)

        self.blocks = blocks(rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: Any, block: nnx.Linear) -> Any:
            return x + jax.nn.gelu(block(x))

        return self.head(run(x, self.blocks))


class Rematerialized(nnx.Module):
    """A layer whose activations are computed again."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.second = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(nnx.remat(lambda layer, x: jax.nn.gelu(layer(x)))(self.first, x))


class Normed(nnx.Module):
    """A linear layer whose weights another layer normalizes."""

    def __init__(self, rngs: nnx.Rngs, normalization: Any) -> None:
        linear = nnx.Linear(6, 8, rngs=rngs)
        self.normed = normalization(linear, rngs=rngs)

    def __call__(self, x: Any, **kwargs: Any) -> Any:
        return self.normed(x, **kwargs)


def recurrent(cell: Any) -> Built:
    return built(lambda rngs: nnx.RNN(cell(8, 8, rngs=rngs)), 5, 8)


LAYERS: dict[str, Callable[[], Built]] = {
    "BatchNorm": lambda: built(lambda rngs: nnx.BatchNorm(8, rngs=rngs), 8),
    "Bidirectional": lambda: built(
        lambda rngs: nnx.Bidirectional(
            nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs)), nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs)), rngs=rngs
        ),
        5,
        8,
    ),
    "Conv": lambda: built(lambda rngs: nnx.Conv(4, 8, (3, 3), rngs=rngs), 6, 6, 4),
    "ConvTranspose": lambda: built(
        lambda rngs: nnx.ConvTranspose(4, 8, (3, 3), rngs=rngs), 6, 6, 4
    ),
    "Einsum": lambda: built(
        lambda rngs: nnx.Einsum("ab,bcd->acd", (8, 3, 4), (3, 4), rngs=rngs), 8
    ),
    "Embed": lambda: built(lambda rngs: nnx.Embed(96, 8, rngs=rngs), x=tokens(7)),
    "GRUCell": lambda: recurrent(nnx.GRUCell),
    "GroupNorm": lambda: built(lambda rngs: nnx.GroupNorm(8, num_groups=2, rngs=rngs), 6, 8),
    "InstanceNorm": lambda: built(lambda rngs: nnx.InstanceNorm(8, rngs=rngs), 6, 8),
    "LSTMCell": lambda: recurrent(nnx.LSTMCell),
    "LayerNorm": lambda: built(lambda rngs: nnx.LayerNorm(8, rngs=rngs), 8),
    "Linear": lambda: built(lambda rngs: nnx.Linear(6, 8, rngs=rngs), 6),
    "LinearGeneral": lambda: built(
        lambda rngs: nnx.LinearGeneral((3, 5), (4, 6), axis=(-2, -1), rngs=rngs), 3, 5
    ),
    "LoRA": lambda: built(lambda rngs: nnx.LoRA(6, 2, 8, rngs=rngs), 6),
    "LoRALinear": lambda: built(lambda rngs: nnx.LoRALinear(6, 8, lora_rank=2, rngs=rngs), 6),
    "MultiHeadAttention": lambda: built(
        lambda rngs: nnx.MultiHeadAttention(2, 8, rngs=rngs), 5, 8, call=attend
    ),
    "OptimizedLSTMCell": lambda: recurrent(nnx.OptimizedLSTMCell),
    "PReLU": lambda: built(lambda rngs: nnx.PReLU(), 8),
    "RMSNorm": lambda: built(lambda rngs: nnx.RMSNorm(8, rngs=rngs), 8),
    "RNN": lambda: built(
        lambda rngs: nnx.RNN(
            nnx.SimpleCell(8, 8, rngs=rngs), reverse=True, keep_order=True, return_carry=True
        ),
        5,
        8,
    ),
    "Sequential": lambda: built(
        lambda rngs: nnx.Sequential(
            nnx.Linear(6, 8, rngs=rngs),
            jax.nn.gelu,
            nnx.Dropout(0.0, rngs=rngs),
            nnx.Linear(8, 4, rngs=rngs),
        ),
        6,
    ),
    "SimpleCell": lambda: recurrent(nnx.SimpleCell),
    "SpectralNorm": lambda: dataclasses.replace(
        built(lambda rngs: Normed(rngs, nnx.SpectralNorm), 6, call=updated), reads_state=True
    ),
    "WeightNorm": lambda: built(lambda rngs: Normed(rngs, nnx.WeightNorm), 6),
}

OTHERS: dict[str, Callable[[], Built]] = {
    "List and Dict": lambda: built(lambda rngs: Containers(rngs), 8),
    "scan": lambda: built(lambda rngs: Scanned(rngs), 8),
    "remat": lambda: built(lambda rngs: Rematerialized(rngs), 6),
    "with_partitioning": lambda: built(
        lambda rngs: nnx.Linear(
            6,
            8,
            kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model")),
            rngs=rngs,
        ),
        6,
    ),
    "BatchNorm(axis_name)": lambda: dataclasses.replace(
        built(lambda rngs: nnx.BatchNorm(8, axis_name="batch", rngs=rngs), 8),
        reference_model=lambda rngs: nnx.BatchNorm(8, rngs=rngs),
        slices=1,
        options={"axis_names": {"batch": ("node", "device")}},
    ),
    "cross attention": lambda: built(
        lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs), 5, 8, call=two_inputs
    ),
}


def cases() -> list[Case]:
    """Return the cases."""
    return [
        Case(name=f"nnx.{name}", kind="layer", package="flax", build=build)
        for name, build in {**LAYERS, **OTHERS}.items()
    ]
