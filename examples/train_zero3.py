"""Trains Llama blocks by ZeRO-3 with quantized weights, and compares them with FSDP2's, bit by bit.

    torchrun --nproc-per-node 2 examples/train_zero3.py

Each rank keeps a shard of every master weight, and its codes. Zero3 below gathers a block's codes
before its forward pass and again before its backward pass, and reduces the block's gradients. Two
blocks' codes are whole at a time: the next one is gathered while one is computed.
"""

import contextlib
import os

import minifloat as mf
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS, TOKENS, BLOCKS, DIM = 25, 48, 3, 64
RECIPES = ["fp8_tensorwise", "nvfp4_pow2"]
PLACES = 2  # for whole codes
# cuBLAS asks for it where torch's algorithms are deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class Block(nn.Module):
    """A Llama block: x (B, T, dim) -> (B, T, dim)."""

    def __init__(self, dim=DIM, heads=4, kv_heads=2, hidden=192):
        super().__init__()
        self.width = dim // heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        n = self.attention_norm(x)
        heads = (*x.shape[:2], -1, self.width)
        q, k, v = (w(n).view(heads).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        n = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(n)) * self.w3(n))


# ---- ZeRO-3 --------------------------------------------------------------------------------------
def rows_of_rank(t, rank, ranks):
    """Returns the rows of a parameter that FSDP2 would give to this rank too."""
    if t.shape[0] % ranks != 0:
        raise ValueError(f"expected rows as a multiple of {ranks} ranks, got {tuple(t.shape)}")
    return t.chunk(ranks)[rank]


class Place:
    """Memory for the whole codes of one block at a time: rowwise, columnwise, and as gathered."""

    def __init__(self, weights):
        self.block = None  # whose codes are here
        self.codes = []
        for weight in weights:
            flat = mf.distributed.wires(weight)[1:]  # columnwise codes that are gathered apart
            whole = weight.rowwise.codes, weight.columnwise.codes, *flat
            self.codes.append([torch.empty_like(codes) for codes in whole])

    def take(self, linear, codes):
        """Moves the codes of a layer's weight here."""
        row, col, *flat = codes
        old = linear.weight
        parts = [
            mf.tensor.Quantized(
                to, part.scale.clone(), part.amax.clone(), part.spec, part.shape, is_col
            )
            for part, to, is_col in ((old.rowwise, row, False), (old.columnwise, col, True))
        ]
        linear.weight = nn.Parameter(mf.QuantizedTensor(*parts, dtype=old.dtype))
        mf.distributed.attach_wires(linear.weight, [row, *flat])


class ShardedBlock:
    """One block: the shards of its masters, codes and gradients.

    Args:
        block: the module, whose weights of converted layers are codes.
        masters: float32 shards of all its parameters, in their order.
        place: of its whole codes, which it shares with other blocks.
    """

    def __init__(self, block, masters, place):
        self.block, self.masters, self.place = block, masters, place
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        layers = [m for m in block.modules() if isinstance(m, mf.Linear)]
        for layer, codes in zip(layers, place.codes, strict=True):
            place.take(layer, codes)
        self.memory = [t for codes in place.codes for t in codes]
        self.parameters = list(block.parameters())
        self.weights = [layer.weight for layer in layers]
        is_weight = {id(weight) for weight in self.weights}
        self.of_weights = [id(p) in is_weight for p in self.parameters]
        cuts = [
            [rank * w.numel() // self.ranks for rank in range(self.ranks + 1)] for w in self.weights
        ]
        self.layout = mf.distributed.WireLayout.of(self.weights, self.ranks, cuts)
        self.shard_codes = self.layout.new_piece(self.memory[0])
        self.fragments = self.layout.fragments(self.shard_codes, self.rank)
        self.starts = [begin for begin, _ in self.layout.shards(self.rank)]

    def gather(self):
        """Gathers the codes, unless they are in their place still."""
        if self.place.block is self:
            return
        self.place.block = self
        # Forward has saved the codes for backward, and they are the same bytes again.
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.memory)):
            self.layout.gather(self.shard_codes, self.weights, dist.group.WORLD)
            mf.distributed.post_all_gather_processing(self.weights)

    def take_gradients(self):
        """Returns the gradients in float32, the rows of each rank together, as FSDP2 sends them."""
        sizes = [master.numel() for master in self.masters]
        whole = torch.empty(self.ranks, sum(sizes), device=self.memory[0].device)
        for p, part in zip(self.parameters, whole.split(sizes, dim=1), strict=True):
            part.copy_(p.grad.view(self.ranks, -1))
            p.grad = None
        return whole

    def reduce(self, whole):
        """Averages gradients over the ranks; each rank receives those of its rows."""
        shard = whole.new_empty(whole.shape[1])
        dist.reduce_scatter_tensor(shard, whole.view(-1), op=dist.ReduceOp.AVG)
        sizes = [master.numel() for master in self.masters]
        for master, gradient in zip(self.masters, shard.split(sizes), strict=True):
            master.grad = gradient.view(master.shape)


