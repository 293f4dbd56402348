"""GPT, Llama and Mixtral with the annotations that a user of `jax.jit` would write.

`axes_bytes.py` compares zeroxla with them.

They compute what the models in `models/` compute, from the same leaves, and
`tests/benchmarks/test_axes.py` compares the losses. Each array that matters has a sharding, the
best that is published:

    tensor    Megatron with sequence parallelism: kernels by columns, then by rows; activations
              between products split along the sequence, inside along heads or hidden units; the
              vocabulary of the embedding and of the head is split
    context   DeepSpeed-Ulysses: the sequence is split, and inside attention the heads
    expert    GShard: rows are split, banks and the places of experts along the experts

Shape letters: B batch, L positions, D width, V vocabulary, N heads, K key-value heads, G query
heads of each, H head width, F hidden, E experts, C places of an expert, T products in one, such as
queries, keys and values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zeroxla.models.attention import causal_attention
from zeroxla.models.losses import cross_entropy, head_logits
from zeroxla.models.moe_layers import balance_loss, find_places, route
from zeroxla.models.rotary import rotate

Leaves = Mapping[str, Any]
SPLIT = {
    "tensor": {"x_BLD": 1, "y_BLTD": 3, "y_BLNH": 2, "h_BLF": 2, "logits_BLV": 2},
    "context": {
        **{"x_BLD": 1, "x_BLD inside": 1, "y_BLTD": 1, "y_BLNH": 2, "h_BLF": 1, "logits_BLV": 1}
    },
    "expert": {
        **{"x_BLD": 0, "x_BLD inside": 0, "y_BLTD": 0, "y_BLNH": 0, "h_BLF": 0, "logits_BLV": 0},
        **{"x_EBCD": 1, "x_EBCD inside": 0, "places_BLEC": 0},
    },
}
"""For each axis the dim along which an array is split; whole if it is missing. "Inside" is where
products read it, or where experts do."""
FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
"""Kernels of Llama that have the same input and shape, and are one product here."""
COLUMNS = ("c_fc/kernel", "c_fc/bias", "qkv", "gate_up", "c_attn/kernel", "c_attn/bias")
ROWS = ("c_proj/kernel", "o_proj/kernel", "down_proj/kernel")
VOCABULARY = ("wte/embedding", "embed_tokens/embedding", "lm_head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Annotated:
    """A model for `jax.jit` on one axis.

    Attributes:
      mesh: the mesh; it has no other axis than this one.
      axis: the axis.
      model: a model of `models/`, whose sizes are read: a GPT, a Llama or a Mixtral.
      scan: whether the blocks are a loop.
    """

    mesh: Mesh
    axis: str
    model: Any
    scan: bool

    def lower(self, params: Any, batch: Any) -> jax.stages.Lowered:
        """Lower loss and gradients for shapes of leaves and of a batch."""
        params = jax.eval_shape(fused, params)
        placed = jax.tree.map_with_path(self._leaf_sharding, params)
        rows = self._sharding(0 if self.axis == "expert" else None)
        gradients = jax.value_and_grad(self.loss)
        jitted = jax.jit(gradients, in_shardings=(placed, rows), out_shardings=(None, placed))
        return jitted.lower(params, batch)

    def loss(self, params: Leaves, batch: Leaves) -> jax.Array:
        """Return the model's loss, from leaves as `fused` returns them."""
        tokens_BL, targets_BL = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        if "wte" in params:
            length = tokens_BL.shape[1]
            x_BLD = params["wte"]["embedding"][tokens_BL] + params["wpe"]["embedding"][:length]
            blocks = [params[f"h_{i}"] for i in range(self.model.layers) if not self.scan]
            x_BLD, _ = self._run(self._gpt_block, x_BLD, params.get("h"), blocks)
            x_BLD, head_VD = _layer_norm(x_BLD, params["ln_f"]), params["wte"]["embedding"]
            extra = 0.0
        else:
            x_BLD = jnp.take(params["embed_tokens"]["embedding"], tokens_BL, axis=0)
            layers = params["layers"]
            blocks = [] if self.scan else [layers[str(i)] for i in range(self.model.config.layers)]
            x_BLD, extra = self._run(self._llama_block, x_BLD, layers, blocks)
            x_BLD, head_VD = self._rms_norm(x_BLD, params["norm"]), params["lm_head"]
        x_BLD = self._put("x_BLD inside", x_BLD)
        logits_BLV = self._put("logits_BLV", head_logits(x_BLD, head_VD))
        return cross_entropy(logits_BLV, targets_BL).mean() + extra

    def _run(
        self, block: Callable[..., Any], x_BLD: jax.Array, stacked: Any, blocks: list[Any]
    ) -> tuple[jax.Array, Any]:
        """Run the blocks; return the activations, and the mean of what they add to the loss."""
        x_BLD = self._put("x_BLD", x_BLD)
        if self.scan:
            x_BLD, extra = jax.lax.scan(lambda x, leaves: block(leaves, x), x_BLD, stacked)
            return x_BLD, extra.mean()
        found = []
        for leaves in blocks:
            x_BLD, extra = block(leaves, jax.lax.optimization_barrier(x_BLD))
            found.append(extra)
        return x_BLD, jnp.stack(found).mean()

    def _gpt_block(self, leaves: Leaves, x_BLD: jax.Array) -> tuple[jax.Array, Any]:
        y_BLD = self._put("x_BLD inside", _layer_norm(x_BLD, leaves["ln_1"]))
        own, mlp = leaves["attn"], leaves["mlp"]
        y_BLTD = jnp.einsum("bld,dte->blte", y_BLD, own["c_attn"]["kernel"]) + own["c_attn"]["bias"]
        q, k, v = self._heads(y_BLTD)
        x_BLD = x_BLD + self._put("x_BLD", self._attended(q[:, :, :, None], k, v, own["c_proj"]))
        y_BLD = self._put("x_BLD inside", _layer_norm(x_BLD, leaves["ln_2"]))
        h_BLF = jax.nn.gelu(_dense(self._put("h_BLF", y_BLD @ mlp["c_fc"]["kernel"]), mlp["c_fc"]))
        return x_BLD + self._put(
            "x_BLD", _dense(h_BLF @ mlp["c_proj"]["kernel"], mlp["c_proj"])
        ), 0.0

    def _llama_block(self, leaves: Leaves, x_BLD: jax.Array) -> tuple[jax.Array, Any]:
        own, model = leaves["self_attn"], self.model
        y_BLD = self._put("x_BLD inside", self._rms_norm(x_BLD, leaves["input_layernorm"]))
        positions_BL = jnp.arange(x_BLD.shape[1])[None]
        rotation = model.config.rotary.tables(positions_BL)
        q, k, v = self._heads(jnp.einsum("bld,dte->blte", y_BLD, own["qkv"]))
        q, k = rotate(q, rotation)[:, :, :, None], rotate(k, rotation)
        x_BLD = x_BLD + self._put("x_BLD", self._attended(q, k, v, own["o_proj"]))
        y_BLD = self._rms_norm(x_BLD, leaves["post_attention_layernorm"])
        if "experts" in leaves:
            y_BLD, extra = self._experts(leaves, y_BLD)
        else:
            mlp, y_BLD = leaves["mlp"], self._put("x_BLD inside", y_BLD)
            h_BLTF = jnp.einsum("bld,dtf->bltf", y_BLD, mlp["gate_up"])
            gate, up = (self._put("h_BLF", h_BLTF[:, :, i]) for i in range(2))
            y_BLD, extra = (jax.nn.silu(gate) * up) @ mlp["down_proj"]["kernel"], 0.0
        return x_BLD + self._put("x_BLD", y_BLD), extra

    def _heads(self, y_BLTD: jax.Array) -> list[jax.Array]:
        """Return queries, keys and values, [B, L, N, H]; of a split sequence by an all-to-all."""
        y_BLTD = self._put("y_BLTD", y_BLTD)
        parts = (y_BLTD[:, :, i] for i in range(3))
        return [
            self._put(
                "y_BLNH",
                y.reshape(*y.shape[:2], getattr(self.model, "config", self.model).heads, -1),
            )
            for y in parts
        ]

    def _attended(self, q: jax.Array, k: jax.Array, v: jax.Array, out: Leaves) -> jax.Array:
        y_BLKGH = causal_attention(q, k, v, block=q.shape[1])
        y_BLNH = self._put("y_BLNH", y_BLKGH.reshape(*q.shape[:2], -1, q.shape[-1]))
        y_BLD = y_BLNH.reshape(*q.shape[:2], -1)
        if self.axis == "context":
            y_BLD = self._put("x_BLD", y_BLD)
        return _dense(y_BLD @ out["kernel"], out)

    def _experts(self, leaves: Leaves, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        bank, model = leaves["experts"], self.model
        routes = route(x_BLD, leaves["router"]["kernel"], model.config.experts.top_k)
        taken_BLEC = find_places(routes, None, model.config.experts.capacity_factor)[1].astype(
            x_BLD.dtype
        )
        dispatch_BLEC = self._put("places_BLEC", taken_BLEC)
        combine_BLEC = dispatch_BLEC * routes.weights_BLE[..., None]
        x_EBCD = self._put("x_EBCD", jnp.einsum("blec,bld->ebcd", dispatch_BLEC, x_BLD))
        x_EBCD = self._put("x_EBCD inside", x_EBCD)
        gate, up = (
            jnp.einsum("ebci,eio->ebco", x_EBCD, bank[name]) for name in ("gate_proj", "up_proj")
        )
        y_EBCD = jnp.einsum("ebci,eio->ebco", jax.nn.silu(gate) * up, bank["down_proj"])
        y_EBCD = self._put("x_EBCD", self._put("x_EBCD inside", y_EBCD))
        y_BLD = jnp.einsum("blec,ebcd->bld", combine_BLEC, y_EBCD)
        return y_BLD, self.model.config.experts.balance * balance_loss(routes)

    def _rms_norm(self, x_BLD: jax.Array, leaves: Leaves) -> jax.Array:
        mean = jnp.mean(jnp.square(x_BLD), axis=-1, keepdims=True)
        return x_BLD * jax.lax.rsqrt(mean + self.model.config.eps) * leaves["scale"]

    def _put(self, name: str, x: jax.Array) -> jax.Array:
        dim = SPLIT[self.axis].get(name)
        return jax.lax.with_sharding_constraint(x, self._sharding(dim))

    def _sharding(self, dim: int | None) -> NamedSharding:
        names = () if dim is None else (None,) * dim + (self.axis,)
        return NamedSharding(self.mesh, PartitionSpec(*names))

    def _leaf_sharding(self, path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        dim = None
        if self.axis == "tensor":
            if name.endswith(VOCABULARY):
                dim = 0
            elif name.endswith(COLUMNS):
                dim = len(leaf.shape) - 1
            elif name.endswith(ROWS):
                dim = len(leaf.shape) - 2
        elif self.axis == "expert" and "experts/" in name:
            dim = len(leaf.shape) - 3
        return self._sharding(dim)


def fused(params: Any) -> Any:
    """Return the leaves with products of one input made one, as a user who annotates writes them.

    GPT's queries, keys and values, [..., T * D], get a dim of their own: [..., T, D]. A
    device's columns then belong to its heads. Kernels of `FUSED` are stacked in the same way.
    """
    if not isinstance(params, Mapping):
        return params
    found = {name: fused(leaves) for name, leaves in params.items()}
    if "c_attn" in found:
        found["c_attn"] = {n: x.reshape(*x.shape[:-1], 3, -1) for n, x in found["c_attn"].items()}
    for name, parts in FUSED.items():
        # The banks of experts, which are no mappings, stay as they are.
        if all(isinstance(found.get(part), Mapping) for part in parts):
            found[name] = jnp.stack([found.pop(part)["kernel"] for part in parts], axis=-2)
    return found


def _dense(x: jax.Array, leaves: Leaves) -> jax.Array:
    return x + leaves["bias"] if "bias" in leaves else x


def _layer_norm(x_BLD: jax.Array, leaves: Leaves) -> jax.Array:
    """Return GPT-2's LayerNorm."""
    mean = x_BLD.mean(axis=-1, keepdims=True)
    variance = jnp.square(x_BLD - mean).mean(axis=-1, keepdims=True)
    return (x_BLD - mean) * jax.lax.rsqrt(variance + 1e-5) * leaves["scale"] + leaves["bias"]
