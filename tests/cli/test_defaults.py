"""The defaults of commands are the library's, or their help says why they are others."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

import zeroxla
from zeroxla import Feedback, Offload, ZeroConfig, rlhf
from zeroxla.cli.check.options import CheckOptions
from zeroxla.cli.explain.options import ExplainOptions
from zeroxla.cli.export import ExportOptions
from zeroxla.cli.generate.options import GenerateOptions
from zeroxla.cli.launch.options import LaunchOptions
from zeroxla.cli.option_help import groups_of, help_texts
from zeroxla.cli.plan.options import PlanOptions
from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.zero_options import zero_config
from zeroxla.config.zero_config import PERSISTENT
from zeroxla.planning.explain.make import DEFAULT_DEVICE

COMMANDS = {
    "train": TrainOptions,
    "rlhf": RlhfOptions,
    "plan": PlanOptions,
    "check": CheckOptions,
    "export": ExportOptions,
    "generate": GenerateOptions,
    "explain": ExplainOptions,
    "launch": LaunchOptions,
}


def of(function, name):
    """Return the default of an argument of a function, or of a field of a dataclass."""
    if dataclasses.is_dataclass(function):
        return {field.name: field.default for field in dataclasses.fields(function)}[name]
    return inspect.signature(function).parameters[name].default


# The defaults in the library, by option, or by command and option where commands mean other things.
LIBRARY = {
    "lora_alpha": of(zeroxla.lora, "alpha"),
    "lora_rank_stabilized": of(zeroxla.lora, "rank_stabilized"),
    "lora_dora": of(zeroxla.lora, "dora"),
    "lora_base": of(zeroxla.lora, "frozen") or "float32",
    "reference": of(rlhf.Storage, "frozen"),
    "schedule": of(zeroxla.Pipeline.from_model, "schedule"),
    "partition": of(zeroxla.Pipeline.from_model, "partition"),
    "stash": of(zeroxla.Pipeline.from_model, "stash"),
    "weights": of(zeroxla.make_step, "weights"),
    "dpo_beta": of(rlhf.DpoSettings, "beta"),
    "dpo_label_smoothing": of(rlhf.DpoSettings, "label_smoothing"),
    "dpo_length_normalized": of(rlhf.DpoSettings, "length_normalized"),
    "dpo_tensor": of(rlhf.dpo, "tensor"),
    "algorithm": of(rlhf.Settings, "algorithm"),
    "ratio_clip": of(rlhf.Settings, "clip"),
    "entropy": of(rlhf.Settings, "entropy"),
    "epochs": of(rlhf.Settings, "epochs"),
    "rlhf tensor": of(rlhf.make_loop, "tensor"),
    "generate tensor": of(zeroxla.HybridEngine, "tensor"),
    "generation_tensor": of(zeroxla.HybridEngine, "tensor"),
    "tensor": of(zeroxla.make_mesh, "tensor"),
    "context": of(zeroxla.make_mesh, "context"),
    "expert": of(zeroxla.make_mesh, "expert"),
    "pipe": of(zeroxla.make_mesh, "pipe"),
    "keep": of(zeroxla.Checkpointer, "keep"),
    "plan device": of(zeroxla.plan, "device"),
    "explain device": DEFAULT_DEVICE,
    "link": of(zeroxla.plan, "link"),
    "explain link": of(zeroxla.explain, "link"),
    "plan compile": of(zeroxla.plan, "compiled"),
    "explain compile": of(zeroxla.explain, "compiled"),
    "least_share": of(zeroxla.explain, "least_share"),
    "island_own": of(zeroxla.export_params, "island_own"),
    "max_shard_size": of(zeroxla.export_params, "max_shard_size"),
    "outer_error_feedback": of(zeroxla.Outer, "error_feedback"),
    "round_deadline": of(zeroxla.Coordinator, "deadline"),
    "rewrite": False,  # None and False are one
}
# Options of a command's own work: its data, its model, its loop, its output.
OWN = {
    *("holdout", "batch", "length", "packing", "too_long", "max_bad_rows", "image_size"),
    *("width_multiplier", "model", "layers", "width", "heads", "dropout", "steps", "max_skipped"),
    *("seed", "zero", "outer", "track", "resume", "eval_every", "eval_batches", "log_every"),
    *("save_every", "sample_bytes", "temperature", "pretrain_steps", "reward", "prompt_length"),
    *("new_tokens", "rows", "weight_decay", "clip", "minibatch", "samples", "remat", "nodes"),
    *("devices_per_node", "search", "json", "adapter", "format", "dtype", "chat", "ssh"),
    *("max_restarts", "deadline", "heartbeat", "farewell", "grace"),
}


def defaults():
    """Yield (command, option, default, help) of all options that have a default."""
    for command, kind in COMMANDS.items():
        for group in groups_of(kind).values() or [kind]:
            for field in dataclasses.fields(group):
                if field.default not in (dataclasses.MISSING, None, ()):
                    yield command, field.name, field.default, help_texts(group)[field.name]


def test_every_default_is_the_librarys_or_its_help_says_why():
    unknown, others = [], []
    for command, name, value, text in defaults():
        key = f"{command} {name}" if f"{command} {name}" in LIBRARY else name
        if key not in LIBRARY:
            unknown += [] if name in OWN else [f"{command} --{name} {value}"]
        elif value != LIBRARY[key] and "library's default is" not in text:
            others.append(f"{command} --{name} {value}, the library {LIBRARY[key]}")
    assert others == []
    assert unknown == []  # a new option enters one of the tables above


@pytest.mark.parametrize("command", ["train", "rlhf"])
def test_without_options_the_config_is_the_librarys(command):
    assert zero_config(COMMANDS[command](), {}) == ZeroConfig()


# Where the library decides, the help repeats its default.
TOLD = {
    "quantize_threshold": ZeroConfig().quantize_threshold,
    "persistence_threshold": PERSISTENT,
    "init_loss_scale": ZeroConfig().init_loss_scale,
    "loss_scale_window": ZeroConfig().loss_scale_window,
    "error_feedback_momentum": Feedback().momentum,
    "error_feedback_reset": Feedback().reset_every,
    "offload_update": Offload().update,
    "offload_ratio": Offload().ratio,
    "offload_sub_group": Offload().sub_group,
    "offload_buffers": Offload().buffers,
    "outer_every": of(ZeroConfig.diloco, "every"),
    "outer_delay": ZeroConfig.diloco().outer.delay,
    "outer_mixing": ZeroConfig.diloco().outer.mixing,
    "outer_state": ZeroConfig.diloco().outer.state,
    "outer_fragments": ZeroConfig.diloco().outer.fragments,
}


@pytest.mark.parametrize("command", ["train", "rlhf", "plan"])
def test_the_help_tells_the_librarys_defaults(command):
    for group in groups_of(COMMANDS[command]).values():
        texts = help_texts(group)
        for name, value in TOLD.items():
            if name in texts:
                told = re.search(r"Default: ([\w.]+?)[.;,]", texts[name])[1]
                assert (
                    told in (str(value), f"{value:g}", f"{value}".removesuffix(".0"))
                    if (isinstance(value, float))
                    else told == str(value)
                ), name
