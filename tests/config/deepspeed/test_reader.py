"""DeepSpeed's configuration: every key does what it says, or is listed with a reason."""

import dataclasses
import json
import re
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import Feedback, Offload, WireFormat, ZeroConfig
from zeroxla.config.deepspeed import optimizers, read, schedules
from zeroxla.config.deepspeed.keys import TOP
from zeroxla.config.deepspeed.sections import AUTO
from zeroxla.models import MLP
from zeroxla.wire.error_feedback import quantize_with_error

pytestmark = pytest.mark.usefixtures("quick_compilation")


def zero(**keys):
    return {"zero_optimization": keys}


def fp16(**keys):
    return {"fp16": {"enabled": True, **keys}}


def options(config):
    """The options that differ from their defaults."""
    default = ZeroConfig()
    fields = {name: getattr(config, name) for name in ZeroConfig.__dataclass_fields__}
    return {name: x for name, x in fields.items() if x != getattr(default, name)}


# keys that are honoured

INT8, INT4 = WireFormat(bits=8), WireFormat(bits=4)
HONOURED = [
    (zero(stage=3), {}),
    (zero(stage3_max_live_parameters=1e9), {"max_live_parameters": 10**9}),
    (zero(stage3_max_reuse_distance=7), {"max_reuse_distance": 7}),
    (zero(stage3_prefetch_bucket_size=5e7), {"prefetch_bucket": 50_000_000}),
    (zero(stage3_param_persistence_threshold=0), {"persistence_threshold": 0}),
    (zero(stage3_model_persistence_threshold=9), {"model_persistence_cap": 9}),
    (zero(max_live_parameters=3), {"max_live_parameters": 3}),
    (zero(max_reuse_distance=3), {"max_reuse_distance": 3}),
    (zero(prefetch_bucket_size=3), {"prefetch_bucket": 3}),
    (zero(param_persistence_threshold=3), {"persistence_threshold": 3}),
    (zero(model_persistence_threshold=3), {"model_persistence_cap": 3}),
    (zero(zero_hpz_partition_size=8), {"hpz_size": 8}),
    (zero(zero_hpz_partition_size=0), {}),
    (zero(zero_quantized_weights=True), {"weight_wire": INT8}),
    (zero(zero_quantized_weights=False, zero_quantized_gradients=False), {}),
    (zero(zero_quantized_gradients=True), {"gradient_wire": INT4}),
    (
        zero(zero_quantized_gradients=True, zeropp_loco_param={"err_beta": 0.5, "reset_T": 64}),
        {
            "gradient_wire": INT4,
            "error_feedback": Feedback(momentum=0.5, reset_every=64),
            "inter_node_reduce": "step",
        },
    ),
    (
        zero(zero_quantized_gradients=True, zeropp_loco_param={}),
        {
            "gradient_wire": INT4,
            "error_feedback": Feedback(momentum=0.8, reset_every=1024),
            "inter_node_reduce": "step",
        },
    ),
    ({"bf16": {"enabled": True}}, {"compute_dtype": "bfloat16"}),
    ({"bfloat16": {"enabled": True}}, {"compute_dtype": "bfloat16"}),
    ({"bf16": {"enabled": False}, **fp16()}, {"compute_dtype": "float16"}),
    (fp16(loss_scale=0), {"compute_dtype": "float16"}),
    (fp16(initial_scale_power=12), {"compute_dtype": "float16", "init_loss_scale": 4096.0}),
    (fp16(loss_scale_window=50), {"compute_dtype": "float16", "loss_scale_window": 50}),
    ({"fp16": {"enabled": False, "loss_scale_window": 50, "hysteresis": 2}}, {}),
    ({"communication_data_type": "fp32"}, {"reduce_dtype": "float32"}),
    ({"communication_data_type": "fp16"}, {"reduce_dtype": "float16"}),
    ({"communication_data_type": "bf16"}, {"reduce_dtype": "bfloat16"}),
    ({"communication_data_type": None}, {}),
    ({"gradient_accumulation_steps": 4}, {"accumulate": 4}),
    ({"train_micro_batch_size_per_gpu": 2}, {"micro_batch": 2}),
    (
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
        },
        {"micro_batch": 2, "accumulate": 4},
    ),
    ({"gradient_clipping": 0}, {}),
    ({"gradient_allreduce_op": "mean"}, {}),
    ({"optimizer": {}, "scheduler": {}}, {}),
]


