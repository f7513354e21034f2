"""Random sequences of what a training loop does, run by an eager model and by a compiled one.

    program = random_program(seed, WHOLE)             e.g. ["train", "evaluate", "oldest", "step"]
    program = WRITTEN["evaluation before"]            one of a real loop
    Loop(build, compile_blocks).run(program)          what can be seen of it, by name

Each action is a method of Loop. What a step cannot do while a forward waits for its backward pass
(change weights, convert, copy), it does after those backward passes.
"""

import copy
import random

import minifloat as mf
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

BACKEND = "aot_eager"  # runs eager's kernels
FEATURES, ROWS = 32, 16
RECIPES = ("nvfp4", "mxfp8_nvfp4", "fp8_delayed", "mxfp4")
PARTS = ("train", "evaluate", "oldest", "newest", "step", "save", "load", "recompute", "part")
WHOLE = (*PARTS, "twice", "copy", "convert")
SHARDED = ("train", "evaluate", "oldest", "newest", "step", "recompute", "twice")
STEP = ["train", "newest", "step"]
WRITTEN = {
    "evaluation before": ["evaluate", *6 * STEP],
    "evaluation between": [*3 * [*STEP, "evaluate"], *3 * STEP],
    "evaluation first and after each step": ["evaluate", *6 * [*STEP, "evaluate"]],
    "a loaded state": [*2 * STEP, "save", *2 * STEP, "load", *2 * STEP],
    "two forwards before a backward": [*6 * ["train", "train", "newest", "newest", "step"]],
    "one backward of two forwards": [*6 * ["twice", "newest", "step"]],
    "interleaved microbatches": ["train", *6 * ["train", "oldest"], "oldest", "step"],
    "parts by themselves": [*6 * ["part", "newest", "step"]],
}


def random_program(seed, actions):
    """Draws a sequence of actions, two training forwards among the first."""
    draw = random.Random(seed)
    return ["train", *(draw.choice(actions) for _ in range(14)), "train", "newest", "step"]


# ---- Models --------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.up = nn.Linear(FEATURES, 2 * FEATURES, bias)
        self.down = nn.Linear(2 * FEATURES, FEATURES, bias)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.blocks = nn.ModuleList(Block(bias) for _ in range(2))
        self.head = nn.Linear(FEATURES, FEATURES, bias)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Experts(nn.Module):
    """A block of experts between linear layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Block(True), mf.MoE(FEATURES, 32, 4, 2)])
        self.head = nn.Linear(FEATURES, FEATURES)

    forward = Model.forward


# ---- Ways to compile, each a function (model) -> what is called instead of it --------------------


def run_eager(model):
    return model


def compile_root(model):
    return torch.compile(model, backend=BACKEND)


def compile_root_in_one_graph(model):
    return torch.compile(model, backend=BACKEND, fullgraph=True)


def compile_in_place(model):
    model.compile(backend=BACKEND)
    return model


def compile_blocks(model):
    for block in model.blocks:
        block.compile(backend=BACKEND)
    return model


def compile_function(model):
    return torch.compile(lambda x: model(x), backend=BACKEND, fullgraph=True)


def replay_graphs(model):
    """Compiles for CUDA graphs: a replay overwrites what the one before it returned."""
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)

    def call(x):
        return compiled(x).clone()

    return call


# ---- The loop ------------------------------------------------------------------------------------


class Loop:
    """Runs actions, and records counts, outputs and gradients.

    Args:
        build: () -> a model that mf.quantize_ has converted.
        compiled: a way to compile.
        device: where the model is. On CUDA each .grad is allocated before the first backward, since
            a replayed graph overwrites one that it allocated.
    """

    def __init__(self, build, compiled, device="cpu"):
        self.compiled = compiled
        self.device = torch.device(device)
        self.batches = 0
        self.waiting = []  # (inputs, output) of forwards without a backward pass yet
        self.seen = {}
        self.adopt(build())
        self.save()

    def adopt(self, model):
        """Trains this model from now on."""
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if self.device.type == "cuda":
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self.call = self.compiled(model)

    def run(self, program):
        """Returns what was seen: {"number action what": tensor}."""
        for number, action in enumerate(program):
            self.name = f"{number} {action}"
            getattr(self, action)()
            self.see("count", mf.training_state(self.model).get("rng", torch.zeros(2)))
        return self.seen

    def see(self, what, tensor):
        self.seen[f"{self.name} {what}"] = getattr(tensor, "_local_tensor", tensor).detach().clone()

    def batch(self):
        self.batches += 1
        generator = torch.Generator().manual_seed(self.batches)
        return torch.randn(ROWS, FEATURES, generator=generator).to(self.device).requires_grad_()

    def forward(self, *calls):
        """Adds the outputs of calls, each with inputs of its own: a sum has one order then."""
        if len(self.waiting) == 3:
            self.oldest()
        if self.is_delayed():  # compiled code saves histories, which each forward writes to
            self.finish()
            calls = calls[:1]
        inputs = [self.batch() for _ in calls]
        y = sum(call(x) for call, x in zip(calls, inputs))
        self.see("output", y)
        self.waiting.append((inputs, y))

    def is_delayed(self):
        return any(getattr(m, "amax_history", None) is not None for m in self.model.modules())

    def train(self):
        self.forward(self.call)

    def twice(self):
        """Calls the model twice before one backward pass."""
        self.forward(self.call, self.call)

    def recompute(self):
        self.forward(lambda x: checkpoint(self.call, x, use_reentrant=False))

    def part(self):
        """Calls a block by itself."""
        self.forward(self.model.blocks[0])

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            self.see("output", self.call(self.batch()))
        self.model.train()

    def backward(self, index):
        if self.waiting:
            inputs, y = self.waiting.pop(index)
            y.square().mean().backward()
            for i, x in enumerate(inputs):
                self.see(f"gradient of input {i}", x.grad)

    def oldest(self):
        self.backward(0)

    def newest(self):
        self.backward(-1)

    def finish(self):
        while self.waiting:
            self.oldest()

    def step(self):
        self.finish()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.see(f"gradient of {name}", parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.device.type != "cuda")
        mf.step(self.model)

    def save(self):
        self.saved = copy.deepcopy(self.model.state_dict()), mf.training_state(self.model)

    def load(self):
        self.finish()
        self.model.load_state_dict(self.saved[0])
        mf.load_training_state(self.model, self.saved[1])

    def copy(self):
        self.finish()
        self.adopt(copy.deepcopy(self.model))

    def convert(self):
        """Trains on under the next recipe."""
        self.finish()
        mf.restore_(self.model)
        recipe = RECIPES[self.batches % len(RECIPES)]
        seed = self.batches
        mf.quantize_(self.model, recipe, keep="nothing", seed=seed)
        self.adopt(self.model)
        self.save()
