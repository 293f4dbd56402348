"""Trackers: where a run's metrics go beside its own record, metrics.jsonl."""
