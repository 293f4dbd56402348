"""Reads DeepSpeed's configuration files as the options of a `ZeroConfig`."""

from zeroxla.config.deepspeed.reader import DeepSpeedSettings, read

__all__ = ["DeepSpeedSettings", "read"]
