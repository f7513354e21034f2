"""The way from a GPTModel to a folder for servers, by the code of docs/megatron.md."""

import tempfile
from pathlib import Path

import minifloat as mf
import pytest

from tests.support import megatron_models as models
from tests.support.worlds import run_world
from tests.test_code_of_pages import read_blocks

pytest.importorskip("megatron.core")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "megatron.md"


def check_names(rank, folder):
    """Checks that transformers' Llama has the GPTModel's outputs, and that the folder loads."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    models.begin()
    config = models.config(num_query_groups=2)
    model = models.build(config)
    sizes = {"vocab_size": models.VOCABULARY, "hidden_size": config.hidden_size}
    sizes |= {"intermediate_size": config.ffn_hidden_size, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": config.num_layers, "num_key_value_heads": 2}
    sizes |= {"rms_norm_eps": config.layernorm_epsilon}
    names = {"mf": mf, "model": model, "LlamaForCausalLM": LlamaForCausalLM}
    names |= {"llama_config": LlamaConfig(**sizes)}
    (block,) = (b for b in read_blocks(PAGE, PAGE.read_text()) if b.section == "Serve it")
    code = block.code.replace('"served"', repr(folder))
    exec(code, names)
    tokens, positions, _ = models.batch(0)
    plain = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()
    plain.load_state_dict(names["to_hugging_face"](model))
    want, got = model(tokens, positions, None), plain(tokens).logits
    # The same sums of bfloat16 products in other orders, rounded to bfloat16 between layers.
    assert (got - want).abs().max() <= 2.0**-6 * want.abs().max()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    served = loaded(tokens).logits.float()
    assert (served - names["served"](tokens).logits.float()).abs().max() < 0.1 * want.abs().max()


def test_a_trained_model_is_served():
    with tempfile.TemporaryDirectory() as folder:
        run_world(1, check_names, f"{folder}/served")
