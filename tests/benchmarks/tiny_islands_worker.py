"""The worker of benchmarks/two_hosts_islands.py on a model that compiles in seconds."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import two_hosts_rows

from zeroxla.models import GPT

MODEL = GPT.tiny(vocab=256, length=128, width=192)

if __name__ == "__main__":
    import two_hosts_islands_worker

    two_hosts_rows.MODEL = MODEL
    two_hosts_islands_worker.main()
