"""Primary weights: copies, checkpoints, recomputation, AdamW."""

import copy
import functools
import io
import pickle

import minifloat as mf
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.loss_errors import loss_error
from tests.support.worlds import run_world

HYBRIDS = [
    "fprop=mxfp8*mxfp8 dgrad=nvfp4+sr*nvfp4/16x16 wgrad=mxfp8*mxfp8",
    "fprop=nvfp4*nvfp4/16x16 dgrad=e4m3/row*e4m3/row wgrad=nvfp4+sr+rht*nvfp4+rht",
]
NOT_PRIMARY = ("bf16", "fp8_delayed")
RECIPES = [*(name for name in mf.presets() if name not in NOT_PRIMARY), *HYBRIDS]
WITH_MASTERS = [recipe for recipe in RECIPES if recipe != "mxfp4"]  # whose weight is transformed


def unconverted(seed=0, inner=80):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, inner), nn.Tanh(), nn.Linear(inner, 33, bias=False))


def build(recipe, seed=0, inner=80, **options):
    """Builds a model with two weights that end within blocks, and one bias."""
    model = unconverted(seed, inner)
    report = mf.quantize_(model, recipe, data_parallel_rank=0, **options)
    assert len(report.converted) == 2
    return model


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(24, 48, generator=generator)


def bytes_of(model):
    """Lists codes, scales and amaxes of quantized parameters, and other parameters."""
    found = {}
    for name, p in model.named_parameters():
        if not isinstance(p, mf.QuantizedTensor):
            found[name] = p.detach().clone()
            continue
        for inner in p.__tensor_flatten__()[0]:
            found[f"{name}.{inner}"] = getattr(p, inner).reshape(-1).view(torch.uint8).clone()
    return found


def assert_same_bytes(a, b, what):
    a, b = bytes_of(a), bytes_of(b)
    assert a.keys() == b.keys(), what
    assert any("_codes" in name for name in a), what
    for name in a:
        assert torch.equal(a[name], b[name]), (what, name)


def gradients(model, forward=None, x=None):
    model.zero_grad()
    x = batch(1).requires_grad_() if x is None else x
    (forward or model)(x).square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


