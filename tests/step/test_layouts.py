"""Models with sharding annotations for other meshes: a step ignores them, with one note."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.lax import with_sharding_constraint  # bound before zeroxla traces a model
from jax.sharding import PartitionSpec as P
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla

pytestmark = pytest.mark.usefixtures("quick_compilation")

WIDTH, HEADS = 16, 2
X = np.random.default_rng(0).normal(size=(16, 4, WIDTH)).astype(np.float32)
INIT = nn.initializers.lecun_normal()
RULES = (("batch", "data"), ("embed", "model"))


def loss_of(apply, batch, *, train):
    return jnp.mean(apply(batch) ** 2)


def in_parts(init, annotated):
    return nn.with_partitioning(init, ("data", "model")) if annotated else init


def logical(init, annotated):
    return nn.with_logical_partitioning(init, ("batch", "embed")) if annotated else init


class Layers(nn.Module):
    """Linen layers that keep, unbox or scan over the boxes of their parameters."""

    annotated: bool

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, kernel_init=in_parts(INIT, self.annotated))(x)
        x = nn.DenseGeneral(WIDTH, kernel_init=logical(INIT, self.annotated))(x)
        x = nn.MultiHeadDotProductAttention(HEADS, kernel_init=in_parts(INIT, self.annotated))(x)
        scanned = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = scanned(self.annotated)(x, None)
        if self.annotated:
            x = nn.with_logical_constraint(x, ("batch", None, "embed"), rules=RULES)
            mesh = jax.make_mesh(
                (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
            )
            x = with_sharding_constraint(x, jax.NamedSharding(mesh, P("data")))
        return x


class Layer(nn.Module):
    annotated: bool

    @nn.compact
    def __call__(self, x, _):
        x = nn.DenseGeneral(WIDTH, kernel_init=in_parts(INIT, self.annotated))(x)
        return (
            with_sharding_constraint(x, P("data", None, "model")) if self.annotated else x
        ), None


class Explicit(nnx.Module):
    """Written for explicit sharding: its operations name the layouts of their results."""

    def __init__(self, annotated, rngs):
        metadata = {"out_sharding": ("data", "model")} if annotated else {}
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs, kernel_metadata=metadata)
        self.table = nnx.Param(rngs.params.normal((8, WIDTH)), **metadata)
        self.annotated = annotated

    def __call__(self, x):
        spec = P("data", None, "model") if self.annotated else None
        x = self.first(x, out_sharding=spec)
        if self.annotated:
            x = jax.sharding.reshard(x, P("data"))
        x = jnp.einsum("blc,cd->bld", x, self.first.kernel[...], out_sharding=spec)
        rows = (x.sum(-1) > 0).astype(jnp.int32)
        return x + self.table.at[rows].get(out_sharding=spec) + jnp.ones(x.shape, out_sharding=spec)


def gradient(model, mesh):
    step = zeroxla.make_step(model, mesh, optax.sgd(1.0), loss=loss_of)
    before = step.init(jax.random.key(0), X)
    start = jax.tree.map(np.asarray, before.params)
    after, metrics = step(before, X)
    return metrics["loss"], start, jax.tree.map(lambda a, b: a - np.asarray(b), start, after.params)


@pytest.mark.parametrize(
    ("make", "axes"),
    [
        (lambda annotated: Layers(annotated), "batch, data, embed, layers, model"),
        (lambda annotated: lambda rngs: Explicit(annotated, rngs), "data, model"),
    ],
    ids=["linen", "explicit"],
)
@pytest.mark.parametrize("own_mesh", thinned([True], slow=[False]), ids=["users_mesh", ""])
def test_annotations_are_ignored_with_one_note(make, axes, own_mesh):
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    expected = gradient(make(False), mesh)
    users = jax.make_mesh((4, 2), ("data", "model"))
    with (
        jax.set_mesh(users if own_mesh else mesh),
        pytest.warns(UserWarning, match="layout|annot") as notes,
    ):
        found = gradient(make(True), mesh)
    assert [str(note.message) for note in notes] == [
        f"the model's own sharding annotations have no effect (axes {axes}): a step splits "
        "parameters over the whole mesh, and batches by rows"
    ]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


class Decoder(nn.Module):
    annotated: bool

    @nn.compact
    def __call__(self, tokens):
        init = in_parts(nn.initializers.normal(), self.annotated)
        x = nn.Embed(32, WIDTH, embedding_init=init)(tokens)
        attention = nn.MultiHeadDotProductAttention(
            HEADS, kernel_init=in_parts(INIT, self.annotated)
        )
        x = x + attention(x, mask=nn.make_causal_mask(tokens))
        if self.annotated:
            x = with_sharding_constraint(x, P("data", None, "model"))
        return nn.Dense(32)(x)

    def loss(self, batch, *, train):
        return jnp.mean(self(batch["tokens"]) ** 2)


@pytest.mark.slow
def test_an_annotated_model_generates(mesh24):
    batch = {"tokens": np.arange(64).reshape(8, 8) % 32}
    step = zeroxla.make_step(Decoder(annotated=True), mesh24)
    with pytest.warns(UserWarning, match="axes data, model"):
        state = step.init(jax.random.key(0), batch)
    engine = zeroxla.HybridEngine(step, tensor=2, max_length=16)
    found = engine.generate(
        state, [[1, 2, 3], [4, 5]], key=jax.random.key(1), max_new_tokens=3, temperature=0.0
    )
    row = [1, 2, 3]
    variables = {"params": zeroxla.full_params(state)}
    plain = Decoder(annotated=False)
    for token in found.tokens[0]:
        assert token == int(np.argmax(plain.apply(variables, np.array([row]))[0, -1]))
        row.append(int(token))


def test_annotations_have_their_effect_elsewhere():
    """What zeroxla does to JAX's functions ends where it has traced its model."""
    mesh = jax.make_mesh(
        (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    with jax.set_mesh(mesh):
        product = jax.jit(lambda x: jnp.einsum("blc,blc->bl", x, x, out_sharding=P("data")))(X)
        moved = jax.sharding.reshard(X, P("data", None, "model"))
    assert product.sharding.spec == P("data", None)
    assert moved.sharding.spec == P("data", None, "model")
    auto = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(auto):
        assert (
            jax.jit(lambda x: with_sharding_constraint(x, P("data")))(X).sharding.spec[0] == "data"
        )
        with pytest.raises(ValueError, match="is not found in mesh"):
            jax.jit(lambda x: with_sharding_constraint(x, P("rows")))(X)
