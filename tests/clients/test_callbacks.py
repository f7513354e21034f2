"""The callbacks of minifloat.transformers and minifloat.lightning: what they check and call.

tests/clients/test_examples.py resumes whole runs with them.
"""

import math
from types import SimpleNamespace

import minifloat as mf
import pytest
import pytorch_lightning as pl
import torch
from minifloat import lightning, transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer


def converted(recipe="fp8_delayed"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32))
    mf.quantize_(model, recipe)
    return model


def at_step(step, folder, saves=True):
    """Returns the arguments of a callback's method that it reads: arguments, state, control."""
    arguments = SimpleNamespace(output_dir=str(folder), should_save=saves)
    return arguments, SimpleNamespace(global_step=step, is_hyper_param_search=False), None


def test_the_state_is_saved_and_loaded(tmp_path):
    model, other, callback = converted(), converted(), transformers.TrainingStateCallback()
    callback.on_train_begin(*at_step(0, tmp_path), model=model)
    model(torch.randn(8, 32)).sum().backward()
    before = mf.training_state(model)["0.amax_history"]
    callback.on_step_end(*at_step(1, tmp_path), model=model)
    state = mf.training_state(model)
    assert not torch.equal(state["0.amax_history"], before)  # mf.step was called
    callback.on_save(*at_step(1, tmp_path, saves=False), model=model)
    assert not (tmp_path / "checkpoint-1").exists()
    callback.on_save(*at_step(1, tmp_path), model=model)
    for again in (callback, transformers.TrainingStateCallback(tmp_path / "checkpoint-1")):
        other = converted()
        folder = tmp_path if again is callback else tmp_path / "elsewhere"
        again.on_train_begin(*at_step(1, folder), model=other)
        for name, tensor in mf.training_state(other).items():
            assert torch.equal(tensor, state[name])


def test_another_runs_checkpoint_is_an_error(tmp_path):
    """output_dir has a checkpoint of the same step, and the Trainer has loaded another folder's."""
    model, callback = converted(), transformers.TrainingStateCallback()
    callback.on_save(*at_step(1, tmp_path), model=model)
    save_file(model.state_dict(), tmp_path / "checkpoint-1/model.safetensors")
    with torch.no_grad():
        model[0].weight[0, 0] += 1
    message = r"expected the weights of .*checkpoint-1, got a model with another 0\.weight.*folder="
    with pytest.raises(ValueError, match=message):
        callback.on_train_begin(*at_step(1, tmp_path), model=model)


@pytest.mark.parametrize("adapter", ["default", "other"])
def test_another_runs_adapters_are_an_error(adapter, tmp_path):
    """A checkpoint of PEFT has adapters alone."""
    config = LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    model, callback = (
        get_peft_model(converted(), config, adapter),
        transformers.TrainingStateCallback(),
    )
    callback.on_save(*at_step(1, tmp_path), model=model)
    model.save_pretrained(tmp_path / "checkpoint-1")
    callback.on_train_begin(*at_step(1, tmp_path), model=model)
    with torch.no_grad():
        model.base_model.model[0].lora_A[adapter].weight[0, 0] += 1
    message = r"expected the weights of .*checkpoint-1, got a model with another .*lora_A.*folder="
    with pytest.raises(ValueError, match=message):
        callback.on_train_begin(*at_step(1, tmp_path), model=model)


def test_adapters_that_are_not_active_are_compared(tmp_path):
    config = LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    model, callback = get_peft_model(converted(), config), transformers.TrainingStateCallback()
    model.add_adapter("other", config)
    model.set_adapter("other")
    callback.on_save(*at_step(1, tmp_path), model=model)
    model.save_pretrained(tmp_path / "checkpoint-1")
    callback.on_train_begin(*at_step(1, tmp_path), model=model)
    with torch.no_grad():
        model.base_model.model[0].lora_A["default"].weight[0, 0] += 1
    with pytest.raises(ValueError, match="got a model with another"):
        callback.on_train_begin(*at_step(1, tmp_path), model=model)


def test_values_that_are_nan_are_those_of_the_checkpoint(tmp_path):
    model, callback = converted(), transformers.TrainingStateCallback()
    model.register_buffer("bounds", torch.tensor([-math.inf, math.nan]))
    callback.on_save(*at_step(1, tmp_path), model=model)
    save_file(model.state_dict(), tmp_path / "checkpoint-1/model.safetensors")
    callback.on_train_begin(*at_step(1, tmp_path), model=model)