@pytest.mark.parametrize(
    ("written", "expected"), HONOURED, ids=lambda x: json.dumps(x, default=str)
)
def test_honoured(written, expected):
    settings = read(written)
    assert options(ZeroConfig(**settings.options)) == expected
    assert settings.ignored == {}


AUTO_OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps"), "auto")}
DECAY = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
# In the ways of axolotl, LLaMA-Factory, accelerate, InternVL, and of bases that people write.
AS_PEOPLE_WRITE_THEM = {
    "offload of all, groups of 0": (
        {
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            **zero(
                stage=3,
                offload_optimizer={"device": "cpu", "pin_memory": True},
                offload_param={"device": "cpu", "pin_memory": True},
                sub_group_size=0,
                reduce_bucket_size="auto",
                max_live_parameters=0,
            ),
            "bf16": {"enabled": True},
            "train_batch_size": "auto",
        },
        {"offload": Offload(optimizer="host", params="host", sub_group=1)},
        (),
    ),
    "unknown keys at the top": (
        {
            **zero(stage=3),
            "comms_config": {"verbose": False},
            "monitor_config": {"enabled": True, "tag": "run"},
            "log": True,
            "cuda_visible_devices": "0,1",
            "max_grad_norm": 1.0,
        },
        {},
        ("comms_config", "monitor_config", "log", "cuda_visible_devices", "max_grad_norm"),
    ),
    "comments": (
        {"_comment": "two hosts", "//": "x", "comment_2": "y", **zero(stage=3, _note="z")},
        {},
        ("_comment", "//", "comment_2", "zero_optimization._note"),
    ),
    "strings for values": (
        {
            **zero(stage="3", overlap_comm="true", stage3_prefetch_bucket_size="5e7"),
            "bf16": {"enabled": "True"},
            "fp16": {"enabled": 0},
            "train_micro_batch_size_per_gpu": "4",
            "gradient_accumulation_steps": "2",
        },
        {"prefetch_bucket": 50_000_000, "compute_dtype": "bfloat16", "micro_batch": 4}
        | {"accumulate": 2},
        ("zero_optimization.overlap_comm",),
    ),
}


@pytest.mark.parametrize("name", AS_PEOPLE_WRITE_THEM)
def test_files_as_people_write_them_load(name):
    written, expected, told = AS_PEOPLE_WRITE_THEM[name]
    settings = read(written)
    found = options(ZeroConfig(**settings.options))
    assert expected.items() <= found.items()
    assert set(told) <= set(settings.ignored)


def test_a_key_of_a_program_around_deepspeed_is_told_with_deepspeeds():
    assert (
        "gradient_clipping is the key for it" in read({"max_grad_norm": 1}).ignored["max_grad_norm"]
    )


def rates(settings, count):
    """The rates of the first updates, from updates of SGD without momentum."""
    optimizer = settings.options["optimizer"]
    params = {"w": np.ones(2, np.float32)}
    state, found = optimizer.init(params), []
    for _ in range(count):
        updates, state = optimizer.update(params, state, params)
        found.append(-float(updates["w"][0]))
    return found


def test_auto_takes_the_values_that_are_given():
    """The file that the documentation of Transformers shows: each value is "auto"."""
    auto = {
        "optimizer.params.lr": 2e-5,
        "scheduler.params.total_num_steps": 10,
        "scheduler.params.warmup_num_steps": 2,
        "scheduler.params.warmup_max_lr": 2e-5,
    }
    scheduler = {"type": "WarmupDecayLR", "params": dict.fromkeys(DECAY, "auto")}
    settings = read({"optimizer": AUTO_OPTIMIZER, "scheduler": scheduler}, auto=auto)
    assert "scheduler.params.total_num_steps" not in settings.ignored
    assert settings.ignored["optimizer.params.betas"] == AUTO
    sgd = {"type": "SGD", "params": {"lr": "auto"}}
    found = rates(read({"optimizer": sgd, "scheduler": scheduler}, auto=auto), 11)
    expected = [2e-5 * (10 - i) / 8 for i in range(2, 10)]
    assert found[3:] == pytest.approx(expected, rel=1e-5)


