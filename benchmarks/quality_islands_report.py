"""The tables and the picture of benchmarks/quality_islands.py."""
from typing import Any
Results = dict[str, list[dict[str, Any]]]
def write_report(setup, results): print(results); return 0