def test_a_checkpoint_without_the_state_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"checkpoint-7.{transformers.FILE}.*folder="):
        transformers.TrainingStateCallback().on_train_begin(
            *at_step(7, tmp_path), model=converted()
        )
    with pytest.raises(KeyError, match=lightning.KEY):
        lightning.TrainingStateCallback().on_load_checkpoint(None, converted(), {"state_dict": {}})


def test_checkpoints_without_the_callback_are_an_error(tmp_path):
    arguments, *rest = at_step(0, tmp_path)
    arguments.enable_jit_checkpoint = True
    with pytest.raises(ValueError, match="expected enable_jit_checkpoint=False"):
        transformers.TrainingStateCallback().on_train_begin(arguments, *rest, model=converted())


def test_trials_of_a_search_are_saved_without_the_state(tmp_path):
    arguments, state, _ = at_step(1, tmp_path)
    state.is_hyper_param_search = True
    transformers.TrainingStateCallback().on_save(arguments, state, None, model=converted())
    assert not any(tmp_path.iterdir())


def test_copies_that_peft_trains_draw_the_bits_of_their_layer():
    """Of a layer and its copies one runs."""
    config = LoraConfig(r=4, target_modules=["0"], modules_to_save=["1"])
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    mf.quantize_(model, "nvfp4", keep="nothing")
    model = get_peft_model(model, config)
    model.add_adapter("other", config)
    model(torch.randn(16, 32)).sum().backward()
    mf.step(model)


def test_a_model_without_converted_layers_is_an_error(tmp_path):
    plain = nn.Sequential(nn.Linear(32, 32))
    for model in (plain, None):
        with pytest.raises(ValueError, match="expected a model that mf"):
            transformers.TrainingStateCallback().on_train_begin(*at_step(0, tmp_path), model=model)
    with pytest.raises(ValueError, match="TrainingStateCallback: expected a model"):
        lightning.TrainingStateCallback().on_train_start(SimpleNamespace(global_step=0), plain)


class Overflows(nn.Module):
    """A model of the Trainer, whose second step has an Inf in the gradient of its layer."""

    def __init__(self):
        super().__init__()
        self.net, self.steps = converted(), 0

    def forward(self, x, labels=None):
        self.steps += 1
        loss = self.net(x).square().mean()
        return {"loss": loss * (math.inf if self.steps == 2 else 1)}


def trainer_of(model, folder, settings=(), **options):
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        **{"save_strategy": "no", **dict(settings)},
    )
    data = [{"x": torch.randn(32), "labels": 0} for _ in range(12)]
    callback = transformers.TrainingStateCallback(**options)
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=[callback])


def test_a_trainer_skips_and_raises(tmp_path):
    model = Overflows()
    with pytest.warns(UserWarning, match="step 2: 2 of 2 gradients are not finite"):
        trainer_of(model, tmp_path, on_nonfinite="skip").train()
    assert model.steps == 3
    assert all(p.isfinite().all() for p in model.parameters())
    assert mf.training_state(model)["net.0.amax_history"].isfinite().all()
    model = Overflows()
    trainer = trainer_of(model, tmp_path, on_nonfinite="raise")
    with pytest.raises(FloatingPointError, match="step 2: 2 of 2 gradients"):
        trainer.train()
    assert all(p.isfinite().all() for p in model.parameters())
    trainer.train()  # its callback makes a new guard


class Evaluated(nn.Module):
    """A model of the Trainer, whose first checkpoint is the best under greater_is_better."""

    def __init__(self):
        super().__init__()
        self.net = converted()

    def forward(self, x, labels=None):
        out = self.net(x)
        return {"loss": out.square().mean(), "logits": out}


BEST = {
    "save_strategy": "steps",
    "eval_strategy": "steps",
    "save_steps": 1,
    "eval_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
    "learning_rate": 1e-2,
}


def test_the_best_checkpoint_is_loaded_with_its_state(tmp_path):
    model = Evaluated()
    trainer = trainer_of(model, tmp_path, BEST)
    trainer.train()
    best, last = (tmp_path / f"checkpoint-{number}" / transformers.FILE for number in (1, 3))
    assert trainer.state.best_model_checkpoint == str(best.parent)
    key = "net.0.amax_history"
    assert torch.equal(mf.training_state(model)[key], load_file(best)[key])
    assert not torch.equal(load_file(best)[key], load_file(last)[key])


