"""From a folder of weights and a file of conversations to an answer: the README's five commands.

The folder holds a byte-level GPT that `zeroxla train` has learned from text with its defaults, as
`make train` does, exported in Hugging Face's format. Its training does not count: it stands for a
model from a hub. The conversations ask for the capitals of 8 countries, in two wordings each.

Each command runs as a user runs it, in a process of its own, without a compilation cache. Their
seconds are summed, and the answers counted that name the right capital.

    python benchmarks/first_answer.py [--run RUN]

RUN is the folder of a finished run of `zeroxla train`; without it one is made first, in about 5
minutes. Exits with 1 if a target is missed; writes results/first_answer.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Check, report, table

CAPITALS = {
    **{"France": "Paris", "Italy": "Rome", "Peru": "Lima", "Japan": "Tokyo"},
    **{"Kenya": "Nairobi", "Norway": "Oslo", "Egypt": "Cairo", "Cuba": "Havana"},
}
QUESTIONS = ("What is the capital of {}?", "Which city is the capital of {}?")
TRAIN = (
    *("--lora-rank", "16", "--lora-base", "int4", "--lora-alpha", "32"),
    *("--learning-rate", "5e-3", "--steps", "200", "--sample-bytes", "0"),
)
MOST_SECONDS, MOST_WRONG = 300, 1


def run(folder: Path, *words: str) -> float:
    """Run `zeroxla` with these words in a folder, show what it prints, and return the seconds."""
    print("$ zeroxla", *words, flush=True)
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "zeroxla", *words], cwd=folder, env=environment, check=True
    )
    return time.perf_counter() - started


def write_conversations(file: Path) -> None:
    """Write each question with its answer, 15 times, in an order that mixes them."""
    rows = []
    for _ in range(15):
        for question in QUESTIONS:
            for country, capital in CAPITALS.items():
                said = (
                    {"role": "user", "content": question.format(country)},
                    {"role": "assistant", "content": f"The capital of {country} is {capital}."},
                )
                rows.append(json.dumps({"messages": said}))
    file.write_text("\n".join(rows) + "\n")


def write_questions(file: Path) -> None:
    """Write one question for each country."""
    said = ([{"role": "user", "content": QUESTIONS[0].format(country)}] for country in CAPITALS)
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in said))


def answers(file: Path) -> dict[str, str]:
    """Return the answer to each question, by country."""
    lines = map(json.loads, file.read_text().splitlines())
    return dict(zip(CAPITALS, (line["response"] for line in lines), strict=True))


def measure(folder: Path, base: Path) -> tuple[dict[str, float], dict[str, str], dict[str, str]]:
    """Run the five commands; return their seconds, and the answers before and after."""
    write_conversations(folder / "chat.jsonl")
    write_questions(folder / "questions.jsonl")
    ask = ("--file", "questions.jsonl", "--temperature", "0", "--max-new-tokens", "40")
    commands: dict[str, tuple[str, ...]] = {
        "generate, before": ("generate", str(base), *ask, "--output", "before.jsonl"),
        "train": ("train", "--init", str(base), "--data", "chat.jsonl", "--run", "chat", *TRAIN),
        "generate, after": ("generate", "chat", *ask, "--output", "after.jsonl"),
        "export --adapter": ("export", "chat", "--adapter", "--output", "adapter"),
        "export": ("export", "chat", "--output", "merged"),
    }
    seconds = {name: run(folder, *words) for name, words in commands.items()}
    return seconds, answers(folder / "before.jsonl"), answers(folder / "after.jsonl")


def _shown(answer: str) -> str:
    return repr(answer if len(answer) < 50 else f"{answer[:40]}...").replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description="From a hub's folder to an answer.")
    parser.add_argument("--run", type=Path, help="a finished run of `zeroxla train`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.run is None:
            run(folder, "train", "--run", "base-run")
        source = "base-run" if args.run is None else str(args.run.absolute())
        run(folder, "export", source, "--output", "base")
        seconds, before, after = measure(folder, Path("base"))
        size = (folder / "base" / "model.safetensors").stat().st_size
    wrong = sum(CAPITALS[name] not in text for name, text in after.items())
    total = sum(seconds.values())
    figures: dict[str, Any] = {
        **{"bytes": size, "seconds": seconds, "total_s": total},
        **{"before": before, "after": after},
    }
    parts = [
        "A byte-level GPT, trained by `zeroxla train` with its defaults and exported in float32 "
        f"({size / 1e6:.1f} MB), is fine-tuned with adapters on a base in 4 bits, on 8 simulated "
        "devices. Each command is a process of its own without a compilation cache.",
        table(("command", "seconds"), [(name, f"{s:.0f}") for name, s in seconds.items()]),
        table(
            ("asked for", "before", "after"),
            [(name, _shown(before[name]), _shown(after[name])) for name in CAPITALS],
        ),
    ]
    checks = [
        Check(name="seconds of the five commands", value=total, limit=MOST_SECONDS),
        Check(name="answers without the right capital, of 8", value=wrong, limit=MOST_WRONG),
    ]
    return report("first_answer", "From a hub to an answer", "\n\n".join(parts), figures, checks)


if __name__ == "__main__":
    sys.exit(main())
