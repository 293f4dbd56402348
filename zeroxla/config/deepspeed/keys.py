"""The keys of a DeepSpeed configuration, and the reason why some have no effect.

The keys are taken from `deepspeed/runtime/config.py`, `runtime/constants.py`,
`runtime/precision_config.py`, `runtime/zero/config.py` and the configurations they import, of
DeepSpeed 0.19.6.
"""

from __future__ import annotations

from typing import Any

from zeroxla.config.deepspeed.sections import Key

_COMPILED = "the whole step is one compiled program, and XLA orders and buffers what it does"
_UNITS = "gradients are reduced and leaves gathered unit by unit; unit_elements sets the size"
_OFFLOAD = "it tunes DeepSpeed's own offload; here Offload says what lives in host memory"
_SIZE = "blocks of a file and layers of a loop come in sizes of their own; see Offload"
_MICS = "MiCS is not part of this version; hpz_size keeps secondary shards inside a node"
_HOOKS = "nothing is hooked into modules: the fetch plan comes from the trace of the loss"
_MASTER = "the master and the optimizer's state are float32 always"
_MONITOR = "a step returns its metrics; zeroxla train --track says where they are written"
_TIMERS = "use zeroxla train --profile, zeroxla.inspect, or jax.profiler"
_CHECKPOINT = "checkpoints are Orbax's"
_DATA = "the batch is what the caller passes to the step"
_PARALLEL = "the mesh says how devices are split; here they are all data parallel"
_MODEL = "it changes the model, which is used here as it is"


def _flag(reason: str, *same: bool) -> Key:
    return Key(kind="flag", reason=reason, same=same)


def _any(reason: str, *same: Any) -> Key:
    return Key(kind="any", reason=reason, same=same)


def _section(reason: str, names: str = "") -> Key:
    keys = {name: Key(kind="any") for name in names.split()}
    return Key(kind="section", reason=reason, keys=keys or None)


_COUNT = Key(kind="count")
_FLAG = Key(kind="flag")

_PLACE = {
    "device": Key(kind="text"),
    "pin_memory": _FLAG,
    "nvme_path": Key(kind="text"),
    "buffer_size": _any(_SIZE),
}
ZERO: dict[str, Key] = {
    # honoured
    "stage": Key(kind="count"),
    "stage3_max_live_parameters": _COUNT,
    "stage3_max_reuse_distance": _COUNT,
    "stage3_prefetch_bucket_size": _COUNT,
    "stage3_param_persistence_threshold": _COUNT,
    "stage3_model_persistence_threshold": _COUNT,
    "sub_group_size": _COUNT,
    "offload_optimizer": Key(
        kind="section",
        keys={
            **_PLACE,
            "buffer_count": Key(kind="count", least=1),
            "ratio": Key(kind="number"),
            **dict.fromkeys(("pipeline_read", "pipeline_write", "pipeline"), _FLAG),
            **{
                name: _any(_OFFLOAD, False)
                for name in ("fast_init", "super_offload", "cpuadam_cores_perc")
            },
        },
    ),
    "offload_param": Key(
        kind="section",
        keys={**_PLACE, "buffer_count": _any(_SIZE), "max_in_cpu": _any(_SIZE)},
    ),
    "cpu_offload": _FLAG,
    "cpu_offload_param": _FLAG,
    "cpu_offload_params": _FLAG,
    "cpu_offload_use_pin_memory": _FLAG,
    "zero_hpz_partition_size": _COUNT,
    "zero_quantized_weights": _FLAG,
    "zero_quantized_gradients": _FLAG,
    "zeropp_loco_param": Key(
        kind="section",
        keys={
            "err_beta": Key(kind="number", below=1),
            "reset_T": Key(kind="count", least=1),
        },
    ),
    # honoured, by the names of DeepSpeed's own fields
    "max_live_parameters": Key(kind="count", alias="stage3_max_live_parameters"),
    "max_reuse_distance": Key(kind="count", alias="stage3_max_reuse_distance"),
    "prefetch_bucket_size": Key(kind="count", alias="stage3_prefetch_bucket_size"),
    "param_persistence_threshold": Key(kind="count", alias="stage3_param_persistence_threshold"),
    "model_persistence_threshold": Key(kind="count", alias="stage3_model_persistence_threshold"),
    # not honoured
    "allgather_bucket_size": Key(kind="count", reason=_UNITS),
    "allgather_partitions": _flag("leaves are gathered by all-gathers always", True),
    "allgather_sequential": _flag(_UNITS, False),
    "contiguous_gradients": _flag(_COMPILED),
    "elastic_checkpoint": _flag(_CHECKPOINT, False),
    "enable_sanity_checks": _flag(_HOOKS, False),
    "gather_16bit_weights_on_model_save": _flag(
        "zeroxla.full_params(state) assembles the float32 leaves", False
    ),
    "grad_hooks": _flag(_HOOKS),
    "ignore_unused_parameters": _flag("a leaf without use gets a gradient of zeros", True),
    "leaf_module": _section(_HOOKS, "classes names name_suffixes"),
    "legacy_stage1": _flag("it is another implementation of stage 1", False),
    "load_from_fp32_weights": _flag("checkpoints hold the float32 master", True),
    "log_trace_cache_warnings": _flag(_HOOKS, False),
    "memory_efficient_linear": _flag("modules are used as they are"),
    "mics_hierarchical_params_gather": _flag(_MICS, False),
    "mics_shard_size": Key(kind="count", least=-1, reason=_MICS, same=(-1,)),
    "module_granularity_threshold": Key(kind="count", reason=_UNITS, same=(0,)),
    "overlap_comm": _flag("prefetch_bucket says how much is gathered ahead; XLA does the rest"),
    "override_module_apply": _flag(_HOOKS),
    "pipeline_loading_checkpoint": _flag(_CHECKPOINT, False),
    "reduce_bucket_size": Key(kind="count", reason=_UNITS),
    "reduce_scatter": _flag("gradients are reduced and scattered always", True),
    "round_robin_gradients": _flag(_OFFLOAD, False),
    "save_muon_momentum_buffer_in_memory": _flag(_OFFLOAD, True, False),
    "use_all_reduce_for_fetch_params": _flag("leaves are gathered by all-gathers always", False),
    "use_multi_rank_bucket_allreduce": _flag(_UNITS),
    "zenflow": _section(_OFFLOAD),
    "zero_quantized_nontrainable_weights": _flag(
        "not part of this version: frozen leaves are stored in float32; on the wire "
        "zero_quantized_weights quantizes them like all others",
        False,
    ),
}
for _name, _now in (
    ("stage3_allgather_sequential", "allgather_sequential"),
    ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"),
    ("stage3_gather_fp16_weights_on_model_save", "gather_16bit_weights_on_model_save"),
    ("stage3_module_granularity_threshold", "module_granularity_threshold"),
    ("stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params"),
):
    ZERO[_name] = ZERO[_now]