def test_a_best_checkpoint_that_is_not_loaded_is_an_error(tmp_path):
    trainer = trainer_of(Evaluated(), tmp_path, BEST)
    trainer._load_best_model = lambda: None
    with pytest.raises(ValueError, match=r"expected the weights of .*checkpoint-1, got a model"):
        trainer.train()
    trainer.state.is_hyper_param_search = True  # a trial that a search has ended
    trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    trainer.state.is_hyper_param_search = False
    (tmp_path / "checkpoint-1" / transformers.FILE).unlink()
    with pytest.warns(UserWarning, match="checkpoint-1 has no .*keeps the state of the last step"):
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = converted()
        self.rolls = []

    def training_step(self, x, index):
        self.rolls.append(mf.training_state(self)["net.0.amax_history"].clone())
        return self.net(x[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(module, folder, **options):
    data = DataLoader(TensorDataset(torch.randn(24, 32)), batch_size=4)
    pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    ).fit(module, data)


class OverflowsOnce(Module):
    """The gradient of its bias is Inf in the second step, which clipping would spread."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)

    def on_after_backward(self):
        if len(self.rolls) == 2:
            self.net[0].bias.grad[3] = math.nan


def test_lightning_skips_and_raises(tmp_path):
    module = OverflowsOnce()
    skips = lightning.TrainingStateCallback(on_nonfinite="skip")
    with pytest.warns(UserWarning, match=r"step 2: 1 of 2 gradients .* that of net\.0\.bias"):
        fit(module, tmp_path, callbacks=[skips], gradient_clip_val=1.0)
    assert all(p.isfinite().all() for p in module.parameters())
    module = OverflowsOnce()
    raises = lightning.TrainingStateCallback(on_nonfinite="raise")
    with pytest.raises(FloatingPointError, match=r"step 2: 1 of 2"):
        fit(module, tmp_path, callbacks=[raises], gradient_clip_val=1.0)
    assert all(p.isfinite().all() for p in module.parameters())


class Unwrapped(Module):
    """It steps an optimizer that Lightning does not count."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, x, index):
        optimizer = self.trainer.optimizers[0]
        optimizer.zero_grad()
        self.manual_backward(super().training_step(x, index))
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Both(Unwrapped):
    """It steps one that Lightning counts too."""

    def training_step(self, x, index):
        super().training_step(x, index)
        _, counted = self.optimizers()
        counted.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.0) for _ in range(2)]


def test_lightning_ends_steps_of_optimizers_that_it_does_not_wrap(tmp_path):
    module = Unwrapped()
    fit(module, tmp_path, callbacks=[lightning.TrainingStateCallback()])
    assert not torch.equal(module.rolls[1][:, 0], module.rolls[0][:, 0])
    for module in (Unwrapped(), Both()):
        guarded = lightning.TrainingStateCallback(on_nonfinite="skip")
        with pytest.raises(RuntimeError, match="expected steps of Lightning's optimizers, got one"):
            fit(module, tmp_path, callbacks=[guarded])


def test_lightning_leaves_no_hook_after_an_error(tmp_path):
    class Fails(Module):
        def training_step(self, x, index):
            if index == 2:
                raise KeyError("a fault of the data")
            return super().training_step(x, index)

        def configure_optimizers(self):
            return optimizer

    module = Fails()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    callback = lightning.TrainingStateCallback(on_nonfinite="skip")
    with pytest.raises(KeyError, match="a fault of the data"):
        fit(module, tmp_path, callbacks=[callback])
    assert not optimizer._optimizer_step_post_hooks
    assert callback.guard is None


def test_lightning_ends_a_step_after_the_last_micro_batch(tmp_path):
    module = Module()
    callback = lightning.TrainingStateCallback()
    fit(module, tmp_path, callbacks=[callback], accumulate_grad_batches=3)
    active = [history[:, 0] for history in module.rolls]  # that casts take their scale from
    assert len(active) == 6
    assert torch.equal(active[1], active[0])
    assert torch.equal(active[2], active[0])
    assert not torch.equal(active[3], active[0])
    assert torch.equal(active[4], active[3])
    assert torch.equal(active[5], active[3])
