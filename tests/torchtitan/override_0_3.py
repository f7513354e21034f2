"""minifloat.torchtitan on torchtitan 0.3, which needs a newer torch: run by its own make target.

    make test-torchtitan-0.3

torchtitan 0.3 has no attention whose gradient runs on a CPU, so torch's own stands in for it here.
"""

import minifloat as mf
import pytest
import torch
import torch.nn.functional as F

from tests.support.titan_job import stand_in_for_datasets

stand_in_for_datasets()  # before an import of torchtitan

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402

TARGET = "minifloat.torchtitan.override.quantize"
CONVERTED = {
    "llama3": 6 * 5,  # wqkv is one layer
    "deepseek_v3": 6 * 4 + 3 + 5 * (3 + 3),
}


def config_of(name, **settings):
    """Returns the trainer's config of a debug model, after the override."""
    from importlib import import_module

    registry = import_module(f"torchtitan.models.{name}.config_registry")
    config = getattr(registry, f"{name}_debugmodel")()
    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    lines = apply_overrides(OverrideConfig(imports=[(TARGET, settings)]), config)
    assert len(lines) == 1
    assert config.model_spec.model is model_config, "torchtitan builds the object that it had"
    return config


def built(name, **settings):
    """Builds a debug model as torchtitan's trainer does, on the CPU."""
    config = config_of(name, **settings)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model, config


def states_of(model):
    kinds = (mf.Linear, mf.nn.grouped_product.GroupedProduct)
    return [m for m in model.modules() if isinstance(m, kinds)]


def attend(q, k, v, **options):
    """Computes causal attention of (B, L, heads, width)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scale = options.get("scale")
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return y.transpose(1, 2)


def train_step(model, config):
    for block in model.layers.values():
        block.attention.inner_attention.forward = attend
    tokens = torch.randint(0, 2048, (2, 64), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(64).expand(2, 64)
    y = model(tokens, positions=positions)
    F.cross_entropy(y.flatten(0, 1).float(), tokens.flatten()).backward()
    optimizers = config.optimizer.build(model_parts=[model])
    optimizers.step()
    return y


@pytest.mark.parametrize("name", CONVERTED)
def test_builds_and_trains_debug_models(name):
    model, config = built(name, recipe="fp8_delayed")
    layers = states_of(model)
    assert len(layers) == CONVERTED[name]
    assert all(isinstance(layer, Module) for layer in layers)
    assert not isinstance(model.lm_head, mf.Linear)
    y = train_step(model, config)
    assert y.isfinite().all()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
    for layer in layers:  # mf.step has run once
        history = layer.amax_history
        assert (history[..., 1] == 0).all(), layer.fqn
        assert (history[..., 0] > 0).any(), layer.fqn


def test_takes_maps_and_filters():
    model, _ = built("llama3", recipe="*: nvfp4; layers.5.*: mxfp8", filter_fqns=["wqkv"])
    found = {layer.fqn: layer.recipe.text for layer in states_of(model)}
    assert found["layers.5.feed_forward.w1"] == "mxfp8"
    assert found["layers.1.feed_forward.w1"] == "nvfp4"
    assert not any("wqkv" in fqn for fqn in found)


def test_refuses_settings():
    with pytest.raises(ValueError, match="expected a recipe"):
        config_of("llama3")
    with pytest.raises(TypeError, match="recipes"):
        config_of("llama3", recipes="nvfp4")


def test_refuses_parallelism_that_cuts_layers():
    from types import SimpleNamespace

    model, _ = built("llama3", recipe="mxfp8")
    with pytest.raises(ValueError, match=r"got 2 and 1; torchtitan 0\.2\.x has both"):
        states_of(model)[0].parallelize(SimpleNamespace(tp=2, ep=1))


class Nothing:
    """State that is empty, as torch.distributed.checkpoint saves it."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


def manager_of(model, folder):
    return CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0).build(
        dataloader=Nothing(),
        model_parts=[model],
        optimizers=Nothing(),
        lr_schedulers=Nothing(),
        states={"train_state": Nothing()},
        sd_adapter=None,
        base_folder=str(folder),
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_hold_the_training_state(tmp_path):
    recipe = "*: nvfp4; layers.5.*: fp8_delayed"
    model, config = built("llama3", recipe=recipe)
    manager = manager_of(model, tmp_path)
    train_step(model, config)
    manager.save(1)
    wanted = mf.training_state(model)
    assert wanted["rng"][1] > 0
    assert any(name.startswith("layers.5.") for name in wanted)

    other, _ = built("llama3", recipe=recipe)
    assert manager_of(other, tmp_path).load(step=1)
    found = mf.training_state(other)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
