"""A model that calls cuDNN's attention itself, on a machine without a GPU: it is traced, planned,
compiled for GPUs, split over devices, and not run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.mesh.machines import Machines
from zeroxla.models import GPT, Llama
from zeroxla.planning.generation import Generating
from zeroxla.planning.gpu_topology import H200, WheelsMissingError, target_mesh
from zeroxla.planning.target import PlannedDevice, Target
from zeroxla.planning.work import reads_of, work_of
from zeroxla.program import compat
from zeroxla.program.live.liveness import Scope
from zeroxla.program.primitives import ATTENTION_BACKWARD, ATTENTION_FORWARD
from zeroxla.program.trace import trace
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.layout import planned_dims
from zeroxla.split.run_parts import PartsRunner
from zeroxla.split.split_axis import SplitAxis

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, WIDTH, HEADS, LENGTH = 64, 64, 4, 128
CONFIG = ZeroConfig(compute_dtype="bfloat16", persistence_threshold=0)
MESH = {"node": 2, "device": 4}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x_BLD):
        h_BLD = nn.LayerNorm()(x_BLD)
        q, k, v = (
            nn.Dense(WIDTH, name=name)(h_BLD)
            .reshape(*x_BLD.shape[:2], HEADS, -1)
            .astype(jnp.bfloat16)
            for name in "qkv"
        )
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        x_BLD = x_BLD + nn.Dense(WIDTH)(out.reshape(x_BLD.shape).astype(x_BLD.dtype))
        return x_BLD + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x_BLD))))


class TheirGPT(nn.Module):
    """A user's own GPT; nothing in it knows zeroxla."""

    length: int = LENGTH

    @nn.compact
    def __call__(self, tokens_BL):
        x_BLD = nn.Embed(VOCAB, WIDTH)(tokens_BL)
        for _ in range(2):
            x_BLD = Block()(x_BLD)
        return nn.Dense(VOCAB)(x_BLD)

    def loss(self, batch, train):
        logits = self(batch["tokens"][:, :-1]).astype(jnp.float32)
        targets = batch["tokens"][:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(), {}


def tokens(rows=16):
    return {"tokens": jax.ShapeDtypeStruct((rows, LENGTH + 1), jnp.int32)}


def equations(function, *args, capability="9.0"):
    """Return (the attention equations of a function that is traced for a GPU, their scope)."""
    device = PlannedDevice("test", None, "gpu", capability)
    mesh = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=device)
    with compat.mesh_context(mesh):
        program = trace(function, *args, opened=compat.forward_jaxpr)[0]
    wanted = ATTENTION_FORWARD | ATTENTION_BACKWARD
    scope = Scope.of(program, "gpu")
    return [eq for eq in program.equations if eq.name in wanted], scope


def operands(batch=2, length=256, heads=4, kv_heads=4, width=64):
    query = jax.ShapeDtypeStruct((batch, length, heads, width), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((batch, length, kv_heads, width), jnp.bfloat16)
    return query, key, key


def attend(query, key, value, **options):
    return jax.nn.dot_product_attention(query, key, value, implementation="cudnn", **options)


def test_it_is_planned_without_a_gpu():
    found = zeroxla.plan(TheirGPT(), MESH, tokens(), config=CONFIG, device="h100")
    assert found.fits
    assert found.num_parameters > 0
    # No array of all scores of a device's two rows, forward or backward.
    scores = 2 * HEADS * LENGTH * LENGTH * 4
    longer = zeroxla.plan(
        TheirGPT(length=2 * LENGTH),
        MESH,
        {"tokens": jax.ShapeDtypeStruct((16, 2 * LENGTH + 1), jnp.int32)},
        config=CONFIG,
        device="h100",
    )
    more = longer.memory.activation_bytes - found.memory.activation_bytes
    assert more < found.memory.activation_bytes * 1.1 < found.memory.activation_bytes + 4 * scores


@pytest.mark.parametrize("model", [GPT, Llama])
def test_our_own_models_too(model):
    model = model.tiny(attention="cudnn", width=64)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 17), jnp.int32)}
    assert zeroxla.plan(model, MESH, batch, config=CONFIG, device="a100").fits


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, 256 * 256),
        ({"is_causal": True}, 256 * 257 / 2),
        ({"is_causal": True, "local_window_size": (31, 0)}, 32 * 33 / 2 + 224 * 32),
    ],
    ids=["all", "causal", "window"],
)
def test_flops_are_those_of_the_scores_that_are_seen(options, seen):
    def loss(*args):
        return attend(*args, **options).astype(jnp.float32).sum()

    found, scope = equations(jax.grad(loss, argnums=(0, 1, 2)), *operands())
    reads = reads_of(scope)
    forward, backward = (work_of(eq, reads, scope) for eq in found)
    # Two products forward; backward computes the scores again, and four more products.
    product = 2 * 2 * 4 * seen * 64
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    assert forward.dtype == "bfloat16"
    array = 2 * 256 * 4 * 64 * 2
    # Queries, keys and values in, the result out, and a number for each query and head.
    assert forward.num_bytes == pytest.approx(4 * array + 2 * 256 * 4 * 4, abs=64)
    assert backward.num_bytes < 9 * array


