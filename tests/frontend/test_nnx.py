"""nnx modules, written with no thought of zeroxla, as pure init and loss."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tools.adapters import KEY, X, once, shapes
from tools.quick import quick_compilation  # noqa: F401

from zeroxla.frontend import adapt
from zeroxla.models import Llama

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.norm(self.linear(x)))


class Stack(nnx.Module):
    """Two blocks, in a list or stacked and scanned; a tied scale; arrays that are no variables."""

    def __init__(self, rngs, scanned=False):
        self.scanned = scanned
        if scanned:
            self.blocks = nnx.vmap(Block)(rngs.split(2))
        else:
            self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.scale = nnx.Param(jnp.ones(4))
        self.tied = self.scale
        self.table = jnp.arange(4.0)
        self.parts = nnx.Dict({"offset": nnx.Param(jnp.zeros(()))})

    def __call__(self, x):
        if self.scanned:
            run = nnx.scan(lambda x, b: b(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x = run(x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        return x * self.scale * self.tied + self.table + self.parts["offset"]

    def loss(self, batch, *, train):
        y = self(batch)
        return (y**2).mean(), {"mean": y.mean()}


@pytest.mark.parametrize("scanned", [False, True])
def test_nnx_parameters_and_state_are_nested_dicts_with_string_keys(scanned):
    adapted = adapt(lambda rngs: Stack(rngs, scanned))
    params, state = jax.eval_shape(adapted.init, KEY, X)
    layer = (2,) if scanned else ()
    linear = {"bias": (*layer, 4), "kernel": (*layer, 4, 4)}
    block = {"linear": linear, "norm": {"bias": (*layer, 4), "scale": (*layer, 4)}}
    stats = {"norm": {"mean": (*layer, 4), "var": (*layer, 4)}}
    assert shapes(params) == {
        "blocks": block if scanned else {"0": block, "1": block},
        "parts": {"offset": ()},
        "scale": (4,),
    }
    assert shapes(state) == {
        "blocks": stats if scanned else {"0": stats, "1": stats},
        "table": (4,),
    }


@pytest.fixture(params=["graph", "tree"])
def mode(request):
    """How flax takes modules by default: as graphs, or as trees, as it plans to."""
    is_graph = request.param == "graph"
    with nnx.set_graph_mode(is_graph), nnx.set_graph_updates(is_graph):
        yield request.param


@pytest.mark.parametrize("scanned", [False, True])
def test_nnx_loss_is_pure_and_follows_the_key(scanned, mode):
    adapted = adapt(lambda rngs: Stack(rngs, scanned))
    params, state = jax.jit(adapted.init)(KEY, X)

    @partial(jax.jit, static_argnames="train")
    def losses(seeds, train):
        call = lambda seed: adapted.loss(params, state, X, jax.random.key(seed), train=train)  # noqa: E731
        return jax.vmap(call)(seeds)

    (first, again, other), _, trained = losses(jnp.array([0, 0, 1]), train=True)
    assert first == again
    assert first != other
    means = [leaf for path, leaf in jax.tree.leaves_with_path(trained) if "mean" in str(path)]
    assert means
    assert all(jnp.any(leaf != 0) for leaf in means)
    (first, other), metrics, same = losses(jnp.array([0, 1]), train=False)
    assert first == other
    assert set(metrics) == {"mean"}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b), same, state)


@pytest.mark.parametrize("layers", [1, 2])
def test_nnx_stacked_layers_draw_their_own_dropout(layers):
    class Dropped(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.vmap(lambda r: nnx.Dropout(0.5, rngs=r))(rngs.split(layers))

        def loss(self, batch, *, train):
            masks = nnx.vmap(lambda drop, x: drop(x), in_axes=(0, None))(self.drop, batch)
            return jnp.abs(masks[0] - masks[-1]).sum()

    adapted = adapt(lambda rngs: Dropped(rngs))
    *_, (difference, _, _) = once(adapted, batch=jnp.ones((4, 4)))
    assert (difference > 0) == (layers > 1)


def test_nnx_init_depends_on_the_key_and_equals_the_module():
    adapted = adapt(lambda rngs: Stack(rngs))
    params, _ = jax.jit(adapted.init)(KEY, None)
    kernel = Stack(nnx.Rngs(KEY)).blocks[1].linear.kernel[...]
    np.testing.assert_array_equal(params["blocks"]["1"]["linear"]["kernel"], kernel)
    assert shapes(adapted.init(KEY, None)) == shapes(jax.eval_shape(adapted.init, KEY, None))
    other, _ = jax.jit(adapted.init)(jax.random.key(4), None)
    assert not np.array_equal(other["blocks"]["1"]["linear"]["kernel"], kernel)


def test_nnx_function_is_only_evaluated_abstractly():
    seen = []

    def model(rngs):
        module = Llama.llama3_8b()(rngs)  # 32 GB, were it allocated.
        seen.append(module.norm.scale[...])
        return module

    adapted = adapt(model)
    params, _ = jax.eval_shape(adapted.init, KEY, None)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 8_030_261_248
    assert seen
    assert all(isinstance(leaf, jax.core.Tracer) for leaf in seen)


def test_nnx_instance_warns_and_keeps_its_values():
    module = Stack(nnx.Rngs(0))
    module.scale[...] = jnp.full(4, 7.0)
    with pytest.warns(UserWarning, match="Stack was already allocated whole"):
        adapted = adapt(module)
    params, state = adapted.init(KEY, X)
    np.testing.assert_array_equal(params["scale"], np.full(4, 7.0))
    np.testing.assert_array_equal(
        params["blocks"]["0"]["linear"]["kernel"], module.blocks[0].linear.kernel[...]
    )
    for leaf in jax.tree.leaves((params, state)):
        leaf.delete()  # As donation would: the module keeps its own arrays.
    assert module.scale[...].sum() == 28
    before = module.blocks[0].norm.mean[...]
    once(adapted)
    np.testing.assert_array_equal(module.blocks[0].norm.mean[...], before)


def test_nnx_loss_function_gets_the_module():
    class NoLoss(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x):
            return self.layer(x)

    def loss(apply, batch, *, train):
        return (apply(batch) - apply(batch)).sum() + float(train)

    assert once(adapt(lambda rngs: NoLoss(rngs), loss))[2][0] == 1


def test_nnx_keys_and_counters_that_are_variables_are_state():
    class Keyed(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(4, 2, rngs=rngs)
            self.key = jax.random.key(5)
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def loss(self, batch, *, train):
            self.calls.set_value(self.calls[...] + 1.0)
            return self.layer(batch).mean() + jax.random.normal(self.key)

    _, state, (_, _, new_state) = once(adapt(lambda rngs: Keyed(rngs)))
    assert set(state) == {"key", "calls"}
    assert jax.random.key_data(new_state["key"]).tolist() == [0, 5]
    assert new_state["calls"] == 1
    assert new_state["calls"].dtype == jnp.int32


def test_nnx_annotated_variables_need_no_mesh():
    class Sharded(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
            self.layer = nnx.Linear(4, 2, kernel_init=init, rngs=rngs)

        def loss(self, batch, *, train):
            return self.layer(batch).mean()

    np.testing.assert_allclose(
        once(adapt(lambda rngs: Sharded(rngs)))[2][0], X.sum(axis=1).mean(), rtol=1e-5
    )


@pytest.mark.filterwarnings("ignore:.*outside of 'nnx.capture:DeprecationWarning")
def test_nnx_sown_values_are_not_state():
    class SowingModule(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(4, 2, rngs=rngs)

        def loss(self, batch, *, train):
            y = self.layer(batch)
            options = {"init_fn": lambda: 0.0, "reduce_fn": lambda a, b: a + b}
            self.sow(nnx.Intermediate, "y", y.mean(), **options)
            (sown,) = jax.tree.leaves(nnx.pop(self, nnx.Intermediate) if train else [y.mean()])
            return sown

    _, state, (_, _, new_state) = once(adapt(lambda rngs: SowingModule(rngs)))
    assert state == new_state == {}
    called = SowingModule(nnx.Rngs(params=KEY))
    called.loss(X, train=False)  # it holds now what it has sown
    with pytest.warns(UserWarning, match="already allocated"):
        adapted = adapt(called)
    _, state, (again, _, new_state) = once(adapted)
    assert state == new_state == {}
    np.testing.assert_allclose(again, called.layer(X).mean(), rtol=1e-5)


def test_nnx_params_of_whole_numbers_are_state_and_named():
    class Table(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 3, rngs=rngs)
            self.order = nnx.Param(jnp.array([2, 0, 1]))
            self.mask = nnx.Param(jnp.array([True, False, True]))

        def __call__(self, x):
            return self.linear(x)[:, self.order[...]] * self.mask[...]

        def loss(self, batch, *, train):
            return (self(batch) ** 2).mean()

    with pytest.warns(UserWarning, match=r"^mask \(bool\), order \(int32\): an nnx.Param of whole"):
        adapted = adapt(lambda rngs: Table(rngs))
    params, state, (loss, _, new_state) = once(adapted)
    assert shapes(params) == {"linear": {"bias": (3,), "kernel": (4, 3)}}
    np.testing.assert_array_equal(new_state["order"], [2, 0, 1])
    assert shapes(state) == shapes(new_state)
    y = (X @ params["linear"]["kernel"] + params["linear"]["bias"])[
        :, np.array([2, 0, 1])
    ] * np.array([1, 0, 1])
    np.testing.assert_allclose(loss, (y**2).mean(), rtol=1e-5)
