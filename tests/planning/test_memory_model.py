"""Plans against the compiler, for the configurations of benchmarks/plan_memory.py.

The benchmark runs in a process of its own, in which XLA schedules for memory.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "plan_memory.py"


def missed(*names):
    """Run cases, all if none are named; return what it printed if a target is missed."""
    only = ["--only", *names] if names else []
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), *only], capture_output=True, text=True, timeout=900
    )
    return run.stdout + run.stderr if run.returncode else ""


@pytest.mark.slow
def test_memory_is_within_a_tenth_and_bytes_are_those_of_the_compiler():
    assert not missed("gpt, zeropp")


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("gpt", "gpt, unrolled", "gpt, unrolled, zeropp_min"),
        ("gpt, 2 micro-batches", "gpt, bfloat16"),
        ("gpt, unrolled, remat", "wider gpt, remat", "wider gpt, one node"),
        ("gpt, tensor 4", "gpt, context 4"),
        ("llama", "llama, 8 nodes", "pipeline of 4 stages", "gpt generates", "llama generates"),
    ],
)
def test_so_are_those_of_other_configurations(names):
    assert not missed(*names)
