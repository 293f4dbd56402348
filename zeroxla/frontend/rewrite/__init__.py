"""Rewrites of a model's trace: what a user wrote by hand takes a form that keeps less in memory."""
