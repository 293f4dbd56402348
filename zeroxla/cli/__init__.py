"""The command `zeroxla`."""
