"""DeepSpeed's rows: one in a process, because it counts its parameters and groups for all of it."""

from __future__ import annotations

import os
from typing import Any

# Read when DeepSpeed is imported. LOCAL_SIZE is how many accelerators it finds on a CPU host.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]

import deepspeed
from peers import quantizer_stand_in, task
from peers.model import GPT
from peers.torch_rows import StepFunction, adamw
from torch import Tensor

# A leaf is let go after its use and gathered again in backward, as in a model that is too large to
# stay: the defaults would keep this one whole. Sizes are in elements. What is fetched ahead is
# 0.9 WIDTH^2, as with Hugging Face's "auto": the next layer. It needs room: with none for live
# parameters DeepSpeed fetches nothing ahead, with room for a block it keeps the last for backward.
# Gradients are reduced block by block.
ZERO3 = {
    "stage": 3,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 1_000_000,
    "stage3_prefetch_bucket_size": int(0.9 * task.WIDTH**2),
    "reduce_bucket_size": 13 * task.WIDTH**2,
}
HPZ = {"zero_hpz_partition_size": task.RANKS_PER_HOST}
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "zero3": ZERO3,
    "zero3_hpz": ZERO3 | HPZ,
    "zeropp": ZERO3 | HPZ | QUANTIZED,
}


def make_step(row: str) -> StepFunction:
    """Return the step function of a row: "zero3", "zero3_hpz" or "zeropp"."""
    quantizer_stand_in.install()
    # Else it compiles an operation for inference when it starts.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = GPT()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": task.SEQUENCES,
            "gradient_clipping": 0.0,  # it clips at 1 unless told
            "zero_optimization": OPTIONS[row],
        },
        dist_init_required=False,
    )

    def step(tokens_BL: Tensor) -> float:
        loss = engine(tokens_BL)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step
