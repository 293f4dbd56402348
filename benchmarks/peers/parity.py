"""Show that the GPT here and the one of models/gpt.py are the same function of the same weights.

In the environment of zeroxla, then in that of PyTorch (see requirements.txt):

    python benchmarks/peers/parity.py export weights.npz
    python benchmarks/peers/parity.py compare weights.npz

The first writes the weights, loss and gradients of the Flax model; the second exits with an error
if PyTorch's loss or a gradient differs by more than float32 rounding.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from peers import task


def batch() -> np.ndarray:
    """Return int64[SEQUENCES, LENGTH + 1]."""
    flat = np.frombuffer(task.tokens(rank=0, step=0), dtype=np.uint8)
    return flat.reshape(task.SEQUENCES, -1).astype(np.int64)


def export(path: str) -> None:
    """Write "loss", and "param/..." and "grad/..." of every leaf, biases drawn at random too."""
    import jax
    from flax.traverse_util import flatten_dict

    from zeroxla.models import GPT

    shape = {"layers": task.LAYERS, "width": task.WIDTH, "heads": task.HEADS}
    model = GPT(vocab=task.VOCAB, length=task.LENGTH, scan=False, **shape)
    tokens = {"tokens": batch().astype(np.int32)}
    params = model.init(jax.random.key(0), tokens["tokens"][:, :-1])
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.02 * random.standard_normal(x.shape, x.dtype), params)

    def loss(params: Any) -> jax.Array:
        return model.apply(params, tokens, train=True, method="loss")[0]

    with jax.default_matmul_precision("float32"):
        value, grads = jax.value_and_grad(loss)(params)
    trees = {"param": params["params"], "grad": grads["params"]}
    np.savez(path, loss=value, **flatten_dict(trees, sep="/"))


def compare(path: str) -> None:
    """Load the weights into the PyTorch model; compare its loss and gradients."""
    import torch
    from peers.model import GPT

    saved = np.load(path)
    model = GPT()
    parameters = dict(model.named_parameters())
    leaves = [name for name in saved.files if name.startswith("param/")]
    counts = {sum(x.numel() for x in parameters.values()), sum(saved[x].size for x in leaves)}
    assert counts == {task.num_parameters()}, f"{counts} parameters"
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(flax_leaf(saved, "param", name)))
    loss = model(torch.from_numpy(batch()))
    loss.backward()
    print(f"loss: {saved['loss']:.7f} in JAX, {loss.item():.7f} in PyTorch")
    np.testing.assert_allclose(loss.item(), saved["loss"], rtol=1e-6)
    for name, parameter in parameters.items():
        theirs = flax_leaf(saved, "grad", name)
        error = np.linalg.norm(parameter.grad.numpy() - theirs) / np.linalg.norm(theirs)
        assert error < 1e-5, f"gradient of {name} differs by {error:.1e} of its norm"
    print(f"{task.num_parameters()} parameters; every gradient within 1e-5 of its norm")


def flax_leaf(saved: Any, kind: str, name: str) -> np.ndarray:
    """Return the Flax leaf of a PyTorch name, in PyTorch's shape."""
    module, _, leaf = name.replace("h.", "h_").replace(".", "/").rpartition("/")
    if leaf == "bias":
        return saved[f"{kind}/{module}/bias"]
    if leaf in ("wte", "wpe"):
        return saved[f"{kind}/{leaf}/embedding"]
    if "ln_" in module:
        return saved[f"{kind}/{module}/scale"]
    return saved[f"{kind}/{module}/kernel"].T  # [in, out] in Flax


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("export", "compare"):
        sys.exit(__doc__)
    {"export": export, "compare": compare}[sys.argv[1]](sys.argv[2])
