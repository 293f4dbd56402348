"""The options of `zeroxla generate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from zeroxla.cli.option_groups import OptionGroups, check_seed, flag

Repeated = tyro.conf.UseAppendAction


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The prompts: texts to continue, a file of them, or a conversation."""

    prompt: Annotated[tuple[str, ...], Repeated] = ()
    """Text to continue. The flag may be repeated; the texts are continued together, and shown one
    after another."""
    file: Path | None = None
    """File of JSON objects, one a line (.jsonl, .json), each with a "prompt" to continue or with
    "messages" to answer; needs --output."""
    chat: bool = False
    """Converse in the terminal, by the model's chat template. Ctrl-C ends an answer, Ctrl-D the
    conversation; a line /new begins a new one."""
    system: str | None = None
    """System prompt of --chat, at the beginning of the conversation."""
    chat_template: Path | None = None
    """File with the chat template in Jinja2, for --chat and for messages. Default: the model's own,
    or a plain one."""
    output: Path | None = None
    """File for the answers to --file, one a line: the row's own keys, "response", "tokens", the
    number of tokens drawn, and "finished", the reason why it ended: eos, stop or length."""
    batch: int = 16
    """Rows of --file that are answered at a time."""
    max_bad_rows: float = 0.0
    """Share of the rows of --file that may be bad. They are named, and left out; more are an
    error."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The choice of tokens. What is not given here follows from the model's generation_config.json,
    if it has one."""

    max_new_tokens: int | None = None
    """Largest number of tokens of an answer. Default: 256; less if the context has no room."""
    temperature: float | None = None
    """Sampling temperature. 0 takes the likeliest token each time. Default: 0.7 without a
    generation_config.json; 0 with one that does not ask for sampling."""
    top_k: int | None = None
    """Number of likeliest tokens to draw from. Default: all, also with 0."""
    top_p: float | None = None
    """Draw from the fewest likeliest tokens that reach this probability. Default: 1, all."""
    seed: int = 0
    """Seed of the tokens that are drawn."""
    eos: Annotated[tuple[int, ...], Repeated] = ()
    """Number of a token that ends an answer. The flag may be repeated. Default: the end tokens that
    the model's configs and its tokenizer name."""
    stop: Annotated[tuple[str, ...], Repeated] = ()
    """Text that ends an answer, and is no part of it. The flag may be repeated."""


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """The weights: how they are stored while they are not used, and what is added to them."""

    weights: Literal["float32", "bfloat16", "float16", "int8", "int4"] | None = None
    """Format in which the weights are stored, split over all devices; int8 and int4 are for dense
    leaves alone. Each copy of the model that computes is in --dtype. Default: --dtype, which
    changes no token; the dense leaves of a run's frozen base as the run stores them."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the computation. Default: the one in the folder's config.json, or the run's own."""
    adapter: Path | None = None
    """Folder of an adapter in PEFT's format, whose base the model is."""
    step: int | None = None
    """Step of the checkpoint of a run. Default: the newest one that is not damaged."""
    island_own: bool = False
    """Take an island's own parameters. Default: those that all islands share, whose loss the run
    reports."""


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """The devices."""

    tensor: int = 1
    """Number of devices of a node that share a copy of the model."""
    nodes: int | None = None
    """Number of nodes. Default: the number of hosts; 1 on simulated devices. More than 1 starts as
    many processes."""
    devices_per_node: int | None = None
    """Number of devices of a node. Default: all of them; as many simulated ones as --tensor."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(OptionGroups):
    """Generate text with a model: a folder in Hugging Face's format, or a run of `zeroxla train` or
    `zeroxla rlhf`. Text goes to the standard output as it is drawn, everything else to the standard
    error."""

    source: Annotated[Path, tyro.conf.Positional]
    """Folder of the model, or of the run."""
    prompts: PromptOptions = field(default_factory=PromptOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    weights: WeightOptions = field(default_factory=WeightOptions)
    layout: LayoutOptions = field(default_factory=LayoutOptions)

    def __post_init__(self) -> None:
        self.check_at_least(
            {
                "prompts.batch": 1,
                "prompts.max_bad_rows": 0,
                "sampling.max_new_tokens": 1,
                "sampling.temperature": 0,
                "sampling.top_k": 0,
                "weights.step": 0,
                "layout.tensor": 1,
                "layout.nodes": 1,
                "layout.devices_per_node": 1,
            }
        )
        check_seed(self.sampling.seed)
        top_p = self.sampling.top_p
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"--top-p {top_p} must be above 0, and 1 at most")
        if self.prompts.max_bad_rows > 1:
            raise ValueError(f"--max-bad-rows {self.prompts.max_bad_rows} is a share: at most 1")
        if "" in self.sampling.stop:
            raise ValueError(
                "--stop with an empty text would end each answer at once; leave it out"
            )
        self._check_ways()

    def _check_ways(self) -> None:
        """Check that there is one way to get prompts, and no option of another one.

        Raises:
          ValueError: there is none, there are several, or an option has no effect.
        """
        given = self.prompts
        ways = {"prompt": bool(given.prompt), "file": given.file is not None, "chat": given.chat}
        chosen = [flag(name) for name, is_given in ways.items() if is_given]
        if len(chosen) != 1:
            found = " and ".join(chosen) if chosen else "no prompt"
            raise ValueError(f"{found}: give one of --prompt TEXT, --file FILE and --chat")
        if given.file is not None and given.output is None:
            raise ValueError(f"--file {given.file}: give --output too, the file for the answers")
        usual = PromptOptions()
        works_with = {
            "file": ("output", "batch", "max_bad_rows"),
            "chat": ("system",),
        }
        for way, names in works_with.items():
            useless = [flag(n) for n in names if getattr(given, n) != getattr(usual, n)]
            if useless and not ways[way]:
                raise ValueError(
                    f"{', '.join(useless)}: without effect beside {chosen[0]}; leave out, or use "
                    f"{flag(way)}"
                )
        if given.chat_template is not None and given.prompt:
            raise ValueError(
                f"--chat-template {given.chat_template}: without effect beside --prompt, whose "
                "texts are continued as they are; leave it out, or use --chat"
            )
