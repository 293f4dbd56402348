"""DeepSpeed's configuration files, read as ours."""

from zeroxla.config.deepspeed.reader import Settings, read

__all__ = ["Settings", "read"]
