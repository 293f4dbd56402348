"""The four models of models/, tiny, with dropout where they have it."""

from typing import Any

from tools.zoo.base import case, images, masked_tokens, tokens
from zeroxla.models import GPT, MLP, AlexNet, Llama

SMALL = {"vocab": 64, "width": 16, "heads": 2, "layers": 2}
SMALL_GPT = {**SMALL, "length": 8}
SMALL_LLAMA = {**SMALL, "kv_heads": 1, "hidden": 24}


@case(images, unit_elements=3000)
def mlp() -> Any:
    return MLP.tiny(dropout=0.2)


@case(tokens, unit_elements=2000)
def gpt_unrolled() -> Any:
    return GPT.tiny(**SMALL_GPT, scan=False, dropout=0.1)


@case(tokens, unit_elements=2000, heavy=True)
def gpt_unrolled_remat() -> Any:
    return GPT.tiny(**SMALL_GPT, scan=False, remat=True)


@case(tokens, unit_elements=1000)
def gpt_scan() -> Any:
    return GPT.tiny(**SMALL_GPT, scan=True, dropout=0.1)


@case(tokens, unit_elements=1000, heavy=True)
def gpt_scan_remat() -> Any:
    return GPT.tiny(**SMALL_GPT, scan=True, remat=True)


@case(masked_tokens, unit_elements=1000, heavy=True)
def gpt_masked() -> Any:
    """Its loss returns metrics["weight"], so the mean is one over all counted targets."""
    return GPT.tiny(**SMALL_GPT, tie=False)


@case(tokens, unit_elements=1000)
def llama_scan() -> Any:
    return Llama.tiny(**SMALL_LLAMA)


@case(masked_tokens, unit_elements=1000, heavy=True)
def llama_scan_remat() -> Any:
    return Llama.tiny(**SMALL_LLAMA, remat=True)


@case(tokens, unit_elements=1000, heavy=True)
def llama_unrolled() -> Any:
    return Llama.tiny(**SMALL_LLAMA, scan=False, tie=True)


@case(images, unit_elements=2000, heavy=True)
def alexnet() -> Any:
    return AlexNet.tiny(width=1 / 64, dropout=0.3)