# ---- copies and checkpoints ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("recipe", RECIPES)
def test_copies_and_checkpoints_keep_the_bytes(recipe, tmp_path):
    model = build(recipe, primary=True)
    file = io.BytesIO()
    torch.save({"whole": model, "state": model.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    from_state = build(recipe, seed=1, primary=True)
    from_state.load_state_dict(loaded["state"])

    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    from_dcp = build(recipe, seed=2, primary=True)
    state = {"model": from_dcp.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    from_dcp.load_state_dict(state["model"])

    twins = {
        "torch.save": loaded["whole"],
        "state dict": from_state,
        "DCP": from_dcp,
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "moved": copy.deepcopy(model).to("cpu"),
    }
    want = gradients(copy.deepcopy(model))
    for name, twin in twins.items():
        assert_same_bytes(twin, model, name)
        for got, grad in zip(gradients(twin), want, strict=True):
            assert torch.equal(got, grad), name


SHARED = ("nvfp4", "mxfp8", "fp8_rowwise")


def save_all(rank, folder):
    for recipe in SHARED:
        model = build(recipe, primary=True)
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/{recipe}")


def load_all(rank, folder):
    for recipe in SHARED:
        model = build(recipe, seed=1 + rank, primary=True)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/{recipe}")
        model.load_state_dict(state["model"])
        assert_same_bytes(model, build(recipe, primary=True), recipe)


def test_ranks_that_hold_whole_weights_share_a_checkpoint(tmp_path):
    run_world(2, save_all, str(tmp_path))
    run_world(3, load_all, str(tmp_path))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_and_offloaded_activations_change_nothing(recipe):
    model = build(recipe, primary=True)

    def recomputed(is_reentrant):
        def forward(x):
            return checkpoint(model, x, use_reentrant=is_reentrant)

        return forward

    def offloaded(x):
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    start, results = mf.training_state(model), []
    before = bytes_of(model)
    for forward in (model, recomputed(True), recomputed(False), offloaded):
        mf.load_training_state(model, start)
        results.append(gradients(model, forward))
    for got in results[1:]:
        for grad, want in zip(got, results[0], strict=True):
            assert torch.equal(grad, want)
    assert all(torch.equal(b, before[name]) for name, b in bytes_of(model).items())


# ---- assignments -----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_assigned_values_are_quantized(recipe, dtype):
    model, other = build(recipe, primary=True), build(recipe, seed=1).to(dtype)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.data = q.detach()
    mf.restore_(other)
    mf.quantize_(other, recipe, primary=True)
    assert all(p.dtype == dtype for p in model.parameters())
    assert_same_bytes(model, other, "assigned")


def test_a_weight_is_swapped_out_and_in():
    model = build("nvfp4", primary=True)
    wanted = copy.deepcopy(model)
    kept = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    assert not model(batch(0)).any()
    for p, old in zip(model.parameters(), kept, strict=True):
        p.data = old
    assert_same_bytes(model, wanted, "swapped in again")


def test_parameters_from_a_vector():
    model, other = build("mxfp8", primary=True), build("mxfp8", seed=1)
    vector = nn.utils.parameters_to_vector(other.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    mf.restore_(other)
    mf.quantize_(other, "mxfp8", primary=True)
    assert_same_bytes(model, other, "from a vector")


def test_aliases_take_all_writes_of_one_op():
    weight = mf.QuantizedTensor.from_tensor(torch.randn(64, 64), "mxfp8", "mxfp8")
    values = weight.dequantize()
    torch._foreach_mul_([weight, weight.detach()], 2.0)
    assert torch.equal(weight.dequantize(), 4 * values)


def test_a_truncated_normal_is_refused():
    """Its five ops would be rounded one by one, and values of 1 become infinite."""
    with mf.nn.quantized_model_init("mxfp8"):
        layer = nn.Linear(64, 32)
    with pytest.raises(ValueError, match="draw into a tensor"):
        nn.init.trunc_normal_(layer.weight, std=0.02)
    with torch.no_grad():
        layer.weight.copy_(nn.init.trunc_normal_(torch.empty(layer.weight.shape), std=0.02))
    assert 0.015 < layer.weight.dequantize().std() < 0.025


def test_an_alias_keeps_its_memory():
    weight = build("mxfp8", primary=True)[0].weight
    alias, former = weight.detach(), weight.dequantize()
    weight.data += 1.0  # writes to the memory, then assigns the same memory
    assert torch.equal(alias.dequantize(), weight.dequantize())
    weight.data = former
    assert torch.equal(weight.dequantize(), former)
    assert not torch.equal(alias.dequantize(), former)


@pytest.mark.parametrize(
    "data",
    [torch.zeros(48, 80), torch.zeros(0), torch.zeros(80, 48, dtype=torch.float16)],
    ids=["transposed", "empty", "float16"],
)
def test_what_cannot_be_assigned(data):
    model = build("mxfp8", primary=True)
    wanted = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"data: expected \(80, 48\).*got.*mf.restore_"):
        model[0].weight.data = data
    with pytest.raises(TypeError, match="data: expected a Tensor, got list"):
        model[0].weight.data = [1.0]
    assert_same_bytes(model, wanted, "unchanged")


def test_compiled_code_reads_what_was_assigned():
    model, other = build("mxfp8", primary=True), build("mxfp8", seed=1, primary=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(batch(0))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.data = q.data
    assert torch.equal(compiled(batch(0)), other(batch(0)))


def test_safetensors_refuses_codes(tmp_path):
    model = build("nvfp4", primary=True)
    with pytest.raises(TypeError, match=r"safetensors.*mf.restore_\(model\)"):
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()
    mf.restore_(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()


# ---- AdamW on masters ----------------------------------------------------------------------------


def train_fp32(recipe, make_optimizer, steps, inner):
    """Trains fp32 weights that every forward casts; recipe None: none does."""
    model = unconverted(inner=inner) if recipe is None else build(recipe, inner=inner)
    optimizer, losses = make_optimizer(list(model.parameters())), []
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def train_codes(recipe, make_optimizer, steps, inner):
    """Trains codes that the optimizer itself rounds after each update."""
    model = build(recipe, inner=inner, primary=True)
    optimizer = make_optimizer(list(model.parameters()))
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, None


def train_masters(recipe, make_optimizer, steps, inner):
    """Trains fp32 masters. The model has only codes, cast after each step."""
    masters = [p.detach().clone() for p in build(recipe, inner=inner).parameters()]
    model = build(recipe, inner=inner, primary=True)
    optimizer, losses = make_optimizer(masters), []
    pairs = list(zip(model.parameters(), masters))
    quantized = [(p, m) for p, m in pairs if isinstance(p, mf.QuantizedTensor)]
    weights = [p for p, _ in quantized]
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        loss.backward()
        for p, master in pairs:
            master.grad, p.grad = p.grad, None
        optimizer.step()
        mf.distributed.quantize_master_weights(
            weights, [m.flatten() for _, m in quantized], [0] * len(weights), None
        )
        mf.distributed.post_all_gather_processing(weights)
        for p, master in pairs:
            if not isinstance(p, mf.QuantizedTensor):
                p.data.copy_(master)
        losses.append(loss.item())
    return model, losses


@functools.cache
def plain_losses(make_optimizer, steps, inner):
    """Returns the losses of a model that is not converted."""
    return train_fp32(None, make_optimizer, steps, inner)[1]


def fused_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def require_equal_training(recipe, make_optimizer, steps, inner=80):
    reference, want = train_fp32(recipe, make_optimizer, steps, inner)
    model, losses = train_masters(recipe, make_optimizer, steps, inner)
    plain = plain_losses(make_optimizer, steps, inner)
    bound = loss_error(recipe, 2, plain[0], plain[0], 24 * 33)
    assert plain[-1] + bound < want[0]
    assert max(abs(a - b) for a, b in zip(want, plain, strict=True)) < bound
    assert losses == want
    for p, q in zip(model.parameters(), reference.parameters()):
        if isinstance(p, mf.QuantizedTensor):
            q = mf.QuantizedTensor.from_tensor(q.detach(), *p.specs)
            assert torch.equal(p.dequantize(), q.dequantize())
        else:
            assert torch.equal(p, q)


@pytest.mark.parametrize("recipe", WITH_MASTERS)
def test_fused_adamw_on_masters_equals_adamw_then_a_cast(recipe):
    require_equal_training(recipe, fused_adamw, 100)


def test_codes_alone_lose_the_small_updates_that_masters_keep():
    """Counts the MXFP8 weights that AdamW at 1e-4 changes in 100 steps, for docs/publish.md."""

    def changed(train):
        first = [p.detach() for p in build("mxfp8", primary=True).parameters()]
        model, _ = train("mxfp8", lambda p: torch.optim.AdamW(p, lr=1e-4), 100, 80)
        weights = [
            (a.dequantize(), mf.QuantizedTensor.from_tensor(b.float(), *a.specs).dequantize())
            for a, b in zip(first, model.parameters(), strict=True)
            if isinstance(a, mf.QuantizedTensor)
        ]
        return sum((a != b).sum().item() for a, b in weights) / sum(a.numel() for a, _ in weights)

    assert changed(train_codes) < 0.05
    assert changed(train_masters) == changed(train_fp32) > 0.5


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_rowwise"])
def test_torchaos_8_bit_adamw_on_masters(recipe):
    """Trains weights of at least 4096 elements, a multiple of 256: torchao's states have 8 bits."""
    torchao = pytest.importorskip("torchao.optim")
    made = []

    def of_8_bits(parameters):
        made.append(torchao.AdamW8bit(parameters, lr=1e-3))
        return made[-1]

    with torch.compiler.set_stance("force_eager"):
        require_equal_training(recipe, of_8_bits, 20, inner=256)
    for optimizer in made:
        states = [type(state["exp_avg"]).__name__ for state in optimizer.state.values()]
        assert states.count("OptimState8bit") == 2
