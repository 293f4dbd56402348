"""Explains a step: what it waits for, what its time goes to, and what would change that."""
