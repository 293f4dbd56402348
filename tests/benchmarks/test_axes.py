"""The benchmark of axes: what it compares with is the same model, and it reads traffic rightly."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from tools.quick import quick_compilation, thinned  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import axes_bytes
from axes_gspmd import Annotated, fused

from zeroxla.frontend import adapt
from zeroxla.models import GPT, Llama, Mixtral

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = {"vocab": 64, "width": 32, "heads": 4, "layers": 2, "length": 16}
MODELS = {
    "GPT": lambda **options: GPT(**SHAPE, **options),
    "Llama": lambda **options: Llama.tiny(**SHAPE, kv_heads=4, **options),
    "Mixtral": lambda **options: Mixtral.tiny(**SHAPE, kv_heads=4, **options),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axis", "scan"),
    thinned(
        [("Llama", "context", True)],
        slow=[("GPT", "tensor", False), ("Mixtral", "expert", True)],
        rows=True,
    ),
)
def test_the_annotated_model_is_the_same_model(name, axis, scan):
    made = MODELS[name](scan=scan)
    adapted = adapt(made)
    batch = {"tokens": np.random.default_rng(0).integers(0, 64, (4, 17), np.int32)}
    params, state = adapted.init(jax.random.key(0), batch)
    want = adapted.loss(params, state, batch, jax.random.key(1), train=True)[0]
    model = made if name == "GPT" else nnx.eval_shape(lambda: made(nnx.Rngs(0)))
    mesh = Mesh(np.array(jax.devices()[:4]), (axis,))
    annotated = Annotated(mesh=mesh, axis=axis, model=model, scan=scan)
    found = jax.jit(annotated.loss)(fused(params), batch)
    assert abs(float(found) / float(want) - 1) < 1e-6


def test_bytes_are_counted_by_direction_and_leaves_apart():
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    spec = jax.sharding.PartitionSpec

    def body(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(jax.lax.all_gather(x, "x", tiled=True) @ w).sum()

    def gradients(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        to_w, to_x = jax.grad(body, argnums=(0, 1))(w, x)
        return jax.lax.psum(to_w, "x"), to_x

    specs = (spec(), spec("x"))
    program = jax.jit(
        jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    )
    w, x = jnp.ones((5, 6)), jnp.ones((16, 5))
    text = program.lower(w, x).compile().as_text()
    known = set(axes_bytes.leaf_parts([w]))
    found = axes_bytes.traffic(text, lambda s: axes_bytes._sizes(s) in known, scopes=False)
    assert found.forward == found.backward == 16 * 5 * 4 * 3 / 4
    assert found.leaves == 2 * 5 * 6 * 4 * 3 / 4
    assert found.reduced == 0


def test_a_block_is_the_difference_of_two_depths():
    few = axes_bytes.Traffic(forward=10, backward=20, leaves=1)
    many = axes_bytes.Traffic(forward=30, backward=60, leaves=5)
    block = many.blocks(few)
    assert (block.forward, block.backward, block.leaves) == (10, 20, 2)
