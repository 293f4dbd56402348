"""Rewrites of a model's trace: what a user wrote by hand becomes a form that keeps less in memory."""
