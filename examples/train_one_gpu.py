"""Trains a small Llama on one GPU or on a CPU: compiled, clipped, evaluated, saved and resumed.

    python examples/train_one_gpu.py [recipe]

Copy the order of the calls: mf.quantize_, compile, the optimizer; and mf.step after each of its
steps. The text is this file's, a token a byte.
"""

import sys
import tempfile
from pathlib import Path

import minifloat as mf
import torch
import torch.nn.functional as F
from torch import nn

STEPS, SAVED_AT, EVALUATED_EVERY = 30, 20, 10
BATCH, SEQUENCE, DIM, HEADS, HIDDEN, LAYERS = 8, 64, 128, 4, 256, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILER = "inductor" if DEVICE == "cuda" else "aot_eager"  # on a CPU: no minute for the compiler

TEXT = torch.tensor(list(Path(__file__).read_bytes()))
TRAINING, VALIDATION = TEXT.split([len(TEXT) - 512, 512])


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A Llama block without positions: x (B, T, DIM) -> (B, T, DIM).

    Args:
        feed_forward: returns a module, (B, T, DIM) -> (B, T, DIM).
    """

    def __init__(self, feed_forward=FeedForward):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.feed_forward = feed_forward()

    def forward(self, x):
        n = self.attention_norm(x)
        projections = self.wq(n), self.wk(n), self.wv(n)
        q, k, v = (y.unflatten(2, (-1, DIM // HEADS)).transpose(1, 2) for y in projections)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, feed_forward=FeedForward):
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.layers = nn.ModuleList(Block(feed_forward) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.lm_head = nn.Linear(DIM, 256, bias=False)

    def forward(self, tokens):
        """Returns the mean loss of tokens (B, T + 1), in nats a token."""
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(text, seed):
    """Returns tokens (BATCH, SEQUENCE + 1). They depend on the seed alone, so a run can resume."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - SEQUENCE, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(SEQUENCE + 1)].to(DEVICE)


def build(recipe):
    """Returns a converted model and its optimizer."""
    torch.manual_seed(0)
    model = Llama().to(DEVICE)
    print(mf.quantize_(model, recipe))  # all but the head
    for layer in model.layers:
        layer.compile(backend=COMPILER)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loss_of(model, tokens):
    with torch.autocast(DEVICE, torch.bfloat16):
        return model(tokens)


@torch.no_grad()
def evaluate(model):
    model.eval()
    loss = loss_of(model, batch(VALIDATION, seed=0))
    model.train()
    return loss.item()


def save(path, model, optimizer):
    """Saves a checkpoint: mf.training_state has the random counts and amax histories."""
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(parts | {"minifloat": mf.training_state(model)}, path)


def load(path, model, optimizer):
    parts = torch.load(path)
    model.load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])
    mf.load_training_state(model, parts["minifloat"])


def train(model, optimizer, path, begin=0):
    """Trains from step `begin` on. Saves a checkpoint after step SAVED_AT, returns the losses."""
    losses = []
    for step in range(begin, STEPS):
        loss = loss_of(model, batch(TRAINING, seed=step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
        losses.append(loss.item())
        if (step + 1) % EVALUATED_EVERY == 0:
            print(f"step {step + 1}: training {losses[-1]:.3f}, validation {evaluate(model):.3f}")
        if step + 1 == SAVED_AT:
            save(path, model, optimizer)
    return losses


def main():
    recipe = sys.argv[1] if sys.argv[1:] else "fp8_tensorwise"
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint.pt"
        model, optimizer = build(recipe)
        losses = train(model, optimizer, path)
        print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")

        resumed, optimizer = build(recipe)
        load(path, resumed, optimizer)
        train(resumed, optimizer, path, begin=SAVED_AT)
    pairs = zip(model.parameters(), resumed.parameters(), strict=True)
    print("resumed weights equal:", all(torch.equal(a, b) for a, b in pairs))


if __name__ == "__main__":
    main()
