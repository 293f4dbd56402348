"""Models to which tests add adapters, and a merge of adapters written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zeroxla
from tools.zoo.base import tokens, vectors
from zeroxla.models import GPT, Llama

KEY = jax.random.key(0)
CONFIG = zeroxla.ZeroConfig(persistence_threshold=0)
RANK, ALPHA = 4, 8.0


def pair():
    """Return a plain pair (init, loss) with a list of layers, a product that has the leaf first,
    and a product over two dims."""

    def init(key, batch):
        keys = jax.random.split(key, 3)
        return {
            "layers": [jax.random.normal(keys[0], (6, 8)), jax.random.normal(keys[1], (16, 8))],
            "out": jax.random.normal(keys[2], (4, 4, 3)),
            "table": jnp.ones((5, 16)),
        }

    def loss(params, batch, key):
        x = jnp.tanh(batch["x"] @ params["layers"][0])
        x = jnp.tanh((params["layers"][1] @ x.T).T)
        x = x * params["table"][1]
        y = jnp.einsum("bij,ijk->bk", x.reshape(-1, 4, 4), params["out"])
        return jnp.mean((y - batch["y"]) ** 2)

    return init, loss


# name: (model, targets, batch of so many rows)
MODELS = {
    "gpt scanned": (lambda: GPT.tiny(), r"(attn|mlp)/.*kernel", tokens),
    "gpt listed": (lambda: GPT.tiny(scan=False, remat=True), r"c_attn/kernel|c_fc/kernel", tokens),
    "llama": (lambda: Llama.tiny(remat=True), r"[qkvo]_proj/kernel|lm_head", tokens),
    "pair": (pair, r"layers/\d|out", vectors),
}
# Leaves of the shape [others, contracted], for which the product made by hand is transposed.
TRANSPOSED = ("lm_head", "layers/1")


def lora_step(model, mesh, targets, *, optimizer=None, config=CONFIG, **options):
    """Return (model with adapters, its step)."""
    lora = zeroxla.lora(model, targets=targets, rank=RANK, alpha=ALPHA, **options)
    return lora, zeroxla.make_step(lora, mesh, optimizer or optax.adam(1e-2), config=config)


def merged_by_hand(params, base=None, scaling=ALPHA / RANK):
    """Return V = W + scaling A . B of every adapted leaf, and m V / |V| of one with magnitudes,
    whose |V| is a constant, without any of zeroxla's code.

    Args:
      params: a base and its adapters.
      base: the base in floats. None means `params["base"]`.
      scaling: the factor of A . B.
    """
    flat = {"/".join(map(_name, p)): x for p, x in _paths(params["lora"])}

    def leaf(path, w):
        name = "/".join(map(_name, path))
        if f"{name}/a" not in flat:
            return w
        a, b = flat[f"{name}/a"], flat[f"{name}/b"]
        if name == "out":
            delta = jnp.einsum("ijr,rk->ijk", a, b, precision="highest")
        else:
            delta = jnp.matmul(a, b, precision="highest")
        if name in TRANSPOSED:
            delta = delta.T
        v = w + scaling * delta
        if f"{name}/m" not in flat:
            return v
        inputs = (0, 1) if name == "out" else (-1,) if name in TRANSPOSED else (-2,)
        norms = jax.lax.stop_gradient(jnp.sqrt((v**2).sum(inputs)))
        return v * jnp.expand_dims(flat[f"{name}/m"] / norms, inputs)

    base = params["base"] if base is None else base
    return jax.tree_util.tree_map_with_path(leaf, base)


def with_random_b(params, seed=0):
    """Return parameters whose adapters change the model: B, which starts at zero, is made
    random, and magnitudes are changed by some tenths."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        if _name(path[-1]) == "m":
            return x * rng.uniform(0.7, 1.3, x.shape).astype(np.float32)
        return x if _name(path[-1]) != "b" else rng.normal(0, 0.1, x.shape).astype(np.float32)

    return {**params, "lora": jax.tree_util.tree_map_with_path(leaf, params["lora"])}


def replaced(step, state, params):
    """Return the state with other parameters, which are given in natural shapes."""
    return step.init_from(params, KEY, model_state=state.model_state)


def _paths(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


def _name(key):
    return jax.tree_util.keystr((key,), simple=True)
