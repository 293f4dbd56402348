"""Runs of several processes: how they find each other, talk, agree, and fail together."""
