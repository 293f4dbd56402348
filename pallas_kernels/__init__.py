"""Block quantization on NVIDIA GPUs: Pallas kernels, their XLA reference, and their shared
arithmetic.

Nothing here imports anything of zeroxla. The package is imported as `zeroxla.pallas_kernels`."""

if __name__ != "zeroxla.pallas_kernels":
    raise ImportError(f"{__name__!r} is a part of zeroxla; import it as zeroxla.pallas_kernels")
