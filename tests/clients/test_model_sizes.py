"""`minifloat doctor --model` reads a config as transformers builds its model, or refuses it."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import fields

import pytest
import torch
from minifloat.doctor.model_sizes import KINDS, read_sizes
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers import logging as transformers_logging

transformers_logging.set_verbosity_error()
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# All different, and other than any class's own.
SIZES = {
    "vocab_size": 352,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
}
OF_EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "intermediate_size_mlp": 224,
    "interleave_moe_layer_step": 2,
}
# Routers, and what a model with images has beside its decoder.
NOT_READ = re.compile(r"\.(gate|router|shared_expert_gate)\.weight$|vision|multi_modal_projector")
# What may be absent alone. A class fills in its own default, which other sizes may not fit.
READ = {"head_dim", *OF_EXPERTS, "tie_word_embeddings", "moe_layers"}
# Their classes have null, which builds no model.
NO_DEFAULT = {"dots1": ("n_routed_experts", "num_experts_per_tok", "n_shared_experts")}


def tiny_config(kind, is_tied):
    """Returns the config.json of a small model, as transformers saves it."""
    known = AutoConfig.for_model(kind).to_dict()
    given = {name: value for name, value in OF_EXPERTS.items() if name in known}
    config = AutoConfig.for_model(kind, **TOKENS, **SIZES, **given, tie_word_embeddings=is_tied)
    return json.loads(config.to_json_string())


def read(config, folder):
    (folder / "config.json").write_text(json.dumps(config))
    return read_sizes(str(folder))


def built_weights(config, build=AutoModelForCausalLM.from_config):
    """Counts the shapes of the weights of transformers' model, the smaller dimensions first."""
    with torch.device("meta"):
        model = build(AutoConfig.for_model(**config))
    named = [(name, p.shape) for name, p in model.named_parameters() if p.dim() > 1]
    return Counter(tuple(sorted(s)) for name, s in named if not NOT_READ.search(name))


def read_weights(sizes):
    found = Counter()
    for part in sizes.parts():
        for n in part.ns:
            found[tuple(sorted((part.experts, n, part.k)[not part.experts :]))] += part.count
    if sizes.other_weights:
        found[tuple(sorted((sizes.vocab, sizes.hidden)))] += 1
    return found


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_that_transformers_builds(kind, is_tied, tmp_path):
    config = tiny_config(kind, is_tied)
    assert read_weights(read(config, tmp_path)) == built_weights(config)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_absent_has_the_default_of_transformers(kind, tmp_path):
    whole, no_default = tiny_config(kind, not KINDS[kind].tied), NO_DEFAULT.get(kind, ())
    for name in READ & whole.keys():
        config = {key: value for key, value in whole.items() if key != name}
        if name in no_default:
            with pytest.raises(ValueError, match=rf"\b{name} .*as an integer of at .*, got none"):
                read(config, tmp_path)
        else:
            assert read_weights(read(config, tmp_path)) == built_weights(config), name


@pytest.mark.parametrize("kind", KINDS)
def test_all_sizes_may_be_absent(kind, tmp_path):
    given = {name: OF_EXPERTS[name] for name in NO_DEFAULT.get(kind, ())}
    config = {"model_type": kind, "num_hidden_layers": 3, **given, **TOKENS}
    assert read_weights(read(config, tmp_path)) == built_weights(config)
    layers = AutoConfig.for_model(kind).num_hidden_layers  # a model of all is slow to build
    del config["num_hidden_layers"]
    assert read(config, tmp_path).layers == layers


@pytest.mark.parametrize("kind", KINDS)
def test_null_is_read_as_transformers_does_or_refused(kind, tmp_path):
    own = {each.name: each.default for each in fields(AutoConfig.for_model(kind))}
    for name in {"num_key_value_heads", "head_dim"} & own.keys():
        config = {**tiny_config(kind, False), name: None}
        try:
            sizes = read(config, tmp_path)
        except ValueError:
            assert own[name] is not None
        else:
            assert read_weights(sizes) == built_weights(config), name


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("whole", "kind"), [("llama4", "llama4_text"), ("gemma3", "gemma3_text")])
@pytest.mark.parametrize("absent", [(), ("num_attention_heads", "num_key_value_heads", "head_dim")])
def test_the_decoder_of_a_model_with_images(whole, kind, absent, is_tied, tmp_path):
    text = AutoConfig.for_model(**tiny_config(kind, is_tied))
    config = AutoConfig.for_model(whole, text_config=text, **TOKENS, tie_word_embeddings=is_tied)
    config = json.loads(config.to_json_string())
    for name in absent:  # Gemma 3's config.json leaves those out that are its class's own
        del config["text_config"][name]
    built = built_weights(config, AutoModelForImageTextToText.from_config)
    sizes = read(config, tmp_path)
    assert (read_weights(sizes), sizes.section) == (built, "text_config")
