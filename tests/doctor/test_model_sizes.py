"""`minifloat doctor --model`: the sizes of a model, from a config or as text, and what is refused.

tests/clients/test_model_sizes.py compares them with the models that transformers builds.
"""

from __future__ import annotations

import json

import pytest
from minifloat.doctor.model_sizes import KINDS, TEXT, ModelSizes, Part, read_sizes

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
SHORT = "hidden=4096,intermediate=14336,layers=32,heads=32,kv_heads=8,vocab=128256"
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
OF_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
QWEN3 = {**LLAMA, **OF_EXPERTS, "model_type": "qwen3_moe"}
QWEN2 = {**QWEN3, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 512}
GLM4 = {
    **LLAMA,
    "model_type": "glm4_moe",
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "n_shared_experts": 2,
    "first_k_dense_replace": 3,
}
LLAMA4 = {
    **MIXTRAL,
    "model_type": "llama4_text",
    "head_dim": 128,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "interleave_moe_layer_step": 2,
}


@pytest.fixture
def read(tmp_path):
    """Reads the sizes of a config in a file."""

    def read(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_sizes(str(tmp_path))

    return read


@pytest.mark.parametrize(
    ("config", "other"),
    [
        (MIXTRAL, "n_routed_experts"),
        (LLAMA4, "num_experts"),
        (QWEN2, "num_local_experts"),
        (QWEN3, "n_routed_experts"),
        (GLM4, "num_experts"),
    ],
)
def test_a_name_that_transformers_does_not_read_is_no_number_of_experts(read, config, other):
    own = {"num_experts", "num_local_experts", "n_routed_experts"}
    config = {name: value for name, value in config.items() if name not in own}
    assert read({**config, other: 16}) == read(config)


def weights_of(sizes):
    return sum(part.count * part.weights for part in sizes.parts()) + sizes.other_weights


# ---- What is read --------------------------------------------------------------------------------
def test_a_llama(read, tmp_path):
    sizes = read(LLAMA)
    assert sizes == ModelSizes(4096, 14336, 32, 32, 8, 128, 128256)
    assert sizes == read_sizes(str(tmp_path / "config.json"))
    assert sizes == read_sizes(SHORT) == read_sizes(SHORT.replace(",", ", "))
    assert weights_of(sizes) == 8030261248 - 65 * 4096  # Llama3-8B's parameters without its norms
    assert [(p.name, p.count, p.is_converted) for p in sizes.parts()] == [
        ("q, k, v", 32, True),
        ("o", 32, True),
        ("gate, up", 32, True),
        ("down", 32, True),
        ("head", 1, False),
    ]


def test_the_text_part_of_a_model_with_images(read):
    config = {"model_type": "llava", "text_config": LLAMA, "vision_config": {"hidden_size": 1024}}
    sizes = read(config)
    assert sizes == ModelSizes(4096, 14336, 32, 32, 8, 128, 128256, section="text_config")
    gemma = {**LLAMA, "model_type": "gemma3_text", "head_dim": 256}
    del gemma["tie_word_embeddings"]
    assert read({**config, "text_config": gemma}).tied
    assert not read({**config, "text_config": gemma, "tie_word_embeddings": False}).tied


def test_heads_without_a_size_or_a_number_of_their_own(read):
    assert read({**LLAMA, "head_dim": None}).head_dim == 128
    assert read({**LLAMA, "head_dim": 64}).parts()[:2] == [
        Part("q, k, v", 4096, (2048, 512, 512), 32),
        Part("o", 2048, (4096,), 32),
    ]
    assert read_sizes(SHORT.replace("kv_heads=8,", "")).kv_heads == 32


def test_a_tied_head_multiplies_and_has_no_weight_of_its_own(read):
    own, tied = read(LLAMA), read({**LLAMA, "tie_word_embeddings": True})
    assert tied.parts() == own.parts()
    assert weights_of(own) - weights_of(tied) == 128256 * 4096
    assert tied == read_sizes(f"{SHORT},tied=1")


def test_a_mixtral(read):
    sizes = read(MIXTRAL)
    assert sizes.parts()[2:4] == [
        Part("experts' gate, up", 4096, (28672,), 32, experts=8, rows=2),
        Part("experts' down", 14336, (4096,), 32, experts=8, rows=2),
    ]
    assert sizes.gated_widths() == 32 * 2 * 14336
    assert sizes == read_sizes(f"{SHORT},experts=8,experts_per_token=2")


@pytest.mark.parametrize(
    ("config", "dense", "width", "shared"),
    [
        ({**QWEN3, "decoder_sparse_step": 1, "mlp_only_layers": []}, 0, 14336, 0),
        ({**QWEN3, "decoder_sparse_step": 2, "mlp_only_layers": None}, 16, 14336, 0),  # 0, 2, …
        ({**QWEN3, "mlp_only_layers": [0, 31]}, 2, 14336, 0),
        ({**QWEN2, "decoder_sparse_step": 2}, 16, 14336, 512),
        (GLM4, 3, 14336, 2 * 768),
        ({**GLM4, "model_type": "dots1", "first_k_dense_replace": 40}, 32, 14336, 2 * 768),
        (LLAMA4, 16, 16384, 8192),
        ({**LLAMA4, "interleave_moe_layer_step": 1}, 0, 16384, 8192),
        ({**LLAMA4, "moe_layers": [3, 7, 7, 99]}, 30, 16384, 8192),
    ],
)
def test_blocks_with_and_without_experts(read, config, dense, width, shared):
    sizes = read(config)
    counts = {part.name: part.count for part in sizes.parts()}
    assert counts.get("experts' down", 0) == 32 - dense
    assert counts.get("shared down", 0) == (32 - dense if shared else 0)
    assert counts.get("down", 0) == dense
    each, chosen = (8192, 2) if width == 16384 else (768, 8)
    assert sizes.gated_widths() == dense * width + (32 - dense) * (chosen * each + shared)
    for part in sizes.parts():
        if part.name == "experts' down":
            count = 8 if width == 16384 else 128
            assert (part.k, part.ns, part.experts, part.rows) == (each, (4096,), count, chosen)


# ---- What is refused -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "model_type": "bert"},  # no gate
        {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 512},  # low-rank projections
        {**LLAMA, "model_type": "phi3"},  # q, k and v are one layer
        {**LLAMA, "model_type": "llama4"},  # without its text_config
        {**LLAMA, "model_type": ["llama"]},
        {name: value for name, value in LLAMA.items() if name != "model_type"},
        {"model_type": "llama", "text_config": {**LLAMA, "model_type": "nemotron"}},
    ],
)
def test_a_model_type_that_is_not_known(read, config):
    got = repr(config.get("text_config", config).get("model_type"))
    with pytest.raises(ValueError, match="expected model_type as one of cohere, ") as raised:
        read(config)
    where, _, text = str(raised.value).partition("expected ")
    assert where.endswith("config.json: text_config: " if "text_config" in config else "json: ")
    known = f"model_type as one of {', '.join(KINDS)}, got {got}; pass sizes instead if it has "
    assert text == f"{known}q, k, v, o and gated feed-forwards: --model {TEXT}"
    example = TEXT.replace("tied=N", "tied=1").replace("dense_layers=N", "dense_layers=2")
    assert read_sizes(example.replace("=N", "=8")).dense_layers == 2  # what it says is taken


