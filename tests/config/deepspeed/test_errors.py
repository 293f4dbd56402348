"""Every bad DeepSpeed configuration gives an error that names the key, the value and the remedy."""

import math

import pytest

from zeroxla.config.deepspeed import read


def zero(**keys):
    return {"zero_optimization": keys}


def fp16(**keys):
    return {"fp16": {"enabled": True, **keys}}


ADAM = {"type": "Adam"}
ERRORS = [
    ({"zero_optimisation": {}}, r"'zero_optimisation' is no key of .* is 'zero_optimization'"),
    ({"train_batchsize": 8}, r"nearest one is 'train_batch_size'"),
    ({"zero_optim": {}}, r"'zero_optim' is no key of .* is 'zero_optimization'"),
    ({"gradient_clip": 1.0}, r"nearest one is 'gradient_clipping'"),
    ({"fp_16": {}}, r"nearest one is 'fp16'"),
    (zero(bucket=5), r"'zero_optimization.bucket' is no key of DeepSpeed's; 'zero_opt.*' takes "),
    (
        zero(stage3_prefetch_buket_size=5),
        r"'zero_optimization.stage3_prefetch_buket_size' is no key of DeepSpeed's; the nearest one "
        r"is 'zero_optimization.stage3_prefetch_bucket_size'",
    ),
    (
        zero(zeropp_loco_param={"err_bata": 1}),
        r"nearest one is 'zero_optimization.zeropp_loco_param.err_beta'",
    ),
    (zero(offload_param={"devise": "cpu"}), r"is 'zero_optimization.offload_param.device'"),
    (fp16(loss_scal=1), r"nearest one is 'fp16.loss_scale'"),
    ({"bf16": {"enable": True}}, r"nearest one is 'bf16.enabled'"),
    (
        {"tensorboard": {"enabled": True, "output": "x"}},
        r"nearest one is 'tensorboard.output_path'",
    ),
    ({"optimizer": {"typ": "Adam"}}, r"nearest one is 'optimizer.type'"),
    (
        {"optimizer": {"type": "Adam", "params": {"weight_deccay": 0}}},
        r"nearest one is 'optimizer.params.weight_decay'",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
        r"nearest one is 'scheduler.params.warmup_(num_steps|type)'",
    ),
    ({"overlap_comm": True}, r"'overlap_comm' stands .* belongs into 'zero_optimization'"),
    (zero(gradient_clipping=1), r"'gradient_clipping' stands in .* belongs at the top level"),
    (zero(stage=4), r"zero_optimization.stage=4 must be 0, 1, 2 or 3"),
    (zero(stage=True), r"zero_optimization.stage=True must be a whole number"),
    (zero(stage=-1), r"zero_optimization.stage=-1 must be a whole number of 0 or more"),
    (zero(stage3_max_live_parameters="1e9x"), r"max_live_parameters='1e9x' must be a whole"),
    (zero(stage3_max_live_parameters="1.5"), r"='1.5' must be a whole number of 0 or more"),
    (zero(stage3_max_live_parameters=1.5), r"=1.5 must be a whole number of 0 or more"),
    (zero(stage3_max_live_parameters=math.inf), r"=inf must be a whole number of 0 or more"),
    (zero(zero_quantized_weights=2), r"zero_quantized_weights=2 must be true or false"),
    (zero(overlap_comm="maybe"), r"zero_optimization.overlap_comm='maybe' must be true or false"),
    (zero(offload_param="cpu"), r"offload_param='cpu' must be an object"),
    (
        zero(
            offload_optimizer={"device": "nvme", "nvme_path": "/a"},
            offload_param={"device": "nvme", "nvme_path": "/b"},
        ),
        r"offload_optimizer.nvme_path='/a', offload_param.nvme_path='/b': a state has one folder",
    ),
    (zero(offload_param={"device": "nvme"}), r"offload_param.device='nvme' has no nvme_path"),
    (zero(offload_param={"device": "gpu"}), r"offload_param.device='gpu' is no device of DeepSp"),
    (
        zero(offload_optimizer={"device": "cpu", "ratio": 2}),
        r"Offload\(ratio=2.0\) must be a share, 0 to 1",
    ),
    (
        zero(offload_optimizer={"device": "none"}, cpu_offload=True),
        r"cpu_offload=true and zero_optimization.offload_optimizer.device='none'; write one",
    ),
    (
        zero(zeropp_loco_param={"err_beta": 1}),
        r"err_beta=1 must be a number of 0 or more and below",
    ),
    (zero(zeropp_loco_param={"reset_T": 0}), r"reset_T=0 must be a whole number of 1 or more"),
    (
        zero(prefetch_bucket_size=1, stage3_prefetch_bucket_size=2),
        r"'prefetch_bucket_size' and 'stage3_prefetch_bucket_size' are two names of one key",
    ),
    ({"bf16": {}, "bfloat16": {}}, r"'bf16' and 'bfloat16' are two names of one key"),
    ({"zero_optimization": 3}, r"zero_optimization=3 must be an object"),
    ({"bf16": True}, r"bf16=True must be an object"),
    ({"bf16": {"enabled": True}, **fp16()}, r"fp16.enabled and bf16.enabled are both true"),
    (fp16(loss_scale=-1), r"fp16.loss_scale=-1 must be a number of 0 or more"),
    (fp16(loss_scale=2.0**25), r"fp16.loss_scale=3.35544e\+07 must be 2\^24 or less"),
    (fp16(loss_scale=1e-9), r"fp16.loss_scale=1e-09 must be a number of 6.10352e-05 or more"),
    (fp16(loss_scale_window=0), r"loss_scale_window=0 must be a whole number of 1 or more"),
    ({"communication_data_type": "fp8"}, r"communication_data_type='fp8'; take one of"),
    ({"gradient_predivide_factor": 0}, r"gradient_predivide_factor=0 must be a number above 0"),
    ({"gradient_allreduce_op": "sum"}, r"gradient_allreduce_op='sum' is refused by DeepSpeed"),
    (
        {"gradient_accumulation_steps": 0},
        r"gradient_accumulation_steps=0 must be a whole number of",
    ),
    ({"gradient_clipping": -1}, r"gradient_clipping=-1 must be a number of 0 or more"),
    (
        {
            "train_batch_size": 30,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
        },
        r"train_batch_size=30 is no multiple of train_micro_batch_size_per_gpu=4 x "
        r"gradient_accumulation_steps=2 = 8",
    ),
    (
        {"train_batch_size": 30, "gradient_accumulation_steps": 4},
        r"train_batch_size=30 is no multiple of gradient_accumulation_steps=4$",
    ),
    ({"optimizer": {"type": "Adem"}}, r"optimizer.type='Adem' .* nearest one is 'Adam'"),
    ({"optimizer": {**ADAM, "params": {"betas": 0.9}}}, r"betas=0.9 must be a list of two numbers"),
    ({"optimizer": {**ADAM, "params": {"betas": [1, 0]}}}, r"two numbers in \[0, 1\)"),
    ({"optimizer": {**ADAM, "params": {"lr": [0.1]}}}, r"lr=\[0.1\] must be a number of 0 or more"),
    ({"optimizer": {**ADAM, "params": {"max_grad_norm": 1}}}, r"write gradient_clipping"),
    ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, r"needs a momentum above 0"),
    ({"scheduler": {"type": "WarmupLr"}}, r"nearest one is 'WarmupLR'"),
    ({"scheduler": {"type": "WarmupDecayLR"}}, r"params.total_num_steps is missing; WarmupDecayLR"),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
        r"total_num_steps is \"auto\", .* auto={'scheduler.params.total_num_steps': NUMBER}",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "liner"}}},
        r"warmup_type='liner'; the nearest known one is 'linear'",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
        r"warmup_num_steps=0 must be a whole number of 1 or more",
    ),
    (3, r"path of a JSON file or a dict, not a int"),
]


