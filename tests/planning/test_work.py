"""The work of equations: what kernels read and write, with several results in one kernel."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from zeroxla.frontend import adapt
from zeroxla.models import Llama
from zeroxla.planning.gpu_topology import H200, WheelsMissingError, target_mesh
from zeroxla.planning.work import reads_of, work_of
from zeroxla.program import compat
from zeroxla.program.live.liveness import Scope
from zeroxla.program.primitives import CONTRACTIONS, FUSED, RENAMES
from zeroxla.program.trace import trace

X = jax.ShapeDtypeStruct((256, 256), jnp.float32)
SIZE = 256 * 256 * 4


def num_arrays(function, *args, platform="gpu", products=False):
    """Return the bytes that a function's kernels read and write, in arrays of X's size; products
    aside, unless they are asked for."""
    program = trace(function, *args, opened=compat.forward_jaxpr)[0]
    return num_bytes(program, platform, products=products) / SIZE


def num_bytes(program, platform, *, products=True):
    """Return the bytes that a program's kernels read and write."""
    scope = Scope.of(program, platform, late=False)
    reads, total = reads_of(scope), 0.0
    for eq in program.equations:
        hidden = eq.name in FUSED and scope.in_memory.isdisjoint(eq.outputs)
        if hidden or eq.name in RENAMES or (eq.name in CONTRACTIONS and not products):
            continue
        total += work_of(eq, reads, scope).num_bytes
    return total


@pytest.mark.parametrize(("platform", "want"), [("gpu", 4), ("tpu", 4), ("cpu", 6)])
def test_results_of_the_same_operands_are_one_kernel_but_on_cpus(platform, want):
    # x and y once (on a CPU for each result), and two results.
    found = num_arrays(lambda x, y: (x + y, x * y), X, X, platform=platform)
    assert found == want


def test_a_kernel_does_not_read_what_it_makes():
    def kept_and_used(x, w):
        gate = jax.nn.sigmoid(x)  # in memory: the product reads it
        return gate @ w, gate * x

    # x is read, sigmoid(x) and the product's partner are written.
    assert num_arrays(kept_and_used, X, X) == pytest.approx(3)


def test_what_waits_for_a_product_is_another_kernel():
    def waits(x, w):
        gate = jnp.tanh(x)
        return (gate @ w) * gate  # it needs the product, so it reads tanh(x) again

    # tanh: one in, one out. The other: two in, one out.
    assert num_arrays(waits, X, X) == pytest.approx(5)


def test_a_reduction_shares_a_kernel_with_what_reads_the_same():
    def sums(x, y):
        return jnp.sum(x * y, axis=0), x + y

    found = num_arrays(sums, X, X)
    assert found == pytest.approx(3, abs=0.02)  # x, y, x + y, and a row


def test_other_sizes_are_other_kernels():
    def sliced(x):
        return x + 1.0, x[:128] * 2.0

    assert num_arrays(sliced, X) == pytest.approx(2 + 1 + 0.5)


def test_products_read_and_write_on_their_own():
    assert num_arrays(lambda x: (x @ x, x + 1.0), X, products=True) == pytest.approx(2 + 2)


BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "u8": 1}
NO_KERNEL = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "iota")


def compiled_bytes(text):
    """Return the bytes that the kernels of an HLO program without loops read and write."""
    entry = text[text.index("ENTRY ") :].partition("\n}")[0]
    sizes, total = {}, 0
    for line in entry.splitlines()[1:]:
        found = re.match(r"\s*(?:ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", line)
        if found is None:
            continue
        name, shape, kind, rest = found.groups()
        size = 0
        for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape):
            elements = 1
            for dim in filter(None, dims.split(",")):
                elements *= int(dim)
            size += elements * BYTES.get(dtype, 0)
        sizes[name] = size
        if kind not in NO_KERNEL:
            operands = set(re.findall(r"%[\w.\-]+", rest.partition("), ")[0]))
            total += size + sum(sizes.get(operand, 0) for operand in operands)
    return total


@pytest.mark.nightly
@pytest.mark.parametrize("remat", [False, True])
def test_a_block_moves_the_bytes_of_xlas_program_for_an_h200(remat):
    try:
        mesh = target_mesh(H200, {"node": 1, "device": 1})
    except WheelsMissingError as error:
        pytest.skip(str(error))
    everywhere = NamedSharding(mesh, PartitionSpec())
    tokens = jax.ShapeDtypeStruct((2, 2049), jnp.int32, sharding=everywhere)
    planned, compiled = [], []
    for layers in (1, 2):
        adapted = adapt(
            Llama.small(
                vocab=512,
                layers=layers,
                width=2048,
                heads=16,
                kv_heads=16,
                hidden=5504,
                scan=False,
                remat=remat,
                attention="cudnn",
            )
        )
        shapes, _ = jax.eval_shape(adapted.init, jax.random.key(0), {"tokens": tokens})
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=everywhere), shapes
        )

        def gradients(params, tokens, loss=adapted.loss):
            batch, key = {"tokens": tokens}, jax.random.key(0)
            return jax.grad(lambda p: loss(p, {}, batch, key, train=True)[0])(params)

        with compat.mesh_context(mesh):
            program = trace(gradients, params, tokens, opened=compat.forward_jaxpr)[0]
            text = jax.jit(gradients).lower(params, tokens).compile().as_text()
        planned.append(num_bytes(program, "gpu"))
        compiled.append(compiled_bytes(text))
    # Of one block: what a second one adds.
    ratio = (planned[1] - planned[0]) / (compiled[1] - compiled[0])
    assert 0.95 < ratio < 1.15