def test_a_warmup_to_auto_ends_at_the_optimizers_rate():
    scheduler = {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": "auto", "warmup_num_steps": 2, "total_num_steps": 9},
    }
    sgd = {"type": "SGD", "params": {"lr": 0.25}}
    settings = read({"optimizer": sgd, "scheduler": scheduler})
    assert max(rates(settings, 8)) == pytest.approx(0.25)


def test_a_file_may_have_a_byte_order_mark_comments_and_last_commas(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + b"""{ // a comment, "with": "a string"
  "gradient_accumulation_steps": 4, # another
  /* one of
     two lines */
  "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a//b,}"},},
}"""
    )
    found = read(path).options
    assert found["accumulate"] == 4
    assert found["offload"].path == "/a//b,}"


def test_nothing_written_is_the_default():
    """DeepSpeed's own defaults are not taken over: they would keep a small model whole."""
    assert ZeroConfig(**read({}).options) == ZeroConfig()


def test_err_beta_is_the_share_of_the_old_error_that_is_kept():
    """swizzled_quantize.cu: err = err_beta x err + (1 - err_beta) x (sum - dequantized)."""
    loco = {"err_beta": 0.75, "reset_T": 8}
    config = ZeroConfig(**read(zero(zero_quantized_gradients=True, zeropp_loco_param=loco)).options)
    gradient = np.linspace(-1, 1, 512, dtype=np.float32)[None]
    feedback, sent_as = config.error_feedback, config.gradient_wire
    old = zeroxla.quantize.quantize(0.01 * gradient[:, ::-1], feedback.format, lead=1).buffer
    quantize = jax.jit(lambda x, error: quantize_with_error(feedback, x, error, sent_as, None))
    wire, new = quantize(gradient, old)

    def value(buffer, format):
        wire = zeroxla.quantize.Wire(buffer, 512, format)
        return np.asarray(zeroxla.quantize.dequantize(wire, (512,)))

    err = value(old, feedback.format)
    lost = gradient + err - value(wire.buffer, sent_as)
    np.testing.assert_allclose(
        value(new, feedback.format), 0.75 * err + 0.25 * lost, atol=np.abs(lost).max() / 200
    )


# keys that are listed

