"""Block quantization on NVIDIA GPUs: Pallas kernels, their XLA reference, and the arithmetic that
both share. Nothing here knows of zeroxla."""