FP16: dict[str, Key] = {
    "enabled": _FLAG,
    "loss_scale": Key(kind="number"),
    "initial_scale_power": _COUNT,
    "loss_scale_window": Key(kind="count", least=1),
    "auto_cast": _flag("floating leaves of the batch are cast to the compute dtype always", True),
    "hysteresis": Key(
        kind="count",
        reason="the loss scale halves at every overflow, as with hysteresis=1",
        same=(1,),
    ),
    "consecutive_hysteresis": _flag("the loss scale halves at every overflow", False),
    "min_loss_scale": Key(
        kind="number", above=0, reason="the loss scale stays between 2^-14 and 2^24"
    ),
    "fp16_master_weights_and_grads": _flag(_MASTER, False),
}
BF16: dict[str, Key] = {
    "enabled": _FLAG,
    "bf16_master_weights_and_grads": _flag(_MASTER, False),
    "bf16_optimizer_states": _flag(_MASTER, False),
    "check_grad_overflow": _flag("a step whose gradient is not finite is skipped always", True),
    "immediate_grad_update": _flag("gradients are summed in float32 after each micro-batch", False),
}
_FLOAT32 = "it is float32 always"
_DTYPES = {
    "grad_accum_dtype": _any(f"gradients are summed in float32: {_FLOAT32}", "fp32", "float32"),
    "param_dtype": _any("bf16 or fp16 sets the dtype that leaves travel and compute in"),
    "buffer_dtype": _any("other collections of the model keep their dtype"),
}
_CLASS = Key(kind="section", keys={"type": Key(kind="text"), "params": Key(kind="section")})

