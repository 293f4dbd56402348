"""`Step.with_config`: what it keeps, what it says, and what becomes of a live state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation  # noqa: F401
from tools.zoo.base import leaves

import zeroxla
from zeroxla import Checkpointer, Offload, ZeroConfig
from zeroxla.models import GPT
from zeroxla.offload.memory_kinds import place_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(0)
SMALL = {"persistence_threshold": 0}
BATCH = {"tokens": np.random.default_rng(3).integers(0, 64, (16, 9), dtype=np.int32)}


def copy(state):
    return jax.tree.map(jnp.copy, state)


def make(mesh, optimizer=None, model=None, **options):
    model = model or GPT.tiny(layers=2, width=16)
    return zeroxla.make_step(model, mesh, optimizer or optax.adam(1e-3), **options)


def embed(params, batch, key):
    x = jnp.tanh(params["table"][batch["tokens"]] @ params["up"])
    return jnp.mean((x @ params["down"]) ** 2)


FUNCTIONS = leaves(table=(64, 16), up=(16, 32), down=(32, 8)), embed
"""The least model that reads tokens."""


class TestMicroBatches:
    def test_they_are_kept(self, mesh24):
        step = make(mesh24, microbatches=2)
        assert step.with_config(ZeroConfig.zeropp()).config.accumulate == 2
        assert step.with_config(ZeroConfig()).with_config(ZeroConfig()).config.accumulate == 2

    def test_others_are_taken(self, mesh24):
        step = make(mesh24, microbatches=2)
        assert step.with_config(ZeroConfig(accumulate=4)).config.accumulate == 4
        assert step.with_config(ZeroConfig(), microbatches=1).config.accumulate == 1

    def test_two_numbers_contradict_each_other(self, mesh24):
        with pytest.raises(ValueError, match=r"microbatches=2 and config.accumulate=4 contradict"):
            make(mesh24, microbatches=2, config=ZeroConfig(accumulate=4))


class TestOptimizer:
    def test_make_step_says_that_one_of_two_is_ignored(self, mesh24):
        config = ZeroConfig(optimizer=optax.sgd(0.1))
        with pytest.warns(UserWarning, match="config.optimizer has no effect; leave one"):
            make(mesh24, config=config)

    def test_with_config_says_that_it_keeps_its_own(self, mesh24):
        step = make(mesh24)
        with pytest.warns(UserWarning, match="with_config keeps the optimizer of the step"):
            other = step.with_config(ZeroConfig(optimizer=optax.sgd(0.1)))
        assert other.optimizer is step.optimizer
        own = zeroxla.make_step(GPT.tiny(), mesh24, config=ZeroConfig(optimizer=optax.sgd(0.1)))
        own.with_config(dataclasses.replace(own.config, accumulate=2))  # without a warning


class TestFrozen:
    @pytest.mark.slow
    def test_they_are_kept(self, mesh24):
        step = make(mesh24, config=ZeroConfig(frozen="bias"))
        state = step.init(KEY, BATCH)
        other = step.with_config(ZeroConfig(**SMALL))
        assert other.config.frozen == ("bias",)
        before = np.asarray(state.params["h"]["ln_1"]["bias"])
        state, _ = other(state, BATCH)
        np.testing.assert_array_equal(state.params["h"]["ln_1"]["bias"], before)

    def test_others_are_refused(self, mesh24):
        step = make(mesh24, config=ZeroConfig(frozen="bias"))
        with pytest.raises(ValueError, match=r"frozen=\['mlp'\]\) of a step with frozen=\['bias'"):
            step.with_config(ZeroConfig(frozen="mlp"))


def places(state):
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return {place_of(x) for x in leaves if x.ndim > 1}


class TestOffload:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "moves",
        [
            [{"optimizer": "disk", "params": "host"}, {}],
            [{"optimizer": "disk", "params": "host"}, {"params": "disk"}, {}],
        ],
    )
    def test_a_state_moves_to_where_the_options_say(self, moves, mesh24, tmp_path):
        """And it goes on with the same bits as one that has stayed on the devices."""
        step = make(mesh24, config=ZeroConfig(**SMALL))
        stays = step.init(KEY, BATCH)
        state = copy(stays)
        for options in moves:
            path = str(tmp_path / "one") if "disk" in options.values() else None
            offload = Offload(path=path, sub_group=1000, **options)
            other = step.with_config(ZeroConfig(offload=offload, **SMALL))
            state, metrics = other(state, BATCH)
            named = {offload.optimizer, offload.params}
            assert places(state) == {"device" if name == "none" else name for name in named}
            stays, expected = step(stays, BATCH)
            assert float(metrics["loss"]) == float(expected["loss"])
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(stays), strict=True):
            if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
                np.testing.assert_array_equal(x, y)

    def test_to_another_folder(self, mesh24, tmp_path):
        first, second = (
            ZeroConfig(offload=Offload(optimizer="disk", path=str(tmp_path / name)), **SMALL)
            for name in ("one", "two")
        )
        step = make(mesh24, model=FUNCTIONS, config=first)
        state, _ = step(step.init(KEY, BATCH), BATCH)
        state, _ = step.with_config(second)(state, BATCH)
        files = {x.file.path.parent for x in jax.tree.leaves(state.opt_state) if x.ndim > 1}
        assert tmp_path / "two" in {folder for file in files for folder in (file, *file.parents)}

    def test_what_cannot_be_is_said_before_anything_moves(self, mesh24, tmp_path):
        folder = tmp_path / "file"
        folder.write_text("no folder")
        step = make(mesh24, model=FUNCTIONS, config=ZeroConfig(**SMALL))
        state = step.init(KEY, BATCH)
        offload = Offload(optimizer="disk", path=str(folder))
        other = step.with_config(ZeroConfig(offload=offload, **SMALL))
        with pytest.raises(ValueError, match=str(folder)):
            other(state, BATCH)
        step(state, BATCH)


class TestLossScale:
    def test_it_begins_when_float16_does(self, mesh24, tmp_path):
        step = make(mesh24, model=FUNCTIONS, config=ZeroConfig(**SMALL))
        state, _ = step(step.init(KEY, BATCH), BATCH)
        half = step.with_config(
            ZeroConfig(compute_dtype="float16", init_loss_scale=2.0**10, loss_scale_window=2)
        )
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, state)
            restored = checkpointer.restore(half, 1).state
        for begun in (state, restored):
            scales = []
            for _ in range(3):
                begun, metrics = half(begun, BATCH)
                scales.append(float(metrics["loss_scale"]))
            assert scales == [2.0**10, 2.0**10, 2.0**11]
        begun, metrics = step(begun, BATCH)  # and it ends
        assert "loss_scale" not in metrics
        assert float(begun.loss_scale.scale) == 1
        _, metrics = half(begun, BATCH)
        assert float(metrics["loss_scale"]) == 2.0**10
