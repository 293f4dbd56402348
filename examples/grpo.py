"""Teach a model to add two digits by GRPO: a program checks each answer, and that is the reward.

    python examples/grpo.py --simulate 8

First a small model learns what the task looks like from text in which half of the answers are
wrong. Then GRPO draws answers from it, checks them, and trains on what was right: the share of
right answers rises, and nobody shows it one.
"""

from __future__ import annotations

import argparse
import re

import jax
import numpy as np
import optax

import zeroxla
from zeroxla import rlhf
from zeroxla.models import GPT

PROMPT, ANSWER = 4, 3  # "3+9=" and "12\n", in bytes


def sums(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return pairs of digits, int[count, 2]."""
    return rng.integers(0, 10, (count, 2))


def prompts_of(pairs: np.ndarray) -> np.ndarray:
    """Return the tokens of "a+b=" for each pair, int[count, 4]."""
    return np.array([list(f"{a}+{b}=".encode()) for a, b in pairs])


def lines_of(rng: np.random.Generator, count: int, share_right: float) -> np.ndarray:
    """Return lines such as "3+9=12", of which only a share is right, int[count, 7]."""
    rows = []
    for a, b in sums(rng, count):
        answer = a + b if rng.random() < share_right else rng.integers(0, 19)
        rows.append(list(f"{a}+{b}={answer}\n".ljust(PROMPT + ANSWER, "\n").encode()))
    return np.array(rows, np.int32)


def reward(rollouts: rlhf.Rollouts) -> np.ndarray:
    """Return 1 for each response that is the sum in its prompt, 0 for every other one."""
    scores = []
    for prompt, response in zip(rollouts.prompts(), rollouts.responses(), strict=True):
        a, b = map(int, re.findall(r"\d", bytes(prompt.tolist()).decode()))
        said = bytes(response.tolist()).decode(errors="replace")
        scores.append(float(said.strip() == str(a + b)))
    return np.array(scores, np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach a model to add, by GRPO.")
    parser.add_argument("--text-steps", type=int, default=800, help="steps on text")
    parser.add_argument("--iterations", type=int, default=60, help="of GRPO")
    parser.add_argument("--rows", type=int, default=256, help="answers in an iteration")
    parser.add_argument("--group", type=int, default=16, help="answers to each question")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--simulate", type=int, default=0, help="devices to simulate on the CPU")
    args = parser.parse_args()

    if args.simulate:
        zeroxla.simulate(args.simulate)
    mesh = zeroxla.make_mesh()
    model = GPT(vocab=256, length=16, layers=2, width=args.width, heads=4)
    rng = np.random.default_rng(0)

    # What the task looks like: half of the answers are right.
    step = zeroxla.make_step(model, mesh, optax.adamw(3e-3))
    state = step.init(jax.random.key(0), {"tokens": lines_of(rng, 128, 0.5)})
    for number in range(1, args.text_steps + 1):
        state, metrics = step(state, {"tokens": lines_of(rng, 128, 0.5)})
        if number % 100 == 0 or number == args.text_steps:
            print(f"text, step {number}: loss {float(metrics['loss']):.3f}")

    settings = rlhf.Settings(
        algorithm="grpo",
        prompt_length=PROMPT,
        new_tokens=ANSWER,
        rows=args.rows,
        group=args.group,
        eos=ord("\n"),
        kl=0.01,
    )
    loop = rlhf.make_loop(model, mesh, settings, reward=reward, optimizer=optax.adam(1e-3))
    states = loop.begin(state.params, jax.random.key(0))
    right = []
    for number in range(1, args.iterations + 1):
        prompts = prompts_of(sums(rng, settings.num_prompts))
        states, metrics = loop.iterate(states, prompts, jax.random.key(number))
        right.append(metrics["reward"])
        if number % 10 == 0 or number == args.iterations:
            print(f"GRPO, iteration {number}: {right[-1]:.0%} right, {metrics['kl']:.3f} nats away")
    few = max(1, args.iterations // 10)
    print(
        f"right answers: {np.mean(right[:few]):.0%} at first, {np.mean(right[-few:]):.0%} at last"
    )


if __name__ == "__main__":
    main()
