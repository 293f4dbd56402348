"""Fine-tune a model of a Hugging Face folder on conversations, with adapters on a base in 4 bits.

    python examples/finetune_lora.py --simulate 8 --model Qwen3-0.6B/ --data chat.jsonl

Each line of the data is {"messages": [{"role": "user", "content": ...}, {"role": "assistant",
"content": ...}]}. The loss counts on what the assistant says. `zeroxla train --init ... --lora-rank
16 --lora-base int4` does the same from the command line, with checkpoints.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import optax

import zeroxla
from zeroxla.data import (
    BadRows,
    RowEncoder,
    RowStream,
    Tokens,
    load_sources,
    measure,
    row_batches,
    template_of,
)
from zeroxla.models import from_hugging_face


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a model on conversations.")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--data", nargs="+", required=True, help="JSONL or Parquet files")
    parser.add_argument("--output", type=Path, default=Path("adapter"), help="folder, for PEFT")
    parser.add_argument("--question", default="", help="asked before and after; the data's first")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--simulate", type=int, default=0, help="devices to simulate on the CPU")
    args = parser.parse_args()

    if args.simulate:
        zeroxla.simulate(args.simulate)
    zeroxla.initialize()  # joins the processes of `zeroxla launch`; a process alone needs nothing
    mesh = zeroxla.make_mesh()

    # The data: rows in the tokens and the chat template of the model's folder.
    config = json.loads((args.model / "config.json").read_text())
    vocabulary, template = Tokens(args.model, config), template_of(args.model)
    bad = BadRows(limit=0.01, report=print)
    encoder = RowEncoder(vocabulary=vocabulary, template=template, length=args.length)
    sources = load_sources(args.data, bad=bad)
    lengths = measure(sources, encoder, bad)
    print(lengths.report(args.length, too_long="cut", packing=False))
    stream = RowStream(sources, encoder, bad, seed=0)
    index, count = zeroxla.process_shard(mesh)
    batches = iter(row_batches(stream, batch=args.batch, shard_index=index, shard_count=count))

    # The model: its weights go from the files to the devices, in 4 bits, and get adapters.
    model = zeroxla.lora(
        from_hugging_face(args.model), targets="kernel", rank=args.rank, frozen="int4"
    )
    schedule = optax.cosine_decay_schedule(args.learning_rate, args.steps)
    step = zeroxla.make_step(model, mesh, optax.adamw(schedule))
    batch = next(batches)
    step.abstract_state(zeroxla.global_batch(batch, mesh))
    state = zeroxla.from_pretrained(model, args.model, step)

    engine = zeroxla.HybridEngine(step)

    def answer(question: str) -> str:
        prompt = vocabulary.encode(template.prompt([{"role": "user", "content": question}]))
        found = engine.generate(
            state,
            [prompt],
            key=jax.random.key(0),
            max_new_tokens=32,
            temperature=0,
            eos=vocabulary.last,
        )
        said = found.rows()[0].tolist()
        return vocabulary.decode([token for token in said if token != vocabulary.last])

    question = args.question or first_question(args.data[0])
    print(f"{question!r} before: {answer(question)!r}")
    for number in range(1, args.steps + 1):
        state, metrics = step(state, zeroxla.global_batch(batch, mesh))
        batch = next(batches)
        if number % 10 == 0 or number == args.steps:
            print(f"step {number}: loss {float(metrics['loss']):.3f}")
    print(f"{question!r} after: {answer(question)!r}")
    batches.close()

    zeroxla.export_adapter(state, args.output, model=model, base=str(args.model))
    print(f"wrote {args.output}, which peft.PeftModel.from_pretrained reads")


def first_question(file: str) -> str:
    """Return the first message of a user in the first conversation of a JSONL file."""
    with open(file.partition("=")[0], encoding="utf-8") as lines:
        messages = json.loads(next(lines))["messages"]
    return next(message["content"] for message in messages if message["role"] == "user")


if __name__ == "__main__":
    main()
