"""Stages along the mesh axis `pipe`: schedules as data, their proof and what they cost."""