def integer(name, got, least=1):
    return f"expected {name} as an integer of at least {least}, got {got}"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({**LLAMA, "hidden_size": "4096"}, integer("hidden_size", "'4096'")),
        ({**LLAMA, "num_hidden_layers": 0}, integer("num_hidden_layers", 0)),
        ({**LLAMA, "vocab_size": True}, integer("vocab_size", "True")),
        ({**LLAMA, "vocab_size": None}, integer("vocab_size", "none")),
        ({**QWEN3, "num_key_value_heads": None}, integer("num_key_value_heads", "none")),
        ({**LLAMA, "num_key_value_heads": 5}, "heads as a multiple of kv_heads, got 32 and 5"),
        ({**LLAMA, "hidden_size": 16}, "no more heads than the hidden size, got hidden 16 and he"),
        ({**LLAMA, "head_dim": 0}, integer("head_dim", 0)),
        ({**LLAMA, "model_type": "qwen3", "head_dim": None}, integer("head_dim", "none")),
        ({**LLAMA, "tie_word_embeddings": 1}, "expected tie_word_embeddings as true or false, got"),
        ({**MIXTRAL, "num_local_experts": None}, integer("num_local_experts", "none")),
        ({**GLM4, "model_type": "dots1", "n_routed_experts": None}, integer("n_.* or .*", "none")),
        ({**MIXTRAL, "num_experts_per_tok": 9}, r"expected experts_per_token in 1\.\.8, got 9"),
        ({**QWEN3, "mlp_only_layers": 3}, "expected mlp_only_layers as a list of integers, got 3"),
        ({**QWEN3, "mlp_only_layers": [""]}, "expected mlp_only_layers as a list of integers, got"),
        ({**QWEN3, "decoder_sparse_step": 0}, integer("decoder_sparse_step", 0)),
        ({**QWEN3, "moe_intermediate_size": None}, integer("moe_intermediate_size", "none")),
        ({**GLM4, "n_shared_experts": None}, integer("n_shared_experts", "none", 0)),
        ({**GLM4, "first_k_dense_replace": -1}, integer("first_k_dense_replace", -1, 0)),
    ],
)
def test_a_wrong_config(read, config, text):
    with pytest.raises(ValueError, match=f"config.json: .*{text}"):
        read(config)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("no_such_folder", "expected a config.json, a folder with one, or sizes as hidden=N,.*"),
        ("hidden=4096,width=2", "expected sizes as hidden=N,.*; got 'width=2'"),
        ("section=1", "expected sizes as hidden=N,.*; got 'section=1'"),
        ("hidden=-1", "expected sizes as .*; got 'hidden=-1'"),
        ("hidden=²", "expected sizes as .*; got 'hidden=²'"),
        ("hidden=4096,layers=2", "expected intermediate, heads, vocab of at least 1, got hidden"),
        (SHORT.replace("14336", "0"), "expected intermediate of at least 1, got .*intermediate=0,"),
        (f"{SHORT},tied=2", "expected tied as 0 or 1, got 2"),
        (f"{SHORT},dense_layers=2", "expected experts beside dense_layers, got none"),
        (f"{SHORT},experts=8", r"expected experts_per_token in 1\.\.8, got 0"),
        (
            f"{SHORT},experts=8,experts_per_token=2,dense_layers=33",
            r"expected dense_layers in 0\.\.32, got 33",
        ),
    ],
)
def test_a_wrong_text(model, text):
    with pytest.raises(ValueError, match=f"--model: {text}"):
        read_sizes(model)


@pytest.mark.parametrize(
    ("content", "text"),
    [("{", "expected JSON, got Expecting"), ("[1]", "expected a JSON object, got list")],
)
def test_a_file_that_is_no_config(tmp_path, content, text):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"config.json: {text}"):
        read_sizes(str(tmp_path))
