"""`make gpu` on a machine without a GPU: what it prints, how it ends, and what a failure stops."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu
from gpu_parts import machine, run_parts, write_report
from gpu_parts.findings import Finding, bounded
from gpu_parts.run_parts import Outcome, Part

MODULES = {
    "part_good": """
        from gpu_parts.findings import bounded
        def measure(place):
            yield bounded("bytes that differ", 0, 0)
    """,
    "part_wrong": """
        from gpu_parts.findings import bounded
        def measure(place):
            yield bounded("bytes that differ", 3, 0)
    """,
    "part_fails": """
        from gpu_parts.findings import bounded
        def measure(place):
            yield bounded("bytes that differ", 0, 0)
            raise MemoryError("the device is full")
    """,
    "part_crashes": """
        import os
        def measure(place):
            os.abort()
            yield
    """,
    "part_cache": """
        import os
        from gpu_parts.findings import Finding
        def measure(place):
            yield Finding(name="programs", text=os.environ["JAX_COMPILATION_CACHE_DIR"])
    """,
    "part_hangs": """
        import subprocess, sys, time
        from gpu_parts.findings import Finding
        def measure(place):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            yield Finding(name="child", text=str(child.pid))
            time.sleep(600)
    """,
}


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Returns parts by the names of their modules."""
    for name, text in MODULES.items():
        lines = (line.removeprefix(" " * 8) for line in text.splitlines())
        (tmp_path / f"{name}.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(*names, **options):
        return [
            Part(name=name, title=name, module=f"part_{name}", seconds=10, **options)
            for name in names
        ]

    return make


@pytest.mark.smoke
def test_unknown_parts_are_refused_with_a_list(capsys):
    assert gpu.main(["--only", "kernel", "step"]) == 2
    text = capsys.readouterr().out
    assert "--only kernel:" in text
    assert all(part.name in text for part in gpu.PARTS)


def test_a_dry_run_of_a_part_prints_a_table_and_writes_nothing(capsys, tmp_path):
    assert gpu.main(["--dry", "--only", "attention", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "nothing is measured" in text
    assert "| attention | passed |" in text
    assert "| cudnn, bfloat16, with gradients | " in text
    assert not list(tmp_path.iterdir())


def test_a_part_that_fails_gives_status_1_and_keeps_what_was_found(capsys, parts):
    assert gpu.main(["--simulate", "1"], parts("fails")) == 1
    text = capsys.readouterr().out
    assert "| fails | FAILED: ended with status 1: MemoryError: the device is full |" in text
    assert "| bytes that differ | 0 | 0 |" in text


@pytest.mark.slow
def test_a_part_that_fails_stops_no_other_and_gives_status_1(capsys, parts):
    chosen = parts("fails", "crashes", "wrong", "good")
    assert gpu.main(["--simulate", "1"], chosen) == 1
    text = capsys.readouterr().out
    assert "| fails | FAILED: ended with status 1: MemoryError: the device is full |" in text
    assert "| crashes | FAILED: ended by SIGABRT |" in text
    assert "| wrong | FAILED: 1 of 1 lines |" in text
    assert "| good | passed |" in text
    # What was found before a failure is kept.
    assert text.count("| bytes that differ | 0 | 0 |") == 2
    assert "| **MISSED** bytes that differ | 3 | 0 |" in text


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_all_that_it_started(capsys, parts):
    begin = time.monotonic()
    assert gpu.main(["--simulate", "1", "--minutes", "0.2"], parts("hangs")) == 1
    assert time.monotonic() - begin < 25
    text = capsys.readouterr().out
    assert "| hangs | FAILED: not done after its limit of 12 s |" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| child |"))
    child = Path("/proc", line.split("|")[2].strip())
    for _ in range(50):
        if not child.exists() or ") Z " in (child / "stat").read_text():
            return
        time.sleep(0.1)
    raise AssertionError("the child of the part still runs")


def test_an_interrupted_run_reports_what_was_found(capsys, parts, monkeypatch):
    def show(*arguments):
        findings = show_new(*arguments)
        if findings and not interrupts:
            interrupts.append(findings)
            raise KeyboardInterrupt
        return findings

    interrupts, show_new = [], run_parts._show_new
    monkeypatch.setattr(run_parts, "_show_new", show)
    assert gpu.main(["--simulate", "1"], parts("hangs", "good")) == 1
    text = capsys.readouterr().out
    assert "| hangs | FAILED: interrupted |" in text
    assert "| child |" in text
    assert "| good |" not in text


def test_an_interrupted_run_replaces_no_whole_report(capsys, tmp_path):
    part = Part(name="bits", title="Bits", module="none", seconds=1)
    outcomes = [Outcome(part=part, findings=[], seconds=1.0, error=run_parts.INTERRUPTED)]
    about = machine.Machine(note="", kind="NVIDIA H200")
    assert write_report.write_report(outcomes, about, whole=True, folder=tmp_path) == 1
    assert {path.stem for path in tmp_path.iterdir()} == {"gpu_nvidia_h200_bits"}


@pytest.mark.slow
def test_all_parts_share_a_folder_of_compiled_programs_that_is_set(capsys, parts, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/programs/of/mine")
    gpu.main(["--simulate", "1"], parts("cache"))
    assert "| programs | /programs/of/mine |" in capsys.readouterr().out
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    gpu.main(["--simulate", "1"], parts("cache"))
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("| programs |"))
    assert not Path(line.split("|")[2].strip()).exists()


def test_a_part_without_enough_devices_is_skipped_with_the_reason(capsys, parts):
    assert gpu.main(["--simulate", "1"], parts("good", least_devices=2)) == 0
    assert "| good | skipped: needs 2 devices, and there is 1 |" in capsys.readouterr().out


def test_a_gpu_that_jax_does_not_see_is_an_error(capsys, parts, monkeypatch):
    monkeypatch.setattr(gpu, "ask", lambda *_: {"kind": "", "reason": "no plugin"})
    monkeypatch.setattr(gpu, "gpus_of_driver", lambda: ["GPU 0: NVIDIA H100"])
    assert gpu.main([], parts("good")) == 1
    assert "the driver has GPU 0: NVIDIA H100, and JAX does not see it" in capsys.readouterr().out


def test_the_report_of_a_gpu_has_its_name_and_misses_what_a_part_missed(capsys, tmp_path):
    part = Part(name="kernels", title="Kernels", module="none", seconds=1)
    found = {"num_devices": 1, "kind": "NVIDIA H100 80GB HBM3", "capability": "9.0"}
    found |= {"memory_bytes": 6e10, "versions": {"driver": "580.1"}}
    h100 = machine.Machine.of(found, 1)
    fine = Outcome(part=part, findings=[bounded("bits", 0, 0)], seconds=2.0)
    assert write_report.write_report([fine], h100, whole=True, folder=tmp_path) == 0
    text = (tmp_path / "gpu_nvidia_h100_80gb_hbm3.md").read_text()
    assert "| bits | 0 | 0 |" in text
    assert "driver 580.1" in text
    broken = Finding(name="quantize", text="failed: no memory", failed=True)
    for outcome in (
        dataclasses.replace(fine, findings=[broken]),
        dataclasses.replace(fine, findings=[bounded("bits", float("nan"), 0)]),
        dataclasses.replace(fine, error="ended by SIGKILL"),
    ):
        assert write_report.write_report([outcome], h100, whole=False, folder=tmp_path) == 1
    assert (tmp_path / "gpu_nvidia_h100_80gb_hbm3_kernels.json").exists()
    capsys.readouterr()
