"""Runs of several processes: how they find each other, agree, and share batches."""
