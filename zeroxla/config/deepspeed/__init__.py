"""DeepSpeed's configuration files, read as ours."""

from zeroxla.config.deepspeed.reader import DeepSpeedSettings, read

__all__ = ["DeepSpeedSettings", "read"]