LISTED = [
    ({"optimizer": {"params": {"lr": 1}}}, "optimizer.params", "type is not written"),
    ({"scheduler": {"params": {"x": 1}}}, "scheduler.params", "type is not written"),
    (zero(stage=2), "zero_optimization.stage", "stage 2 runs as stage 3"),
    (zero(stage=0), "zero_optimization.stage", "stage 0 runs as stage 3"),
    ({"zero_optimization": True}, "zero_optimization.stage", "stage 1 runs as stage 3"),
    (zero(overlap_comm=True), "zero_optimization.overlap_comm", "prefetch_bucket says"),
    (zero(overlap_comm=False), "zero_optimization.overlap_comm", "prefetch_bucket says"),
    (zero(contiguous_gradients=True), "zero_optimization.contiguous_gradients", "one compiled"),
    (zero(round_robin_gradients=True), "zero_optimization.round_robin_gradients", "Offload says"),
    (zero(reduce_scatter=False), "zero_optimization.reduce_scatter", "reduced and scattered"),
    (zero(reduce_bucket_size=5e8), "zero_optimization.reduce_bucket_size", "unit by unit"),
    (zero(allgather_bucket_size=5e8), "zero_optimization.allgather_bucket_size", "unit by unit"),
    (zero(sub_group_size=1e9), "zero_optimization.sub_group_size", "only what is offloaded"),
    (
        zero(offload_param={"device": "cpu", "max_in_cpu": 1e9}),
        "zero_optimization.offload_param.max_in_cpu",
        "sizes of their own",
    ),
    (
        zero(offload_optimizer={"device": "cpu", "nvme_path": "/nvme"}),
        "zero_optimization.offload_optimizer.nvme_path",
        "only the device nvme",
    ),
    (
        zero(
            offload_optimizer={"device": "cpu", "pin_memory": True},
            offload_param={"device": "cpu", "pin_memory": False},
        ),
        "zero_optimization.offload_param.pin_memory",
        "is always pinned",
    ),
    (
        zero(offload_optimizer={"device": "cpu", "ratio": 0.3}, offload_param={"device": "cpu"}),
        "zero_optimization.offload_optimizer.ratio",
        "it holds for the parameters",
    ),
    (
        zero(offload_optimizer={"device": "cpu", "fast_init": True}),
        "zero_optimization.offload_optimizer.fast_init",
        "Offload says",
    ),
    (
        zero(stage3_gather_fp16_weights_on_model_save=True),
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "full_params",
    ),
    (
        zero(zero_quantized_nontrainable_weights=True),
        "zero_optimization.zero_quantized_nontrainable_weights",
        "not part of this version",
    ),
    (zero(mics_shard_size=8), "zero_optimization.mics_shard_size", "MiCS is not part"),
    (
        zero(zeropp_loco_param={"err_beta": 0.8}),
        "zero_optimization.zeropp_loco_param",
        "zero_quantized_gradients is not set",
    ),
    (zero(stage="auto"), "zero_optimization.stage", "counts as not written"),
    ({"fp16": {"enabled": "auto"}}, "fp16.enabled", "counts as not written"),
    (fp16(loss_scale=128), "fp16.loss_scale", "stays 128 until a gradient overflows"),
    (fp16(hysteresis=2), "fp16.hysteresis", "hysteresis=1"),
    (fp16(consecutive_hysteresis=True), "fp16.consecutive_hysteresis", "at every overflow"),
    (fp16(min_loss_scale=1), "fp16.min_loss_scale", "between 2^-14 and 2^24"),
    (fp16(initial_scale_power=32), "fp16.initial_scale_power", "begins at 2^24"),
    (fp16(auto_cast=False), "fp16.auto_cast", "cast to the compute dtype"),
    (
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
        "bf16.check_grad_overflow",
        "skipped always",
    ),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype", "float32"),
    ({"prescale_gradients": True}, "prescale_gradients", "summed in float32"),
    ({"gradient_predivide_factor": 8}, "gradient_predivide_factor", "summed in float32"),
    ({"train_batch_size": 64}, "train_batch_size", "number of devices"),
    ({"steps_per_print": 10}, "steps_per_print", "returns its metrics"),
    ({"wall_clock_breakdown": True}, "wall_clock_breakdown", "jax.profiler"),
    (
        {"activation_checkpointing": {"partition_activations": True}},
        "activation_checkpointing",
        "fetch plan",
    ),
    ({"tensorboard": {"enabled": True}}, "tensorboard", "returns its metrics"),
    ({"wandb": {"enabled": True, "project": "p"}}, "wandb", "returns its metrics"),
    ({"flops_profiler": {"enabled": True}}, "flops_profiler", "jax.profiler"),
    ({"aio": {"block_size": 1048576}}, "aio", "sizes of their own"),
    ({"amp": {"enabled": True, "opt_level": "O1"}}, "amp", "Apex"),
    ({"checkpoint": {"tag_validation": "Warn"}}, "checkpoint", "Orbax"),
    ({"compression_training": {"weight_quantization": {}}}, "compression_training", "model"),
    (
        {"curriculum_learning": {"enabled": True}},
        "curriculum_learning",
        "what the caller passes",
    ),
    ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention", "changes the model"),
    (
        {"optimizer": {"type": "Adam", "params": {"fused": True}}},
        "optimizer.params.fused",
        "PyTorch",
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
        "optimizer.params.lr",
        "counts as not written",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 5}}},
        "scheduler.params.last_batch_iteration",
        "the state counts",
    ),
    (
        {
            "optimizer": {"type": "SGD"},
            "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}},
        },
        "scheduler.params.cycle_momentum",
        "no betas",
    ),
]


