"""Block quantization on NVIDIA GPUs: Pallas kernels, their XLA reference, and the arithmetic that
both share. Nothing here knows of zeroxla. The kernels are imported as `zeroxla.pallas_kernels`."""

if __name__ != "zeroxla.pallas_kernels":
    raise ImportError(f"{__name__!r} is a part of zeroxla; import it as zeroxla.pallas_kernels")
