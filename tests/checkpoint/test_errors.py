"""Checkpoints that do not fit or are missing: the error names what differs."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.checkpoints import (
    KEY,
    ROWS,
    batch_of,
    copy_of,
    resum,
    saved,  # noqa: F401
    step_on,
    steps,  # noqa: F401
)
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import Checkpointer

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            optax.sgd(0.1),
            r"another optimizer: its opt_state/0/count is int32\[\], .* it is missing",
        ),
        (optax.adam(0.1, mu_dtype="bfloat16"), r"opt_state/0/mu/.* float32\[.*is bfloat16\["),
    ],
)
def test_another_optimizer_is_refused_by_name(saved, optimizer, message):
    step = step_on((2, 4), optimizer)
    with Checkpointer(saved[2, 4][0]) as checkpointer, pytest.raises(ValueError, match=message):
        checkpointer.restore(step.abstract_state(batch_of(0)))


def test_another_model_is_refused_by_name(saved):
    step = step_on((2, 4))
    wider = {"x": np.zeros((ROWS, 9), np.float32), "y": batch_of(0)["y"]}
    shapes = step.abstract_state(wider)
    message = r"another model: its params/Dense_0/kernel is float32\[7,13\], .* float32\[9,13\]"
    with Checkpointer(saved[2, 4][0]) as checkpointer:
        # The optimizer's copies differ too, and come first; the model is what is wrong.
        with pytest.raises(ValueError, match=message):
            checkpointer.restore(shapes)
        with pytest.raises(ValueError, match=message):
            checkpointer.restore_params(step.init(KEY, wider), "kernel")


def test_a_step_that_has_seen_no_batch(saved):
    checkpointer = Checkpointer(saved[2, 4][0])
    with checkpointer, pytest.raises(ValueError, match="the step has seen no batch"):
        checkpointer.restore(step_on((2, 4)))


def test_an_empty_folder_and_a_number_that_is_not_there(steps, saved, tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest() is None
        with pytest.raises(ValueError, match="holds no complete checkpoint"):
            checkpointer.restore(steps[2, 4])
    checkpointer = Checkpointer(saved[2, 4][0])
    with (
        checkpointer,
        pytest.raises(ValueError, match=r"no complete checkpoint of step 4 \(there: 3\)"),
    ):
        checkpointer.restore(steps[2, 4], 4)


def test_a_newer_format(steps, saved, tmp_path):
    folder = copy_of(saved[2, 4][0], tmp_path)
    about = folder / "3" / "state" / "about.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "format": 99}))
    resum(folder / "3" / "state")
    checkpointer = Checkpointer(folder)
    with (
        checkpointer,
        pytest.raises(ValueError, match=r"is of format 99, .* install a newer zeroxla"),
    ):
        checkpointer.restore(steps[2, 4])


def test_an_older_format_may_hold_no_wires(steps, saved, tmp_path):
    """Format 1 is read where its arrays mean the same as today, and refused where they do not."""
    folder = copy_of(saved[2, 4][0], tmp_path)
    about = folder / "3" / "state" / "about.json"
    values = {**json.loads(about.read_text()), "format": 1}
    about.write_text(json.dumps(values))
    resum(folder / "3" / "state")
    with Checkpointer(folder) as checkpointer:
        checkpointer.restore(steps[2, 4])
    path, shape, _ = values["leaves"][0]
    values["leaves"][0] = [path, shape, "uint8"]
    about.write_text(json.dumps(values))
    resum(folder / "3" / "state")
    with (
        Checkpointer(folder) as checkpointer,
        pytest.raises(
            ValueError,
            match=r"is of format 1 and holds arrays of uint8 \(1\), .*/.* whose layout has changed",
        ),
    ):
        checkpointer.restore(steps[2, 4])


@pytest.mark.parametrize("options", [{"keep": 0}, {"every": 0}])
def test_numbers_below_one(tmp_path, options):
    with pytest.raises(ValueError, match="give 1 or more"):
        Checkpointer(tmp_path, **options)


def test_names_that_a_checkpoint_cannot_tell_apart(tmp_path):
    def init(key, batch):
        return {"a": {"b": jnp.ones(4)}, "a.b": jnp.ones(4)}

    def loss(params, batch, key):
        return (params["a"]["b"] * params["a.b"] * batch["x"]).sum()

    step = zeroxla.make_step((init, loss), zeroxla.make_mesh(nodes=2), optax.sgd(0.1))
    state = step.init(KEY, {"x": np.ones((8, 4))})
    checkpointer = Checkpointer(tmp_path)
    with (
        checkpointer,
        pytest.raises(ValueError, match=r"params/a/b and params/a\.b have the same name"),
    ):
        checkpointer.save(1, state)
