"""Fits a step into the memory that a device has for it."""
