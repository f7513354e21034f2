"""Models whose training steps and gradients have the same bytes on every machine.

write_checkpoints.py ran these steps with the commit that wrote the files, and
test_old_checkpoints.py runs them with today's code. Only names that every version has are used.

Values are small integers times a power of two with the amax 21 = 2688 / 128. 2688 = 6 * 448 is the
largest E2M1 value times the largest E4M3 value, so every scale by a tensor's, a row's or a block's
amax is exact: 2688 / 448 = 6, 2688 / 57344 = 3 / 64, and NVFP4's tensor scale is 1. Each sum of a
product has one term that is not zero, or the 16 or 32 of one transformed block, which fp32 adds
exactly. So no order of sums changes a bit. Under +pow2 the tensor scale is 1536 / 2688: the
products of nvfp4_pow2 differ in last bits, by where a matrix library applies that factor.
"""

from collections import OrderedDict

import minifloat as mf
import torch
from torch import nn

AMAX = 2688.0
UNIT = AMAX / 128  # the amax of weights, inputs and gradients of a training step
TOKENS, WIDTH, HIDDEN = 32, 32, 48
HISTORY = 3  # steps of amax history
POINTS = 16  # of the Hadamard transform along the tokens

DELAYED = "fp8_delayed"
MIXED = f"*: nvfp4; *last: {DELAYED}"  # random bits and histories in one model
NOT_PRIMARY = (DELAYED, MIXED)
RECIPES = [*(name for name in mf.presets() if name != "bf16"), MIXED]  # bf16 converts nothing


def integers(seed, *shape):
    """Draws integers from -12 to 12, and one 21."""
    x = torch.randint(-12, 13, shape, generator=torch.Generator().manual_seed(seed)).float()
    x.view(-1)[0] = UNIT
    return x


def sequential(seed):
    """Builds two linear layers, one of them in a module between the root and the layer."""
    body = nn.Sequential(OrderedDict(first=nn.Linear(WIDTH, HIDDEN), act=nn.Tanh()))
    last = nn.Linear(HIDDEN, WIDTH, bias=False)
    return with_integers(nn.Sequential(OrderedDict(body=body, last=last)), seed)


def projections(seed):
    """Builds three layers of one parent with the names of projections of one input."""
    names = ("q_proj", "k_proj", "v_proj")
    return with_integers(nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names}), seed)


@torch.no_grad()
def with_integers(model, seed):
    for i, parameter in enumerate(model.parameters()):
        parameter.copy_(integers(seed + i, *parameter.shape) / 32)
    return model


def convert(model, recipe, seed=5, **options):
    """Converts the model to a recipe. seed: of the random bits."""
    mf.quantize_(
        model,
        recipe,
        seed=seed,
        data_parallel_rank=0,
        amax_history_length=HISTORY,
        verbose=False,
        **options,
    )
    return model


def layers_of(model):
    """Yields (name, layer) of every linear layer."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]


def begin_forward(model, x):
    """Calls the root, which begins a new count of random bits; no history changes."""
    if isinstance(model, nn.Sequential):
        with torch.no_grad():
            model(x)


def train_step(model, number):
    """Runs one training step: each layer alone, and an exact update instead of an optimizer."""
    begin_forward(model, integers(number, TOKENS, WIDTH))
    for i, (_, layer) in enumerate(layers_of(model)):
        x = integers(10 * number + i, TOKENS, layer.in_features).requires_grad_()
        layer(x).backward(integers(10 * number + i + 5, TOKENS, layer.out_features))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            update = integers(100 * number + i, *parameter.shape).sign() / 32
            update.view(-1)[0] = 0.0  # the largest value stays
            parameter.add_(update)
            parameter.grad = None
    mf.step(model)


# ---- one more step, whose gradients show the random bits -----------------------------------------


def gradient(outputs):
    """Draws (TOKENS, outputs); every row, column and transformed block has amax 2688."""
    generator = torch.Generator().manual_seed(outputs)
    g = 100 * torch.randn(TOKENS, outputs, generator=generator)
    tokens = torch.arange(TOKENS)
    g[tokens, (tokens + POINTS) % TOKENS] = AMAX
    for token, output in zip(tokens, range(TOKENS, outputs)):
        g[token, output] = AMAX
    transform = mf.hadamard(torch.eye(POINTS)).float()
    g[:POINTS, 0] = AMAX * transform[:, 0]  # becomes 2688 in its first value, zero in the others
    return g


def probe(model):
    """Runs one more training step with one-hot inputs and weights; returns what it made, by name.

    The values of y are the weight's codes, those of dx and dW the codes of the gradient in dgrad
    and wgrad, times constants.
    """
    found = {}
    begin_forward(model, integers(0, TOKENS, WIDTH))
    for name, layer in layers_of(model):
        x = (AMAX * torch.eye(TOKENS, layer.in_features)).requires_grad_()
        with torch.no_grad():
            layer.weight.copy_(AMAX * torch.eye(layer.out_features, layer.in_features))
        y = layer(x)
        y.backward(gradient(layer.out_features))
        found |= {f"{name}.y": y, f"{name}.dx": x.grad, f"{name}.dw": layer.weight.grad}
    mf.step(model)
    return found | {f"after.{name}": state for name, state in mf.training_state(model).items()}


# ---- what a loaded model holds -------------------------------------------------------------------


def contents(model):
    """Copies parameters, codes, scales, values and the training state of a model, by name."""
    found = dict(mf.training_state(model))
    for name, parameter in model.named_parameters():
        if isinstance(parameter, mf.QuantizedTensor):
            for inner in parameter.__tensor_flatten__()[0]:
                found[f"{name}.{inner}"] = getattr(parameter, inner)
            found[f"{name}.values"] = parameter.dequantize()
        else:
            found[name] = parameter
    for name, layer in layers_of(model):
        recipe = getattr(layer, "recipe", None)
        if recipe is None or isinstance(layer.weight, mf.QuantizedTensor):
            continue
        for spec, columnwise in ((recipe.fprop.b, False), (recipe.dgrad.b, True)):
            spec = spec.replace("+delayed", "")
            if spec != "bf16":
                q = mf.quantize(layer.weight.detach(), spec, columnwise=columnwise)
                side = "columnwise" if columnwise else "rowwise"
                found |= {f"{name}.{side}.{part}": getattr(q, part) for part in PARTS}
    return {name: tensor.detach().clone() for name, tensor in found.items() if tensor is not None}


PARTS = ("codes", "scale", "amax")


def hex_of(tensor):
    """Returns the bytes of a tensor as hexadecimal digits."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
