"""linen modules, written with no thought of zeroxla, as pure init and loss."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import partitioning
from tools.adapters import KEY, X, once, shapes
from tools.quick import quick_compilation  # noqa: F401

from zeroxla.frontend import adapt, stream_key

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Normed(nn.Module):
    """Dense, BatchNorm, dropout, noise, a shared dense layer applied twice."""

    dropout: float = 0.0
    noise: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(5)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        if self.noise and train:
            x = x + self.noise * jax.random.normal(self.make_rng("noise"), x.shape)
        shared = nn.Dense(5, name="shared")
        return shared(nn.relu(shared(x)))

    def loss(self, batch, *, train):
        y = self(batch, train)
        return jnp.mean(y**2), {"mean": y.mean()}


def test_linen_loss_equals_plain_apply():
    module = Normed()
    params, state, (loss, metrics, new_state) = once(adapt(module))
    variables = module.init({"params": KEY}, X, True)
    # jit and eager may differ in the last bit.
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-6), {"params": params, **state}, variables
    )
    y, expected = module.apply(variables, X, True, mutable=["batch_stats"])
    np.testing.assert_allclose(loss, jnp.mean(y**2), rtol=1e-6)
    np.testing.assert_allclose(metrics["mean"], y.mean(), rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), new_state, expected)
    assert type(params) is dict
    assert type(new_state) is dict


def test_linen_state_changes_in_train_only():
    adapted = adapt(Normed())
    _, state, (_, _, trained) = once(adapted, train=True)
    assert set(state) == {"batch_stats"}
    assert not np.array_equal(*(jax.tree.leaves(s)[0] for s in (state, trained)))
    _, state, (_, _, same) = once(adapted, train=False)
    jax.tree.map(np.testing.assert_array_equal, state, same)


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"noise": 0.5}])
def test_linen_rng_streams_of_any_name_follow_the_key(options):
    adapted = adapt(Normed(**options))
    params, state = adapted.init(KEY, X)

    def loss(seed, train=True):
        return adapted.loss(params, state, X, jax.random.key(seed), train=train)[0]

    first, again, other = jax.jit(jax.vmap(loss))(jnp.array([0, 0, 1]))
    assert first == again
    assert first != other
    (name,) = options
    module_loss = Normed(**options).apply(
        {"params": params, **state},
        X,
        train=True,
        method="loss",
        mutable=["batch_stats"],
        rngs={name: stream_key(jax.random.key(1), name)},
    )[0][0]
    np.testing.assert_allclose(other, module_loss, rtol=1e-5)


def test_streams_of_other_names_have_other_keys():
    keys = [stream_key(KEY, name) for name in ("dropout", "noise", "layers/0/drop/rngs")]
    data = {tuple(jax.random.key_data(key).tolist()) for key in (KEY, *keys)}
    assert len(data) == 4
    # crc32(b"dropout"): the same in every process and release.
    np.testing.assert_array_equal(
        jax.random.key_data(keys[0]),
        jax.random.key_data(jax.random.fold_in(KEY, 0x1289EFC9)),
    )


class NoisyBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = nn.Dense(4, kernel_init=nn.initializers.zeros)(x)
        return x, jax.random.normal(self.make_rng("noise"))


class NoisyScan(nn.Module):
    """Shared weights, noise of its own in each iteration: splits the stream, not "params"."""

    @nn.compact
    def __call__(self, x):
        body = nn.scan(
            NoisyBlock,
            variable_broadcast="params",
            split_rngs={"params": False, "noise": True},
            length=4,
        )
        return body()(x, None)[1]

    def loss(self, batch, *, train):
        return self(batch).std()


def test_linen_scan_splits_the_streams_it_names():
    *_, (spread, _, _) = once(adapt(NoisyScan()))
    assert spread > 0.1  # The same noise in all four would have no spread.


def test_linen_retraces_without_dead_equations():
    adapted = adapt(Normed(noise=0.1))
    params, state = adapted.init(KEY, X)
    trace = lambda: str(jax.make_jaxpr(partial(adapted.loss, train=True))(params, state, X, KEY))  # noqa: E731
    first = trace()
    assert first.count("dot_general") == 3
    assert trace() == first


class Sower(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(3)(x)
        self.sow("losses", "auxiliary", y.sum())
        self.sow("intermediates", "y", y)
        y = self.perturb("y", y)
        calls = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing() and self.is_mutable_collection("counts"):
            calls.value = calls.value + 1
        return y

    def loss(self, batch, *, train):
        return self(batch).mean()


def test_linen_sown_and_perturbed_values_are_not_state():
    _, state, (_, _, new_state) = once(adapt(Sower()))
    assert shapes(state) == {"counts": {"calls": ()}}
    assert new_state["counts"]["calls"] == 1
    assert new_state["counts"]["calls"].dtype == jnp.int32


class Annotated(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(3, kernel_init=init)(x)

    def loss(self, batch, *, train):
        return self(batch).mean()


def test_linen_boxed_leaves_are_unboxed():
    params, *_ = once(adapt(Annotated()))
    assert shapes(params) == {"Dense_0": {"bias": (3,), "kernel": (4, 3)}}


class TwoHeads(nn.Module):
    """No loss of its own; `encode` and `decode` beside the call; a head only training uses."""

    def setup(self):
        self.encoder, self.decoder, self.extra = nn.Dense(3), nn.Dense(4), nn.Dense(2)
        self.drop = nn.Dropout(0.5)

    def encode(self, x, train):
        return self.drop(self.encoder(x), deterministic=not train)

    def __call__(self, x, *, train):
        return self.decoder(self.encode(x, train))


def test_linen_method_named_decode_is_no_cache():
    class Autoencoder(TwoHeads):
        def decode(self, z):
            return self.decoder(z)

    class WithDecoder(nn.Module):
        decode: nn.Module

        def __call__(self, x, *, train):
            return self.decode(x)

    class WithSwitch(nn.Module):
        decode: bool | None = None

        def __call__(self, x, *, train):
            return x

    def loss(apply, x, *, train):
        return (apply(x, train=train) ** 2).mean()

    assert adapt(WithDecoder(nn.Dense(4)), loss).caching is None
    assert adapt(WithSwitch(), loss).caching is not None
    adapted = adapt(Autoencoder(), loss)
    assert adapted.caching is None
    _, _, (value, _, _) = once(adapted)
    assert np.isfinite(value)


def test_linen_collections_without_arrays_are_no_state():
    class WithAxes(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.initializers.ones
            return x @ partitioning.param_with_axes("w", init, (4, 2), axes=("embed", "mlp"))

        def loss(self, batch, *, train):
            return self(batch).mean()

    params, state, _ = once(adapt(WithAxes()))
    assert shapes(params) == {"w": (4, 2)}
    assert state == {}


def test_linen_loss_function_may_call_the_module_as_it_likes():
    def loss(apply, batch, *, train):
        twice = apply(batch, train=train), apply(batch, train=train)
        extra = apply.extra(apply.encode(batch, train)).mean() if train else 0.0
        difference = jnp.abs(twice[0] - twice[1]).max()
        return ((twice[0] - batch) ** 2).mean() + extra, {"difference": difference}

    adapted = adapt(TwoHeads(), loss)
    params, _, (_, metrics, _) = once(adapted)
    assert set(params) == {"encoder", "decoder", "extra"}
    assert metrics["difference"] > 0  # Each call draws dropout of its own.
    *_, (_, metrics, _) = once(adapted, train=False)
    assert metrics["difference"] == 0


def test_linen_state_that_changes_its_shape_is_an_error():
    class Grower(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen = self.variable("memory", "seen", lambda: jnp.zeros((0, 4)))
            if not self.is_initializing():
                seen.value = jnp.concatenate([seen.value, x])
            return nn.Dense(1)(x)

        def loss(self, batch, *, train):
            return self(batch).mean()

    with pytest.raises(ValueError, match=r"memory/seen: \(0, 4\) -> \(6, 4\)"):
        once(adapt(Grower()))


def test_linen_parameter_that_is_no_array_is_an_error():
    class Pair(nn.Module):
        @nn.compact
        def __call__(self, x):
            first, second = self.param("pair", lambda key: (jnp.ones(4), jnp.ones(4)))
            return x * first + second

        def loss(self, batch, *, train):
            return self(batch).mean()

    with pytest.raises(ValueError, match="parameter pair is a tuple"):
        once(adapt(Pair()))


class Router(nn.Module):
    """Sows a loss of its own, inside of a scan too; keeps names beside arrays in one collection."""

    own_loss: bool = True

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                x = nn.tanh(nn.Dense(4)(x))
                self.sow("losses", "balance", jnp.mean(x**2))
                return x, None

        axes = {"params": 0, "losses": 0, "intermediates": 0}
        scanned = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=3)
        x, _ = scanned()(x, None)
        self.sow("intermediates", "mean", x.mean())
        kind = self.variable("about", "kind", lambda: "gelu")
        scale = self.variable("about", "scale", lambda: jnp.full(4, 2.0))
        assert kind.value == "gelu"
        return x * scale.value

    def loss(self, batch, *, train):
        y = self(batch)
        sown = jax.tree.leaves(self.variables["losses"])
        (mean,) = self.variables["intermediates"]["mean"]
        return (y**2).mean() + sum(x.sum() for x in sown), {"mean": mean}


def test_linen_loss_reads_what_was_sown_and_collections_may_hold_names():
    module = Router()
    adapted = adapt(module)
    params, state, (loss, metrics, new_state) = once(adapted)
    assert shapes(state) == shapes(new_state) == {"about": {"scale": (4,)}}

    def expected(params):
        collections = {"params": params, "about": {"kind": "gelu", **state["about"]}}
        y, sown = module.apply(collections, X, mutable=["losses", "intermediates"])
        extra = sum(x.sum() for x in jax.tree.leaves(sown["losses"]))
        return (y**2).mean() + extra, sown["intermediates"]["mean"][0]

    (value, mean), gradient = jax.value_and_grad(expected, has_aux=True)(params)
    np.testing.assert_allclose(loss, value, rtol=1e-6)
    np.testing.assert_allclose(metrics["mean"], mean, rtol=1e-5)
    found = jax.grad(lambda params: adapted.loss(params, state, X, KEY, train=True)[0])(params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), found, gradient)
    # In a process that has not initialised the module, the names are found by tracing.
    again, _, _ = jax.jit(partial(adapt(module).loss, train=True))(params, state, X, KEY)
    np.testing.assert_allclose(again, loss, rtol=1e-6)


def test_linen_sowing_inside_of_jaxs_own_loops_is_left_out():
    class Loop(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(4)
            x = dense(x)

            def body(x, _):
                self.sow("intermediates", "x", x)
                return nn.tanh(x), None

            return jax.lax.scan(body, x, length=2)[0]

        def loss(self, batch, *, train):
            return self(batch).mean()

    _, _, (loss, _, _) = once(adapt(Loop()))
    assert np.isfinite(loss)
