"""Weights of two processes: both read and gather, the first one writes, and a failure stops
both."""

import pytest
from tools.hugging_face import assert_same_tensors, hub_folder, read_export, recorded

from multihost import processes

pytest.importorskip("safetensors", reason="safetensors is not installed")


@pytest.mark.slow
def test_two_processes_import_and_export(tmp_path):
    hub = hub_folder(tmp_path / "hub", "d_llama_gqa_tied")
    status, said, out = processes.launch("weights.py", hub, tmp_path, devices_per_node=4)
    assert status == 0, out
    # Each process reads its own half of whole arrays, and one that fails stops both.
    assert [each["read"] for each in said] == ["0.50", "0.50"]
    assert said[1]["broken"] == "no such file"
    assert said[0]["broken"].startswith("process 1 failed at its leaf ")
    _, tensors, _ = recorded("d_llama_gqa_tied")
    assert_same_tensors(read_export(tmp_path / "good"), tensors)
    assert said[0]["files"] == said[1]["files"] == "5"
    assert "cannot write the export to" in said[0]["failure"]
    assert "File too large" in said[0]["failure"]
    assert (
        said[1]["failure"] == f"process 0 failed at its files of the export: {said[0]['failure']}"
    )
    assert list((tmp_path / "bad").iterdir()) == []
    assert "/dev/null/nowhere/config.json cannot be read: Not a directory" in said[1]["unread"]
    assert said[0]["unread"] == f"process 1 failed at its pretrained weights: {said[1]['unread']}"
