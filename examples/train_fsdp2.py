"""Trains the Llama of train_one_gpu.py under FSDP2: checkpointed, compiled, saved and resumed.

    torchrun --nproc-per-node 2 examples/train_fsdp2.py [recipe [spec of gradients]]

Copy the order of the calls in `build`. FSDP2 gathers the weights as the recipe's codes; parameters,
gradients, optimizer and checkpoints are in float32. Gradients are sent as codes where a spec such
as e4m3/1x128+sr is given.
"""

import sys
import tempfile

import minifloat as mf
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from train_one_gpu import (
    BATCH,
    COMPILER,
    DEVICE,
    EVALUATED_EVERY,
    SAVED_AT,
    STEPS,
    TRAINING,
    VALIDATION,
    Llama,
    batch,
)


def build(recipe, gradients):
    """Returns a converted, sharded model and its optimizer."""
    torch.manual_seed(0)
    model = Llama().to(DEVICE)
    report = mf.quantize_(model, recipe)  # first
    if dist.get_rank() == 0:
        print(report)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, layer in enumerate(model.layers):
        layer = checkpoint_wrapper(layer)
        layer.compile(backend=COMPILER)
        model.layers[i] = fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if gradients:
        mf.distributed.quantize_gradients_(model, gradients)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # last


def mean_of(loss):
    """Returns the mean over the ranks."""
    loss = loss.detach().clone()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return loss.item()


def rows_of_rank(text, seed):
    """Returns this rank's rows of a batch that all ranks share."""
    return batch(text, seed).chunk(dist.get_world_size())[dist.get_rank()]


@torch.no_grad()
def evaluate(model):
    model.eval()
    loss = mean_of(model(rows_of_rank(VALIDATION, seed=0)))
    model.train()
    return loss


def state_of(model, optimizer):
    """Returns what a checkpoint holds: mf.training_state has random counts and amax histories."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "minifloat": mf.training_state(model)}


def load(folder, model, optimizer):
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)  # in place
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    mf.load_training_state(model, state["minifloat"])


def train(model, optimizer, folder, begin=0):
    """Trains from step `begin` on. Saves a checkpoint after step SAVED_AT, returns the losses."""
    losses = []
    for step in range(begin, STEPS):
        loss = model(rows_of_rank(TRAINING, seed=step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)  # one exchange of the maxima of all weights, which the next gathers use
        losses.append(mean_of(loss))
        if (step + 1) % EVALUATED_EVERY == 0:
            value = evaluate(model)  # on all ranks
            if dist.get_rank() == 0:
                print(f"step {step + 1}: training {losses[-1]:.3f}, validation {value:.3f}")
        if step + 1 == SAVED_AT:
            dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return losses


def run(folder, recipe, gradients=None):
    model, optimizer = build(recipe, gradients)
    losses = train(model, optimizer, folder)
    resumed, optimizer = build(recipe, gradients)
    load(folder, resumed, optimizer)
    train(resumed, optimizer, folder, begin=SAVED_AT)
    pairs = zip(model.state_dict().values(), resumed.state_dict().values(), strict=True)
    is_equal = all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    found = torch.tensor(is_equal, dtype=torch.int32, device=DEVICE)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
        print("resumed weights equal:", bool(found))


def main():
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    if BATCH % dist.get_world_size() != 0:
        raise ValueError(f"expected a divisor of {BATCH} as the number of ranks")
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)  # all ranks use the first one's
    run(folders[0], *(sys.argv[1:] or ["fp8_tensorwise"]))
    mf.distributed.destroy_process_group()  # torch's, which waits until this process can exit


if __name__ == "__main__":
    main()
