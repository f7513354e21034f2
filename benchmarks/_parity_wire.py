"""Gradients on one GPU as RANKS ranks would have them after mf.distributed.quantize_gradients_.

    batch    RANKS parts, each with a forward and a backward: the gradients of a rank
    send     a module's gradients, laid out as FSDP2 does -> a message to each rank
    receive  for each rank the sum of all messages to it, over RANKS -> .grad

A module is a block, or the root with all other parameters.
"""

from __future__ import annotations

import torch
from minifloat._native import ops
from minifloat.spec import Spec
from torch import Tensor, nn

RANKS = 4
WIRE = " wire="  # in an entry of a benchmark: before the spec of gradients


class Wire:
    """The reduce-scatters of a model, whose gradients are sent under a spec."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module], spec: str, seed: int) -> None:
        self.spec, self.seed = Spec.parse(spec), seed
        of_blocks = [list(block.parameters()) for block in blocks]
        held = {id(p) for parameters in of_blocks for p in parameters}
        self.modules = [*of_blocks, [p for p in model.parameters() if id(p) not in held]]
        self.messages: list[list[Tensor]] = [[] for _ in self.modules]  # of each rank until now

    @torch.no_grad()
    def send(self, step: int) -> None:
        """Makes the messages of the next rank from all .grad, which it clears."""
        for stream, (parameters, sent) in enumerate(zip(self.modules, self.messages, strict=True)):
            chunks = torch._chunk_cat([p.grad for p in parameters], 0, RANKS)  # (RANKS, cols)
            if self.spec.is_bf16:
                sent.append(chunks.bfloat16().view(torch.uint8))
            else:
                key = ops.mix_seed(self.seed, len(sent)), step
                rng = torch.tensor(key, device=chunks.device)
                sent.append(ops.quantize_messages(chunks, self.spec.text, rng=rng, stream=stream))
            for p in parameters:
                p.grad = None

    @torch.no_grad()
    def receive(self) -> None:
        """Sets all .grad to the mean of what the ranks have sent."""
        for parameters, sent in zip(self.modules, self.messages, strict=True):
            heights = [-(-len(p) // RANKS) for p in parameters]  # rows of a rank
            widths = [h * p[0].numel() for h, p in zip(heights, parameters, strict=True)]
            sums = torch.empty(RANKS, sum(widths), device=sent[0].device)
            for rank, total in enumerate(sums):
                received = torch.stack([messages[rank] for messages in sent])
                ops.sum_messages(received, self.spec.text, total)
            sums /= RANKS
            for p, h, chunk in zip(parameters, heights, sums.split(widths, 1), strict=True):
                p.grad = chunk.reshape(RANKS * h, *p.shape[1:])[: len(p)].clone()
            sent.clear()
