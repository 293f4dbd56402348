"""Models recorded with Transformers, their names mapped by hand, and files read with plain NumPy.

The mapping here is written independently of the one in the models, so that each checks the other.
"""

import json
import shutil
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

FIXTURES = Path(__file__).parents[1] / "fixtures"
"""Holds tiny random models in float32, recorded with Transformers 5.23.0 (eager attention) and
torch 2.13.0."""

KINDS = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


def recorded(name):
    """Return (config, tensors, inputs and outputs) of a recorded model."""
    config = json.loads((FIXTURES / f"{name}.config.json").read_text())
    return config, read_file(FIXTURES / f"{name}.safetensors"), np.load(FIXTURES / f"{name}.npz")


def hub_folder(folder, name):
    """Make a folder like the one in which Transformers saves a model."""
    folder.mkdir(exist_ok=True, parents=True)
    shutil.copyfile(FIXTURES / f"{name}.config.json", folder / "config.json")
    shutil.copyfile(FIXTURES / f"{name}.safetensors", folder / "model.safetensors")
    return folder


def read_file(path):
    """Read a safetensors file with NumPy alone."""
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    header.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, said in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = said["data_offsets"]
        assert first == end, "a hole"
        part = np.frombuffer(data[8 + length + first : 8 + length + last], KINDS[said["dtype"]])
        tensors[name], end = part.reshape(said["shape"]), last
    assert 8 + length + end == len(data)
    return tensors


def write_file(path, tensors):
    """Write a safetensors file with NumPy alone."""
    names = {kind.__name__: name for name, kind in KINDS.items()}
    header, data = {}, b""
    for name, x in tensors.items():
        offsets = [len(data), len(data) + x.nbytes]
        header[name] = {"dtype": names[x.dtype.name], "shape": x.shape, "data_offsets": offsets}
        data += x.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_export(folder):
    """Read all tensors of an exported folder, and check its index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_file(folder / "model.safetensors")
    index = json.loads(index.read_text())
    tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        found = read_file(folder / file)
        assert set(found) == {n for n, f in index["weight_map"].items() if f == file}
        tensors |= found
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    return tensors


def assert_same_tensors(found, expected):
    """Check that tensors are equal bit by bit."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape), name
        assert found[name].tobytes() == x.tobytes(), name


def nest(flat):
    tree = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = jnp.asarray(leaf)
    return tree


def gpt_tree(tensors):
    """Return the parameters of an unrolled GPT from the tensors of a GPT2LMHeadModel."""
    flat = {}
    for name, value in tensors.items():
        path = name.removeprefix("transformer.").replace("h.", "h_", 1).replace(".", "/")
        kind = "embedding" if path[:3] in ("wte", "wpe") else "scale" if "ln_" in path else "kernel"
        flat[path.replace("weight", kind)] = value
    return nest(flat)


def llama_tree(tensors):
    """Return the parameters of an unrolled Llama from the tensors of a LlamaForCausalLM: [out, in]
    becomes [in, out]."""
    flat = {}
    for name, value in tensors.items():
        path = name.removeprefix("model.").replace(".", "/")
        if path == "lm_head/weight":
            flat["lm_head"] = value
        elif "embed" in path:
            flat[path.replace("weight", "embedding")] = value
        elif "norm" in path:
            flat[path.replace("weight", "scale")] = value
        else:
            flat[path.replace("weight", "kernel")] = value.T
    return nest(flat)


def forward(model, params, tokens, positions=None, mask=None):
    """Return the logits of a GPT or of a function `rngs -> Llama`, on one device."""
    keys = {"positions_BL": positions, "mask_BL": mask}
    if not callable(model) or hasattr(model, "apply"):
        return jax.jit(model.apply)({"params": params}, tokens, **keys)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: model(nnx.Rngs(0))))

    @jax.jit
    def run(params):
        leaves = []
        for path, _ in nnx.to_flat_state(state):
            leaf = params
            for name in path:
                leaf = leaf[name]
            leaves.append((path, leaf))
        return nnx.merge(graphdef, nnx.from_flat_state(leaves), copy=True)(tokens, **keys)

    return run(params)