class Zero3(nn.Sequential):
    """Blocks in a row, whose weights are codes that are gathered when a block is computed.

    Args:
        blocks: equal modules in float32, with the same values on every rank.
        recipe: of the linear layers.
        options: further arguments of mf.quantize_.
    """

    def __init__(self, blocks, recipe, **options):
        super().__init__(*blocks)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        masters = [
            [nn.Parameter(rows_of_rank(p.detach(), rank, ranks).clone()) for p in b.parameters()]
            for b in blocks
        ]
        mf.quantize_(self.bfloat16(), recipe, primary=True, **options)
        weights = [m.weight for m in blocks[0].modules() if isinstance(m, mf.Linear)]
        self.places = [Place(weights) for _ in range(PLACES)]
        self.sharded = [
            ShardedBlock(block, shards, self.places[i % PLACES])
            for i, (block, shards) in enumerate(zip(self, masters, strict=True))
        ]
        device = weights[0].device
        self.is_cuda = device.type == "cuda"
        self.gathers = torch.cuda.Stream(device) if self.is_cuda else None
        self.reductions = torch.cuda.Stream(device) if self.is_cuda else None
        self.cast()

    def master_shards(self):
        """Returns the parameters of an optimizer."""
        return [master for sharded in self.sharded for master in sharded.masters]

    def beside(self, stream):
        """Returns a context: its kernels wait for earlier ones, later ones run beside them."""
        if stream is None:
            return contextlib.nullcontext()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def gather(self, i):
        if 0 <= i < len(self.sharded):
            with self.beside(self.gathers):
                self.sharded[i].gather()

    def take(self, i, following):
        """Waits for block i's codes, and begins the gather of the block that follows."""
        self.gather(i)
        if self.is_cuda:
            torch.cuda.current_stream().wait_stream(self.gathers)
        self.gather(following)

    def forward(self, x):
        for i, sharded in enumerate(self.sharded):
            self.take(i, i + 1)
            x = sharded.block(x)
            if x.requires_grad:
                x.register_hook(lambda gradient, i=i: self.before_backward(i))
        return x

    def before_backward(self, i):
        if i + 1 < len(self.sharded):
            self.reduce(i + 1)
        else:
            torch.autograd.Variable._execution_engine.queue_callback(self.after_backward)
        self.take(i, i - 1)

    def reduce(self, i):
        whole = self.sharded[i].take_gradients()
        with self.beside(self.reductions):
            self.sharded[i].reduce(whole)
        if self.is_cuda:
            whole.record_stream(self.reductions)

    def after_backward(self):
        self.reduce(0)
        if self.is_cuda:
            torch.cuda.current_stream().wait_stream(self.reductions)

    def cast(self):
        """Casts the shards of all masters, after the optimizer's step; one call for all blocks."""
        weights, masters, starts, fragments = [], [], [], []
        others, shards = [], []
        for sharded in self.sharded:
            weights += sharded.weights
            starts += sharded.starts
            fragments += sharded.fragments
            for p, master, is_weight in zip(
                sharded.parameters, sharded.masters, sharded.of_weights, strict=True
            ):
                if is_weight:
                    masters.append(master.detach().view(-1))
                else:
                    others.append(p)
                    shards.append(master.detach().view(-1))
        mf.distributed.quantize_master_weights(
            weights, masters, starts, dist.group.WORLD, fragments
        )
        for place in self.places:
            place.block = None
        # What stays in bf16 is whole on every rank.
        shard = torch.cat(shards).bfloat16()
        whole = shard.new_empty(dist.get_world_size(), shard.numel())
        dist.all_gather_into_tensor(whole.view(-1), shard)
        with torch.no_grad():
            for p, part in zip(others, whole.split([s.numel() for s in shards], 1), strict=True):
                p.copy_(part.reshape(p.shape))


# ---- The two trainings ---------------------------------------------------------------------------
def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(2, TOKENS, DIM, generator=generator).bfloat16()


def train(model, parameters, device):
    """Returns the losses of all steps, averaged over the ranks."""
    # Else the backward pass of attention on a GPU adds in an order that differs from run to run.
    torch.use_deterministic_algorithms(True)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    losses = []
    for step in range(STEPS):
        x = batch(step, dist.get_rank()).to(device)
        loss = (model(x) - x.flip(2)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
        if isinstance(model, Zero3):
            model.cast()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


def new_blocks(device):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device)


def train_fsdp(recipe, device):
    """Returns losses and this rank's shards of the weights."""
    model = new_blocks(device)
    mf.quantize_(model, recipe)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    losses = train(model, model.parameters(), device)
    return losses, [p.to_local().detach() for p in model.parameters()]


def train_zero3(recipe, device):
    """Returns losses and this rank's shards of the masters."""
    model = Zero3(new_blocks(device), recipe)
    losses = train(model, model.master_shards(), device)
    return losses, [master.detach() for master in model.master_shards()]


def compare(device):
    for recipe in RECIPES:
        losses, masters = train_zero3(recipe, device)
        want, shards = train_fsdp(recipe, device)
        pairs = zip(masters, shards, strict=True)
        is_equal = losses == want and all(torch.equal(a, b) for a, b in pairs)
        found = torch.tensor(is_equal, dtype=torch.int32, device=device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        if dist.get_rank() == 0:
            size = sum(m.numel() for m in masters)
            print(f"{recipe}: {size:,} master elements a rank")
            print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
            print(f"{recipe}: losses and masters equal FSDP2's: {bool(found)}")


def main():
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    compare(device)
    mf.distributed.destroy_process_group()  # torch's, which waits until this process can exit


if __name__ == "__main__":
    main()