@pytest.mark.parametrize("device", ["v100", "tpu-v5e", "cpu"])
def test_devices_without_the_kernel_are_refused(device):
    with pytest.raises(ValueError, match=r'"cudnn"\), a kernel of NVIDIA GPUs .* has .*; plan it'):
        zeroxla.plan(TheirGPT(), MESH, tokens(), config=CONFIG, device=device)


def test_it_is_not_run_on_cpus():
    step = zeroxla.make_step(TheirGPT(), zeroxla.make_mesh(nodes=2), config=CONFIG)
    with pytest.raises(ValueError, match=r'has cpu, no GPU; .* run it with implementation="xla"'):
        step.init(jax.random.key(0), {"tokens": np.zeros((16, LENGTH + 1), np.int32)})


def test_jax_answers_for_itself_outside_of_a_step():
    zeroxla.plan(TheirGPT(), MESH, tokens(), config=CONFIG, device="h100")
    arrays = [jnp.zeros(x.shape, x.dtype) for x in operands()]
    with pytest.raises((RuntimeError, NotImplementedError), match=r"cuDNN|platform"):
        attend(*arrays)


def test_the_targets_capability_decides():
    wide = operands(width=256)
    # A function of its own for each, because JAX remembers what it has traced.
    equations(lambda *args: attend(*args), *wide, capability="9.0")
    with pytest.raises(NotImplementedError, match="head dim must be <= 128"):
        equations(lambda *args: attend(*args), *wide, capability="8.0")


def test_a_gpu_of_ones_own_table_need_not_say_its_capability():
    device = Machines.load().find_device("a100")
    for number, found in (("", "8.0"), ("9.0", "9.0")):
        changed = dataclasses.replace(device, compute_capability=number)
        target = Target.find(MESH, device=changed, link="100gbit", machines=None)
        assert target.abstract_mesh().abstract_device.compute_capability == found


@pytest.mark.parametrize("kv_heads", thinned([2], slow=[4]))
def test_heads_are_split_through_it(kv_heads):
    shapes = [(2, 16, 4, 8), (2, 16, kv_heads, 8), (2, 16, kv_heads, 8)]

    def function(query, key, value):
        half = (x.astype(jnp.bfloat16) for x in (query, key, value))
        return attend(*half, is_causal=True).astype(jnp.float32)

    device = PlannedDevice("test", None, "gpu", "9.0")
    mesh = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=device)
    generator = np.random.default_rng(0)
    arrays = [generator.normal(size=shape).astype(np.float32) for shape in shapes]
    with compat.mesh_context(mesh):
        program, _ = trace(function, *arrays, opened=compat.forward_jaxpr)
    shared = 4 // kv_heads
    heads = ((1, kv_heads, 1),)
    leaves = [
        planned_dims(shapes[0], 2, ((1, kv_heads, shared),)),
        *(planned_dims(shape, 2, heads) for shape in shapes[1:]),
    ]
    flow = DimsFlow.of(program, leaves)
    assert not any(a.blocked for atoms in flow.atoms() for a in atoms if a.chosen)
    axis = SplitAxis(parts=2, name="tensor")

    def run(_):
        taken = [axis.take(jnp.asarray(x), d) for x, d in zip(arrays, leaves, strict=True)]
        outs = PartsRunner(flow, axis)(taken)
        return [axis.collect(x, d) for x, d in zip(outs, flow.outputs(), strict=True)]

    (found,) = jax.vmap(run, axis_name="tensor", axis_size=2)(jnp.zeros(2))
    half = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    whole = jax.nn.dot_product_attention(*half, is_causal=True, implementation="xla")
    for part in found:
        np.testing.assert_allclose(part, whole.astype(jnp.float32), rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_generation_is_planned_with_its_heads_split():
    asked = Generating(num_prompts=8, prompt_length=16, new_tokens=16, tensor=2)
    with pytest.warns(UserWarning, match="none can be made .*: attention needs it whole"):
        found = zeroxla.plan(
            TheirGPT(), MESH, tokens(), config=CONFIG, device="h100", generating=asked
        )
    assert found.generation is not None
    # All but biases, norms and embeddings is split in two.
    assert found.generation.copy_bytes < 0.6 * 2 * found.num_parameters


@pytest.mark.nightly
def test_it_is_compiled_for_gpus_that_are_not_there():
    try:
        mesh = target_mesh(H200, MESH)
    except WheelsMissingError as error:
        pytest.skip(str(error))
    step = zeroxla.make_step(TheirGPT(), mesh, config=CONFIG)
    text = step.lower(step.abstract_state(tokens()), tokens()).compile().as_text()
    for kernel in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        assert kernel in text
