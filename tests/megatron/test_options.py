"""Megatron-Core's options of low precision: each is refused, follows one that is, or works."""

import dataclasses
import re

import pytest

from tests.support import megatron_models as models
from tests.support.worlds import run_world

pytest.importorskip("megatron.core")

NAMES = re.compile(r"fp8|fp4|quant(iz|_)|kitchen|bf16|_te_|transformer_engine|amax")
# Megatron reads these only where an option of low precision is set that is refused.
FOLLOW = {
    "fp8_recipe",
    "fp8_param",
    "fp8_quantizer_factory",
    "fp8_margin",
    "fp8_interval",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_wgrad",
    "fp8_output_proj",
    "fp4_recipe",
    "fp4_param",
    "fp4_quantizer_factory",
    "tp_only_amax_red",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "use_kitchen_attention",
    "kitchen_attention_backend",
    "moe_router_padding_for_fp8",
    "moe_router_padding_for_quantization",
}
# Megatron's own code does these, for converted layers too, or only where it serves a model.
WORK = {
    "bf16",
    "activation_func_fp8_input_store",
    "disable_bf16_reduced_precision_matmul",
    "use_te_rng_tracker",
    "inference_moe_disable_fused_quant_kernels",
}


def check_options(rank):
    from megatron.core.transformer import TransformerConfig
    from minifloat.megatron.linear import OF_TRANSFORMER_ENGINE, reason_of_config

    models.begin()
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    found = {name for name in known if NAMES.search(name)}
    assert sorted(found - {*OF_TRANSFORMER_ENGINE} - FOLLOW - WORK) == []
    of = models.config()
    for option in {*OF_TRANSFORMER_ENGINE} & known:
        before = getattr(of, option)
        setattr(of, option, True)
        assert reason_of_config(of).startswith(f"{option}=True of the TransformerConfig")
        setattr(of, option, before)
    assert reason_of_config(of) is None


def test_each_option_of_low_precision_is_known():
    run_world(1, check_options)