@pytest.mark.parametrize(("written", "key", "reason"), LISTED, ids=lambda x: str(x)[:60])
def test_listed(written, key, reason):
    ignored = read(written).ignored
    assert list(ignored) == [key]
    assert reason in ignored[key]


OFFLOADS = [
    ({"offload_optimizer": {"device": "cpu"}}, Offload(optimizer="host")),
    ({"cpu_offload": True}, Offload(optimizer="host")),
    (
        {"offload_param": {"device": "cpu", "pin_memory": True}, "sub_group_size": 1e8},
        Offload(params="host", sub_group=100_000_000),
    ),
    (
        {
            "offload_optimizer": {
                "device": "cpu",
                "ratio": 0.3,
                "buffer_count": 4,
                "pin_memory": True,
            },
        },
        Offload(optimizer="host", ratio=0.3, buffers=4),
    ),
    ({"cpu_offload_params": True, "cpu_offload": True}, Offload(optimizer="host", params="host")),
    ({"offload_optimizer": {"device": "none", "ratio": 0.5}}, Offload()),
    (
        {
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": "/nvme",
                "buffer_count": 3,
                "pipeline_read": True,
                "pipeline_write": False,
            }
        },
        Offload(optimizer="disk", path="/nvme", buffers=3),
    ),
    (
        {"offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
        Offload(params="disk", path="/nvme"),
    ),
    (
        {
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
            "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
        },
        Offload(optimizer="disk", params="disk", path="/nvme"),
    ),
]


@pytest.mark.parametrize(("written", "want"), OFFLOADS)
def test_offload_is_read(written, want):
    found = read(zero(**written))
    assert ZeroConfig(**found.options).offload == want
    assert not found.ignored


@pytest.mark.parametrize("forced", [True, False])
def test_the_host_updates_where_it_is_forced_to(forced):
    found = read(
        {**zero(offload_optimizer={"device": "cpu"}), "zero_force_ds_cpu_optimizer": forced}
    )
    update = "host" if forced else "device"
    assert ZeroConfig(**found.options).offload == Offload(optimizer="host", update=update)
    assert not found.ignored


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
        {
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
        },
    ],
)
def test_where_it_cannot_that_is_listed(sections):
    found = read({**zero(**sections), "zero_force_ds_cpu_optimizer": True})
    assert ZeroConfig(**found.options).offload.update == "device"
    assert "no parameters on nvme" in found.ignored["zero_force_ds_cpu_optimizer"]


SILENT = [
    zero(offload_param={"device": "none"}, cpu_offload=False, round_robin_gradients=False),
    zero(reduce_scatter=True, allgather_partitions=True, mics_shard_size=-1),
    zero(stage3_gather_16bit_weights_on_model_save=False, ignore_unused_parameters=True),
    {"prescale_gradients": False, "gradient_predivide_factor": 1.0, "sparse_gradients": False},
    {"wall_clock_breakdown": False, "dump_state": False, "tensorboard": {"enabled": False}},
    {"flops_profiler": {"enabled": False, "profile_step": 1}, "amp": {"enabled": False}},
    {"steps_per_print": None, "aio": {}, "zero_allow_untested_optimizer": True},
    {"data_types": {"grad_accum_dtype": "fp32"}, "fp16": {"enabled": False, "hysteresis": 2}},
    {"optimizer": {"type": "Adam", "params": {"capturable": False}}},
]


@pytest.mark.parametrize("written", SILENT, ids=str)
def test_what_asks_for_nothing_is_not_listed(written):
    assert read(written).ignored == {}


def test_every_reason_says_something():
    for name, key in TOP.items():
        for inner in (key, *(key.keys or {}).values()):
            assert inner.reason is None or len(inner.reason) > 15, name