@pytest.mark.parametrize(("written", "message"), ERRORS, ids=lambda x: str(x)[:60])
def test_errors(written, message):
    with pytest.raises(ValueError, match=message):
        read(written)


def test_one_message_tells_all_problems():
    written = {
        **zero(stage="three", reduce_buket_size=1, gradient_clipping=1),
        **fp16(loss_scale=2.0**25),
        "train_batchsize": 8,
        "overlap_comm": True,
        "train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adem"},
        "scheduler": {"type": "StepLR"},
        "_comment": "no problem",
    }
    with pytest.raises(ValueError, match=r"^9 problems:\n") as caught:
        read(written)
    lines = str(caught.value).splitlines()[1:]
    expected = [
        "'gradient_clipping' stands in",
        "'overlap_comm' stands at the top",
        "stage='three'",
        "reduce_buket_size",
        "'train_batchsize'",
        "fp16.loss_scale",
        "train_batch_size=3",
        "'Adem'",
        "'StepLR'",
    ]
    assert len(lines) == 9
    assert all(any(text in line for line in lines) for text in expected)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, r"DeepSpeed refuses it together with ZeRO"),
        ({"optimizer": {"type": "ZeroOneAdam"}}, r"DeepSpeed refuses it together with ZeRO"),
        ({"optimizer": {"type": "OneBitLamb"}}, r"DeepSpeed refuses it together with ZeRO"),
        ({"optimizer": {"type": "MuAdam"}}, r"package mup"),
        ({"optimizer": {"type": "RMSprop"}}, r"PyTorch's; pass optax's to make_step"),
        ({"optimizer": {**ADAM, "params": {"amsgrad": True}}}, r"amsgrad=True is not here"),
        ({"scheduler": {"type": "StepLR"}}, r"'StepLR' is PyTorch's; take one of WarmupLR"),
    ],
    ids=lambda x: str(x)[:60],
)
def test_what_is_not_here(written, message):
    with pytest.raises(NotImplementedError, match=message):
        read(written)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "fp16": {,\n}', r"'.*ds.json' is no JSON, at line 2, column 12"),
        ("[1, 2]", r"ds.json' holds a list; a DeepSpeed configuration is an object"),
        ('{"bf16": {}, "bf16": {}}', r"the key 'bf16' is written 2 times in one object"),
    ],
)
def test_files(tmp_path, text, message):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)
    with pytest.raises(ValueError, match=r"there is no DeepSpeed configuration at '.*gone.json'"):
        read(str(tmp_path / "gone.json"))
    with pytest.raises(ValueError, match=r"cannot be read as text"):
        read(tmp_path)