TOP: dict[str, Key] = {
    # honoured
    "bf16": Key(kind="section", keys=BF16),
    "bfloat16": Key(kind="section", keys=BF16, alias="bf16"),
    "communication_data_type": Key(kind="text"),
    "data_types": Key(kind="section", keys=_DTYPES),
    "fp16": Key(kind="section", keys=FP16),
    "gradient_accumulation_steps": Key(kind="count", least=1),
    "gradient_clipping": Key(kind="number"),
    "gradient_allreduce_op": Key(kind="text"),
    "optimizer": Key(
        kind="section",
        keys={
            **(_CLASS.keys or {}),
            "legacy_fusion": _flag(_COMPILED, False),
        },
    ),
    "scheduler": _CLASS,
    "train_batch_size": Key(kind="count", least=1),
    "train_micro_batch_size_per_gpu": Key(kind="count", least=1),
    "zero_optimization": Key(kind="section", keys=ZERO),
    # not honoured
    "activation_checkpointing": _section(
        "activations are saved as the fetch plan and the model's own remat say",
        "partition_activations number_checkpoints contiguous_memory_optimization "
        "synchronize_checkpoint_boundary profile cpu_checkpointing",
    ),
    "aio": _section(
        _SIZE,
        "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds "
        "thread_count",
    ),
    "allgather_size": Key(kind="count", reason=_UNITS),
    "amp": _section("it is Apex; bf16 or fp16 sets the dtype"),
    "autotuning": _section("there is no autotuner"),
    "checkpoint": _section(
        _CHECKPOINT,
        "tag_validation load_universal use_node_local_storage parallel_write "
        "checkpoint_serialization writer",
    ),
    "comet": _section(
        _MONITOR,
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key "
        "online mode",
    ),
    "comms_logger": _section(
        "zeroxla.inspect reads collectives from the program",
        "enabled prof_all prof_ops verbose debug",
    ),
    "compile": _section(_COMPILED),
    "compression_training": _section(_MODEL),
    "csv_monitor": _section(_MONITOR, "enabled output_path job_name"),
    "curriculum_learning": _section(_DATA),
    "data_efficiency": _section(_DATA),
    "data_parallel_size": Key(kind="count", reason=_PARALLEL),
    "dataloader_drop_last": _flag(_DATA, False),
    "datastates_ckpt": _any(_CHECKPOINT, False),
    "disable_allgather": _flag("leaves are gathered by all-gathers always", False),
    "dump_state": _flag("step.describe() is the table of leaves", False),
    "eigenvalue": _section(_MODEL),
    "elasticity": _section("batch sizes are those written"),
    "expert_parallel": _section(_PARALLEL),
    "flops_profiler": _section(
        _TIMERS,
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    ),
    "gradient_predivide_factor": Key(
        kind="number",
        above=0,
        reason="devices' gradients are summed in float32, which does not overflow, so the mean is "
        "the same wherever the division stands",
        same=(1.0,),
    ),
    "graph_harvesting": _flag(_COMPILED, False),
    "hybrid_engine": _section(
        "the hybrid engine is not an option of a training step",
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
        "tp_gather_partition_size enable_cuda_graph",
    ),
    "log_level": _any("Python's logging sets it"),
    "managed_gradient_accumulation": _flag(
        "a call of the step takes all micro-batches and updates once", True
    ),
    "memory_breakdown": _flag("zeroxla.inspect reads memory from the program", False),
    "nebula": _section(_CHECKPOINT),
    "pipeline": _section(_PARALLEL),
    "prescale_gradients": _flag(
        "devices' gradients are summed in float32, which does not overflow, so the mean is the "
        "same wherever the division stands",
        False,
    ),
    "progressive_layer_drop": _section(_MODEL),
    "quantize_training": _section(_MODEL),
    "seq_parallel_communication_data_type": _any(_PARALLEL),
    "sequence_parallel_size": Key(kind="count", reason=_PARALLEL, same=(1,)),
    "sparse_attention": _section(_MODEL),
    "sparse_gradients": _flag("gradients are dense", False),
    "steps_per_print": Key(kind="count", reason=_MONITOR),
    "tensor_parallel": _section(_PARALLEL),
    "tensorboard": _section(_MONITOR, "enabled output_path job_name"),
    "timers": _section(_TIMERS),
    "torch_autocast": _section(
        "bf16 or fp16 sets the dtype", "enabled dtype lower_precision_safe_modules"
    ),
    "use_data_before_expert_parallelism": _flag(_PARALLEL, False),
    "vocabulary_size": Key(kind="count", reason="the model has its own"),
    "wall_clock_breakdown": _flag(_TIMERS, False),
    "wandb": _section(_MONITOR, "enabled group team project"),
    "weight_quantization": _section(_MODEL),
    "zero_allow_untested_optimizer": _flag("any optax transformation is split", True, False),
    "zero_force_ds_cpu_optimizer": _FLAG,
}
