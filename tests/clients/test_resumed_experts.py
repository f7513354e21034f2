"""Resuming Hugging Face's mixtures of experts, whose checkpoints have other names than the model.

The Trainer loads by the model's names, so it leaves experts at their initial values there.
"""

import minifloat as mf
import pytest
import torch
from minifloat.transformers import TrainingStateCallback, require_loaded
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
MODELS = {
    "mixtral": (MixtralForCausalLM, lambda: MixtralConfig(num_local_experts=4, **SIZES)),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        lambda: Qwen3MoeConfig(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16, **SIZES
        ),
    ),
}


def plain(name, seed=0):
    torch.manual_seed(seed)
    kind, config = MODELS[name]
    return kind(config())


def train(model, folder, resume=None):
    mf.quantize_(model, "nvfp4")
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=4,
        save_steps=2,
        learning_rate=5e-3,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    texts = [(torch.arange(32) + start) % 64 for start in range(64)]
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        callbacks=[TrainingStateCallback()],
    )
    trainer.train(resume_from_checkpoint=resume)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_run_is_resumed_to_the_byte_or_refused(name, tmp_path):
    wanted = train(plain(name), str(tmp_path))
    checkpoint = str(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match=r"did not load \d of .*from_pretrained\(.*quantize_"):
        train(plain(name), str(tmp_path), checkpoint)
    resumed = train(MODELS[name][0].from_pretrained(checkpoint), str(tmp_path), checkpoint)
    for (key, got), want in zip(resumed.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(got, want), key


@pytest.mark.parametrize("shard", ["10KB", "1GB"])
def test_one_changed_expert_is_found(shard, tmp_path):
    model = plain("mixtral")
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors").exists() == (shard == "1GB")
    require_loaded(model, tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 0, 0] += 1
    with pytest.raises(ValueError, match="did not load 6 of them"):
        require_loaded(model, tmp_path)


def test_a_checkpoint_in_another_dtype_is_the_models(tmp_path):
    model = plain("mixtral")
    model.save_pretrained(tmp_path)
    require_loaded(model.bfloat16(), tmp_path)


def test_a_tied_head_is_loaded_under_its_other_name(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **SIZES))
    mf.quantize_(model, "nvfp4")
    model.save_pretrained(tmp_path)
    require_loaded(model, tmp_path)


def test_what_the_trainer_does_not_load_by_names_is_not_compared(tmp_path):
    model = plain("mixtral")
    require_loaded(model, tmp_path)  # adapters alone, say
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="did not load"):
        require_loaded(model, tmp_path)
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    require_loaded(model, tmp_path)
