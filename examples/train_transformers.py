"""Trains a small Llama with Hugging Face's Trainer, and resumes it to the byte.

    pip install transformers accelerate safetensors
    python examples/train_transformers.py [recipe]

The Trainer runs with bf16 autocast, two micro-batches a step and activation checkpointing. A second
Trainer resumes the first one's checkpoint of step 10 and ends with the same weights. The folder
that the Trainer saves loads into a plain Llama, because a converted model has the same keys. To
serve it, `primary=True` replaces its weights by codes, which give the logits of the trained model.
"""

import sys
import tempfile

import minifloat as mf
import torch
from minifloat.transformers import TrainingStateCallback
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

RECIPE = sys.argv[1] if sys.argv[1:] else "fp8_tensorwise"
STEPS, RESUMED = 20, 10


def build_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    mf.quantize_(model, RECIPE)
    return model


def counting_texts():
    """Returns texts in which each token is the next number."""
    texts = [(torch.arange(32) + start) % 64 for start in range(64)]
    return [{"input_ids": text, "labels": text} for text in texts]


def train(folder, resume=None):
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        save_steps=RESUMED,
        logging_steps=1,
        learning_rate=5e-3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        build_model(),
        arguments,
        train_dataset=counting_texts(),
        callbacks=[TrainingStateCallback()],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@torch.no_grad()
def serve(model, trained):
    """Generates with weights that are codes alone, and compares the logits with the trained ones.

    Args:
        model: the saved one, loaded.
        trained: the converted one, in float32 as the loaded one is.
    """
    mf.quantize_(model, RECIPE, primary=True)
    model, trained = model.to(trained.device).eval(), trained.eval()
    ids = torch.arange(8, device=trained.device)[None]
    same = torch.equal(model(ids).logits, trained(ids).logits)
    print("generated:", model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist())
    print("served logits equal:", same)


def main():
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(folder)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss: {float(losses[0]):.3f} -> {float(losses[-1]):.3f}")

        resumed = train(folder, resume=f"{folder}/checkpoint-{RESUMED}")
        pairs = zip(trainer.model.parameters(), resumed.model.parameters(), strict=True)
        print("resumed weights equal:", all(torch.equal(a, b) for a, b in pairs))

        trainer.save_model(f"{folder}/saved")  # safetensors
        plain = LlamaForCausalLM.from_pretrained(f"{folder}/saved")
        saved = trainer.model.state_dict()
        same = all(torch.equal(saved[name], t) for name, t in plain.state_dict().items())
        print("saved weights equal:", same)

        without_autocast = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        serve(plain, without_autocast)


if __name__ == "__main__":
    main()
