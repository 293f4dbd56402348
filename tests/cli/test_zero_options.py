"""Every option of the library has a flag: on `zeroxla train`, `zeroxla rlhf` and `zeroxla plan`."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tools.quick import thinned
from tools.train import check_no_option

from zeroxla import Feedback, Offload, Rewrite, WireFormat, ZeroConfig
from zeroxla.cli.continued_run import check_resumable
from zeroxla.cli.errors import UsageError
from zeroxla.cli.offload_options import OffloadOptions
from zeroxla.cli.plan.options import PlanOptions
from zeroxla.cli.plan.run import plan_from
from zeroxla.cli.read_options import read_options
from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.train.checks import FREE as TRAIN_FREE
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.wire_text import wire_format
from zeroxla.cli.zero_options import zero_config

COMMANDS = {"train": TrainOptions, "rlhf": RlhfOptions, "plan": PlanOptions}
INT8, INT4 = WireFormat(bits=8, block=256), WireFormat(bits=4, block=128, hadamard=32)
FEEDBACK = ["--error-feedback=int8", "--gradient-wire=int4", "--inter-node-reduce=step"]

# A field of ZeroConfig, flags that set it, and the value that it then has.
FLAGS = {
    "compute_dtype": (["--compute-dtype=float16"], "float16"),
    "gather_dtype": (["--gather-dtype=bfloat16"], "bfloat16"),
    "reduce_dtype": (["--reduce-dtype=bfloat16"], "bfloat16"),
    "weight_wire": (["--weight-wire=int8/256"], INT8),
    "gradient_wire": (["--gradient-wire=int4/128,rotated"], INT4),
    "inter_node_gradient_wire": (["--inter-node-gradient-wire=int8"], INT8),
    "quantize_threshold": (["--quantize-threshold=7"], 7),
    "unquantized": (["--unquantized", "head", "embed"], ("head", "embed")),
    "hpz_size": (["--hpz-size=4"], 4),
    "secondary": (["--secondary=wire", "--weight-wire=int8", "--hpz-size=node"], "wire"),
    "inter_node_gather": (["--inter-node-gather=step", "--hpz-size=node"], "step"),
    "inter_node_reduce": (["--inter-node-reduce=step"], "step"),
    "weight_differences": (
        ["--weight-differences=int8", "--weight-wire=int8", "--hpz-size=node"],
        INT8,
    ),
    "error_feedback": (
        [*FEEDBACK, "--error-feedback-momentum=0.5", "--error-feedback-reset=9"],
        Feedback(format=INT8, momentum=0.5, reset_every=9),
    ),
    "accumulate": (["--accumulate=3"], 3),
    "offload": (["--offload-optimizer=host"], Offload(optimizer="host")),
    "unit_elements": (["--unit-elements=99"], 99),
    "prefetch_bucket": (["--prefetch-bucket=99"], 99),
    "max_live_parameters": (["--max-live-parameters=99"], 99),
    "max_reuse_distance": (["--max-reuse-distance=99"], 99),
    "persistence_threshold": (["--persistence-threshold=99"], 99),
    "model_persistence_cap": (["--model-persistence-cap=99"], 99),
    "frozen": (["--frozen", "wte", "h/.*bias"], ("wte", "h/.*bias")),
    "rewrite": (["--rewrite"], Rewrite()),
    "memory": (["--device-memory=1.5GB"], 1_500_000_000),
    "init_loss_scale": (["--init-loss-scale=8"], 8.0),
    "loss_scale_window": (["--loss-scale-window=8"], 8),
}
WITHOUT_A_FLAG = {
    "micro_batch": "the command makes its batches itself, from --batch and --accumulate",
    "optimizer": "--optimizer and its parameters make one; the test below holds them",
    "remat": "the models of the commands recompute only if --remat asks for it",
    "owners": "False is for comparisons; a program gives it",
    "splits": "names of one model's leaves and arrays; a program gives them",
    "outer": "--outer and the flags beside it make one; test_outer_options.py holds them",
}
OFFLOADS = {
    "optimizer": "host",
    "params": "host",
    "secondary": "host",
    "activations": "host",
    "ratio": 0.5,
    "update": "device",
    "sub_group": 9,
    "buffers": 3,
    "path": "folder",
}
OFFLOADS_WITHOUT_A_FLAG = {"pin": "the library refuses any value but its default"}


def config(command: str, *arguments: str, **usual: object) -> ZeroConfig:
    options = read_options(command, arguments, COMMANDS[command])
    return zero_config(options, usual)


@pytest.mark.smoke
def test_every_field_of_the_config_has_a_flag():
    """A new field of `ZeroConfig` must enter one of the two tables."""
    fields = {field.name for field in dataclasses.fields(ZeroConfig)}
    assert fields == FLAGS.keys() | WITHOUT_A_FLAG.keys()
    assert not FLAGS.keys() & WITHOUT_A_FLAG.keys()
    offloads = {field.name for field in dataclasses.fields(Offload)}
    assert offloads == OFFLOADS.keys() | OFFLOADS_WITHOUT_A_FLAG.keys()


# The commands share the flags: each flag is quick with one command, in turns.
TURNS = [(field, [*COMMANDS][i % len(COMMANDS)]) for i, field in enumerate(FLAGS)]
OTHERS = [(field, x) for field in FLAGS for x in COMMANDS if (field, x) not in TURNS]


@pytest.mark.parametrize(("field", "command"), thinned(TURNS, slow=OTHERS, rows=True))
def test_a_flag_reaches_its_field(field, command):
    arguments, value = FLAGS[field]
    found = config(command, *arguments)
    assert getattr(found, field) == value
    assert getattr(ZeroConfig(), field) != value  # or the flag might do nothing


@pytest.mark.parametrize("name", OFFLOADS)
def test_a_flag_reaches_its_field_of_offload(name):
    found = OffloadOptions(**{f"offload_{name}": OFFLOADS[name]}).changed(Offload(), None)
    assert found == dataclasses.replace(Offload(), **{name: OFFLOADS[name]})


def test_flags_change_the_fields_of_a_preset():
    found = config("train", "--zero=zeropp", "--gradient-wire=none", "--hpz-size=1")
    assert found == ZeroConfig.zeropp(gradient_wire=None, hpz_size=1)


def test_options_may_be_left_to_a_budget():
    budget = ["--device-memory=1GB"]
    found = config("train", *budget, "--accumulate=auto", "--hpz-size=auto")
    assert (found.accumulate, found.hpz_size, found.memory) == ("auto", "auto", 10**9)
    for option in ("--accumulate", "--hpz-size"):
        with pytest.raises(ValueError, match=f"{option} auto: no budget .* --device-memory"):
            config("train", f"{option}=auto")


def test_without_flags_a_preset_is_the_library_s():
    for name in ("zero3", "zeropp", "zeropp_hq", "zeropp_min"):
        assert config("plan", f"--zero={name}") == getattr(ZeroConfig, name)()


class TestDeepspeed:
    @pytest.fixture
    def file(self, tmp_path):
        written = {
            "gradient_accumulation_steps": 4,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
            "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2},
        }
        file = tmp_path / "ds.json"
        file.write_text(json.dumps(written))
        return file

    @pytest.mark.parametrize("command", COMMANDS)
    def test_a_file_says_the_options_and_flags_change_them(self, file, command):
        found = config(
            command, f"--deepspeed={file}", "--accumulate=2", persistence_threshold=10_000
        )
        assert found.optimizer is not None
        assert (found.compute_dtype, found.hpz_size, found.accumulate) == ("bfloat16", 2, 2)
        assert found.persistence_threshold == ZeroConfig().persistence_threshold

    def test_beside_a_preset(self, file, capsys):
        check_no_option(
            ["--deepspeed", file, "--zero", "zeropp"], "with --zero zeropp: each says all", capsys
        )

    def test_an_optimizer_that_is_not_here(self, tmp_path):
        file = tmp_path / "ds.json"
        file.write_text(json.dumps({"optimizer": {"type": "OneBitAdam"}}))
        with pytest.raises(ValueError, match=r"--deepspeed .*ds.json: optimizer.type='OneBitAdam'"):
            config("train", f"--deepspeed={file}")


class TestWireText:
    @pytest.mark.parametrize(
        ("text", "format"),
        [
            ("none", None),
            ("int8", WireFormat()),
            ("int4/64,mse,bfloat16", WireFormat(bits=4, block=64, scale="mse")),
            ("int8,asymmetric,stochastic", WireFormat(symmetric=False, rounding="stochastic")),
            ("int8,deepspeed,float32", WireFormat(scale="deepspeed", scale_dtype="float32")),
            ("int8,bound", WireFormat(scale="bound")),
        ],
    )
    def test_names_a_format(self, text, format):
        assert wire_format("--weight-wire", text) == format

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("int7", "--weight-wire int7: a format is none, or int8 or int4"),
            ("int8/0", "a format is none"),
            ("int8,rotate", "'rotate' is none of .*; did you mean rotated"),
            ("int8,mse,bound", "bound excludes mse"),
            ("int8,mse,stochastic", "--weight-wire int8,mse,stochastic: .*biased"),
        ],
    )
    def test_names_what_is_wrong(self, text, message):
        with pytest.raises(ValueError, match=message):
            wire_format("--weight-wire", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hpz-size", "some"], "--hpz-size some: give node, auto, or a number of devices"),
        (["--error-feedback-reset", "3"], "--error-feedback-reset: without effect"),
        (["--weight-wire", "int9"], "--weight-wire int9: a format is"),
        (["--accumulate", "0"], "--accumulate 0: give auto, or a number, 1 or more"),
        (["--lora-alpha", "3"], "--lora-alpha: without effect, there are no adapters"),
        (["--lora-dora"], "--lora-dora: without effect, there are no adapters"),
        (["--memory", "low", "--schedule", "gpipe"], "--memory low with --schedule gpipe"),
        (["--weights", "tick"], "--weights: without effect on one stage"),
        (["--model", "alexnet", "--lora-rank", "2"], "--lora-rank: without effect on --model al"),
    ],
)
def test_options_that_do_not_go_together(arguments, message, capsys):
    check_no_option(arguments, message, capsys)


def test_a_search_takes_no_single_wires():
    with pytest.raises(UsageError, match="--search with --weights, --weight-wire: "):
        read_options("plan", ["--search", "--weight-wire=int8", "--weights=tick"], PlanOptions)


@pytest.mark.parametrize("kind", COMMANDS.values())
def test_options_survive_the_run_folder(kind):
    arguments = ["--unquantized", "a", "b", "--frozen", "c", "--hpz-size=node", "--optimizer=lion"]
    options = read_options("any", arguments, kind)
    assert kind.from_dict(json.loads(json.dumps(options.to_dict()))) == options


def planned(*arguments: str) -> float:
    """Return the bytes of a device of a plan."""
    usual = ["--length=64", "--devices-per-node=2", "--batch=8"]
    return plan_from(read_options("plan", [*usual, *arguments], PlanOptions)).most_bytes


@pytest.mark.parametrize(
    ("usual", "less"),
    thinned(
        [([], ["--optimizer=sgd"])],
        slow=[
            ([], ["--lora-rank=4", "--lora-base=int4"]),
            (["--pipe=2", "--accumulate=4"], ["--weights=tick"]),
        ],
        rows=True,
    ),
)
def test_a_plan_takes_optimizer_adapters_and_weights(usual, less):
    assert planned(*usual, *less) < planned(*usual)


class TestResume:
    @pytest.mark.parametrize(
        "free",
        [
            *("--zero=zeropp", "--weight-wire=int8", "--error-feedback=int8", "--hpz-size=2"),
            *("--prefetch-bucket=9", "--offload-optimizer=host", "--weights=tick", "--memory=low"),
        ],
    )
    def test_how_the_mesh_works_may_change(self, free):
        check_resumable(TrainOptions(), read_options("train", [free], TrainOptions), TRAIN_FREE)

    @pytest.mark.parametrize(
        "fixed",
        [
            *("--frozen=wte", "--lora-rank=2", "--optimizer=lion", "--beta1=0.5"),
            *("--deepspeed=ds.json", "--compute-dtype=float16", "--init-loss-scale=2"),
        ],
    )
    def test_what_is_computed_may_not(self, fixed):
        given = read_options("train", [fixed], TrainOptions)
        with pytest.raises(ValueError, match=f"another configuration: {fixed.partition('=')[0]} "):
            check_resumable(TrainOptions(), given, TRAIN_FREE)
