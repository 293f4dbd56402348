"""The GPT of models/gpt.py in PyTorch.

Shape letters: B batch, L positions, D width, N heads, H head width (D / N), V vocabulary.
`python benchmarks/peers/parity.py` shows that both compute the same.
"""

from __future__ import annotations

import torch
from peers import task
from torch import Tensor, nn
from torch.nn import functional as F


class GPT(nn.Module):
    """A GPT-2 language model over the shape of `task`; its result is the loss.

    Args:
      seed: of the initial weights.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        # Not nn.Embedding: as parameters of the root, they are gathered for the head too.
        self.wte = nn.Parameter(torch.empty(task.VOCAB, task.WIDTH))
        self.wpe = nn.Parameter(torch.empty(task.LENGTH, task.WIDTH))
        self.h = nn.ModuleList(Block() for _ in range(task.LAYERS))
        self.ln_f = nn.LayerNorm(task.WIDTH)
        self._initialize(torch.Generator().manual_seed(seed))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Return the mean cross-entropy of each next token, in nats.

        Args:
          tokens_BL: int64[B, LENGTH + 1].
        """
        x_BLD = F.embedding(tokens_BL[:, :-1], self.wte) + self.wpe
        for block in self.h:
            x_BLD = block(x_BLD)
        logits_BLV = F.linear(self.ln_f(x_BLD), self.wte)
        return F.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL[:, 1:].flatten())

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                parameter.normal_(std=0.02 / (2 * task.LAYERS) ** 0.5, generator=generator)
            elif parameter.dim() == 2:
                parameter.normal_(std=0.02, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()


class Block(nn.Module):
    """x + attention(norm(x)), then x + perceptron(norm(x)): the unit that is gathered at once."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(task.WIDTH)
        self.attn = Attention()
        self.ln_2 = nn.LayerNorm(task.WIDTH)
        self.mlp = Perceptron()

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attn(self.ln_1(x_BLD))
        return x_BLD + self.mlp(self.ln_2(x_BLD))


class Attention(nn.Module):
    """Causal self-attention with one product for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(task.WIDTH, 3 * task.WIDTH)
        self.c_proj = nn.Linear(task.WIDTH, task.WIDTH)

    def forward(self, x_BLD: Tensor) -> Tensor:
        qkv_BNLH = (
            part.unflatten(-1, (task.HEADS, -1)).transpose(1, 2)
            for part in self.c_attn(x_BLD).chunk(3, dim=-1)
        )
        out_BNLH = F.scaled_dot_product_attention(*qkv_BNLH, is_causal=True)
        return self.c_proj(out_BNLH.transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    """linear, tanh-GELU, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc = nn.Linear(task.WIDTH, 4 * task.WIDTH)
        self.c_proj = nn.Linear(4 * task.WIDTH, task.WIDTH)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x_BLD), approximate="tanh"))