def test_one_warning_lists_what_is_ignored():
    written = zero(
        stage=3, overlap_comm=True, sub_group_size=1e9, stage3_max_live_parameters="auto"
    )
    with pytest.warns(UserWarning, match="have no effect, or another one") as caught:
        config = ZeroConfig.from_deepspeed(written)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    text = str(caught[0].message)
    for key in ("overlap_comm", "sub_group_size", "stage3_max_live_parameters"):
        assert f"  zero_optimization.{key}: " in text
    assert text.count("\n") == 3
    assert AUTO in text
    assert config == ZeroConfig()
    several = zero(stage3_max_live_parameters="auto", stage3_prefetch_bucket_size="auto")
    assert read(several).warning().count(AUTO) == 1


def test_no_warning_where_nothing_is_ignored():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ZeroConfig.from_deepspeed(zero(zero_hpz_partition_size=4)).hpz_size == 4
    assert read({}).warning() == ""


def test_the_source_is_left_alone():
    written = {"zero_optimization": True, "fp16": {"enabled": True}}
    read(written)
    assert written == {"zero_optimization": True, "fp16": {"enabled": True}}


# whole configurations, on devices

HUGGING_FACE = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 64,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 1,
    "wall_clock_breakdown": False,
}
TUTORIAL = {  # of ZeRO++, with LoCo
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 10000000,
        "reduce_scatter": True,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 4,
        "zero_quantized_gradients": True,
        "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
        "contiguous_gradients": True,
        "overlap_comm": True,
        "stage3_param_persistence_threshold": 0,
    },
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Lamb", "params": {"lr": 0.01}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 10},
}


def images(rows):
    random = np.random.default_rng(2)
    return {
        "image": random.normal(size=(rows, 8, 8, 1)).astype(np.float32),
        "label": random.integers(0, 10, rows).astype(np.int32),
    }


@pytest.mark.parametrize(
    ("written", "ignored"),
    [
        (
            HUGGING_FACE,
            [
                "fp16.enabled",
                "optimizer.params.weight_decay",
                "steps_per_print",
                "train_batch_size",
                "zero_optimization.contiguous_gradients",
                "zero_optimization.overlap_comm",
                "zero_optimization.reduce_bucket_size",
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "zero_optimization.stage3_prefetch_bucket_size",
            ],
        ),
        pytest.param(
            TUTORIAL,
            [
                "zero_optimization.contiguous_gradients",
                "zero_optimization.overlap_comm",
                "zero_optimization.reduce_bucket_size",
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["hugging_face", "tutorial"],
)
def test_whole_configurations_train(tmp_path, mesh24, written, ignored):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(written))
    assert sorted(read(path).ignored) == ignored
    with pytest.warns(UserWarning, match=r"zero_optimization.overlap_comm"):
        config = ZeroConfig.from_deepspeed(path)
    # All leaves split and those of any size quantized, where the file quantizes.
    config = dataclasses.replace(config, persistence_threshold=0, quantize_threshold=0)
    step = zeroxla.make_step(MLP.tiny(), mesh24, config=config)
    batch = images(16)
    state = step.init(jax.random.key(0), batch)
    losses = []
    for _ in range(4):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert int(metrics["skipped"]) == 0
    assert 0 < float(metrics["learning_rate"]) <= 1e-2
    if written is TUTORIAL:
        assert float(metrics["loss_scale"]) == 1024
    else:
        assert config.accumulate == 2


# the page


def test_the_page_has_every_key():
    page = (Path(__file__).parents[3] / "docs" / "deepspeed.md").read_text()
    named = {part for name in re.findall(r"`([\w.]+)", page) for part in name.split(".")}
    sections = ("zero_optimization", "fp16", "bf16", "data_types")
    known = {*TOP} | {inner for name in sections for inner in TOP[name].keys or ()}
    assert known - named == set()
    types = {*optimizers.KEYS, *schedules.KEYS}
    params = {name for keys in optimizers.KEYS.values() for name in keys}
    assert (types | params) - named == set()
