"""Caches for models that have none, made from the trace of a pass over whole rows."""
