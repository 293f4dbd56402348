"""The work of `zeroxla generate`: it reads a model, and answers prompts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax

from zeroxla.cli.data.chat_template import ChatTemplate
from zeroxla.cli.errors import UsageError
from zeroxla.cli.generate.answer_file import PromptFile, answer_file, check_free
from zeroxla.cli.generate.chat import Chat, first_messages
from zeroxla.cli.generate.drawing import Drawing
from zeroxla.cli.generate.options import GenerateOptions, LayoutOptions
from zeroxla.cli.generate.output import GenerateOutput, InTurn
from zeroxla.cli.generate.settings import AnswerSettings
from zeroxla.cli.generate.source import TextSource
from zeroxla.cli.generate.weights import Weights
from zeroxla.cli.mesh_options import AxesOptions, MeshOptions
from zeroxla.cli.train.setup import mesh_of
from zeroxla.frontend.lora.model import LoraModel
from zeroxla.hybrid.engine import HybridEngine
from zeroxla.offload.array_bytes import shard_bytes
from zeroxla.program.report import format_bytes


def generate(options: GenerateOptions) -> int:
    """Answer prompts, and print the answers or write them into a file.

    Returns:
      The exit status: 0, or 130 if it was interrupted.

    Raises:
      ImportError: a package that the model's files need is not installed.
      RunFolderError: answers could not be written.
      ValueError: an option or an input cannot work. But for damaged weights and numbers that are
        not finite, it is found before anything is compiled.
    """
    given, layout = options.prompts, options.layout
    mesh = _mesh(layout)  # first: it starts JAX, and then it is known which process speaks
    output = GenerateOutput()
    output.mesh(mesh)
    if given.chat and jax.process_count() > 1:
        raise UsageError(
            f"--chat with {jax.process_count()} processes: one process reads what you write; use "
            "--prompt or --file"
        )
    source = TextSource.of(options.source)
    settings = AnswerSettings.of(options.sampling, source)
    if settings.asked:
        output.warn(
            f"the model's generation_config.json has {', '.join(settings.asked)}, which is not "
            "followed here"
        )
    make_template = functools.partial(source.chat_template, given.chat_template, output.say)
    file, template, prompts = None, None, [source.encode(text) for text in given.prompt]
    if given.chat:
        template = make_template()
        template.prompt(first_messages(given.system, "?"))  # or it refuses a system prompt
    if given.file is not None:
        file = PromptFile(
            given.file.expanduser(),
            source=source,
            template=make_template,
            limit=given.max_bad_rows,
            warn=output.warn,
        )
    weights = Weights.of(source, options.weights, mesh)
    # The copy is kept, since nothing changes the state.
    engine = HybridEngine(weights.step, tensor=layout.tensor, release=False)
    settings.check_ends(engine.vocabulary)
    longest = file.longest if file is not None else max(map(len, prompts), default=1)
    settings.room(longest, engine.max_length)
    if given.output is not None:
        check_free(given.output.expanduser())
    with output.status(f"reading the weights in {options.source}"):
        state = weights.read(output.warn)
    output.say(_about(weights, engine, shard_bytes(state.params)))
    output.say(settings.words(source.vocabulary))
    drawing = Drawing(engine=engine, state=state, vocabulary=source.vocabulary, settings=settings)
    try:
        if template is not None:
            _chat(drawing, template, output, given.system)
        elif file is not None and given.output is not None:
            answer_file(drawing, file, given.output.expanduser(), output, given.batch)
        else:
            _continue(drawing, given.prompt, prompts, output)
    except KeyboardInterrupt:
        output.write("\n")
        output.warn(f"interrupted{f'; {given.output} has the answers so far' if file else ''}")
        return 130
    finally:
        output.say(drawing.speed.words())
    return 0


def _mesh(layout: LayoutOptions) -> jax.sharding.Mesh:
    """Return the mesh of the accelerators, or of as many simulated devices as share a copy."""
    mesh = MeshOptions(nodes=layout.nodes, devices_per_node=layout.devices_per_node)
    return mesh_of(mesh, AxesOptions(), devices=layout.tensor, nodes_of_them=1)


def _about(weights: Weights, engine: HybridEngine, num_bytes: int) -> str:
    """Return a sentence about the model."""
    count = f"{engine.plan.num_parameters:,} parameters"
    model, form = weights.model, weights.dtype
    if isinstance(model, LoraModel) and model.frozen is not None and model.plan.has_wires:
        form = model.frozen
    return (
        f"Model: {weights.source.folder}, {count}, stored as {form} ({format_bytes(num_bytes)} on "
        f"a device), computed in {weights.step.config.compute_dtype}, tensor={engine.plan.parts}, "
        f"context {engine.max_length:,}"
    )


def _continue(
    drawing: Drawing, texts: Sequence[str], prompts: Sequence[Sequence[int]], output: GenerateOutput
) -> None:
    """Continue texts together, and show one after another."""
    answers = drawing.answers(prompts, [True] * len(texts))
    shown = InTurn(output, texts)
    for pieces in drawing.draw(prompts, answers):
        for row, text in pieces:
            shown.add(row, text)
        shown.end([row.finished is not None for row in answers.rows])
    output.write("\n")


def _chat(
    drawing: Drawing, template: ChatTemplate, output: GenerateOutput, system: str | None
) -> None:
    """Converse until the input ends."""
    output.say("Ctrl-C ends an answer, Ctrl-D the conversation; /new begins a new one.")
    Chat(drawing=drawing, template=template, output=output, system=system).run()
