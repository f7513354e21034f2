"""Experts of transformers and torchtitan that are taken by their class and the source of its code.

A class is here with the digest of each version of the code that its conversion replaces: its
forward, its _apply_gate, and the functions that these call. Another digest is another version: the
class is then compared as an unknown one is (same_forward.py).

The digest also tells the form of the experts: which attributes a conversion reads. Any others that
an instance has, such as a bias, are not read by the class either.

tests/clients/test_transformers_experts.py compares every digest here, in full. It fails where a
class of the installed transformers has a digest that is not here, and prints it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...nn.convert.foreign_code import code_of, digest_of, parts_of
from ...nn.convert.reads import hook_of
from .implementations import code_starts

# From digests to classes of transformers: X.C is transformers.models.X.modeling_X.C.
PROJECTIONS = {
    # act_fn(gate) * up
    "2f36c23a52c190b9": """
        afmoe.AfmoeExperts axk1.AXK1Experts axk2.AXK2Experts
        bailing_hybrid.BailingHybridExperts cohere2_moe.Cohere2MoeExperts
        deepseek_ocr2.DeepseekOcr2TextExperts deepseek_v2.DeepseekV2Experts
        deepseek_v3.DeepseekV3Experts deepseek_v32.DeepseekV32Experts
        diffusion_gemma.DiffusionGemmaTextExperts dots1.Dots1Experts
        ernie4_5_moe.Ernie4_5_MoeExperts ernie4_5_vl_moe.Ernie4_5_VLMoeMoeExperts
        exaone_moe.ExaoneMoeExperts flex_olmo.FlexOlmoExperts gemma4.Gemma4TextExperts
        glm4_moe.Glm4MoeExperts glm4_moe_lite.Glm4MoeLiteExperts
        glm4v_moe.Glm4vMoeTextExperts glm_moe_dsa.GlmMoeDsaExperts
        granitemoe.GraniteMoeExperts granitemoe_swa.GraniteMoeSWAExperts
        granitemoehybrid.GraniteMoeHybridExperts granitemoeshared.GraniteMoeSharedExperts
        hunyuan_v1_moe.HunYuanMoEV1Experts hy_v3.HYV3Experts inkling.InklingExperts
        jamba.JambaExperts kimi_linear.KimiLinearExperts kolibri1.Kolibri1Experts
        laguna.LagunaExperts lfm2_moe.Lfm2MoeExperts mellum.MellumExperts
        mimo_v2_flash.MiMoV2FlashExperts minimax.MiniMaxExperts minimax_m2.MiniMaxM2Experts
        mistral4.Mistral4Experts mixtral.MixtralExperts olmoe.OlmoeExperts
        phimoe.PhimoeExperts qwen2_moe.Qwen2MoeExperts qwen3_5_moe.Qwen3_5MoeExperts
        qwen3_moe.Qwen3MoeExperts qwen3_next.Qwen3NextExperts
        qwen3_omni_moe.Qwen3OmniMoeThinkerTextExperts
        qwen3_omni_moe.Qwen3OmniMoeTalkerTextExperts qwen3_vl_moe.Qwen3VLMoeTextExperts
        qwen4_exp.Qwen4ExpTextExperts solar_open.SolarOpenExperts
        unlimited_ocr.UnlimitedOcrTextExperts zaya.ZayaExperts
    """,
    # act_fn(gate) * up, row-major
    "592cb0db227a51cf": "aria.AriaExperts",
    # by the class's own _apply_gate
    "4dfe9fa56939e46d": "beam.BeamExperts",
    # by the class's own _apply_gate
    "e850a536f8ec275c": "deepseek_v4.DeepseekV4Experts",
    # by the class's own _apply_gate
    "0b04a9b84bd1a5f7": "glm5_next.Glm5NextTextExperts hy_v4.HYV4Experts",
    # gpt-oss's clamped SwiGLU, interleaved
    "5dbec57623bccb40": "gpt_oss.GptOssExperts",
    # act_fn(gate) * up, row-major, of rows in even groups
    "f3374fdc2c4d2cd4": "llama4.Llama4TextExperts",
    # by the class's own _apply_gate
    "472e07c48d173b60": "minimax_m3_vl.MiniMaxM3VLExperts",
    # gpt-oss's clamped SwiGLU, gate first
    "50bba0463b8c2a7c": "openai_privacy_filter.OpenAIPrivacyFilterExperts",
    # by the class's own _apply_gate
    "ac3e7f0d7caedc2a": "step3p7.Step3p7Experts",
}
# Of the digests above, those of gpt-oss's clamped SwiGLU by the attributes limit and alpha, whose
# products have biases; and whether gate and up alternate. All other classes have no biases.
CLAMPED = {"5dbec57623bccb40": True, "50bba0463b8c2a7c": False}
COUNTED = {"680d21803762c976": ("torchtitan.models.moe.moe", "GroupedExperts")}

KNOWN = {
    (f"transformers.models.{family}.modeling_{family}", name): digest
    for digest, names in PROJECTIONS.items()
    for family, name in (entry.split(".") for entry in names.split())
} | {cls: digest for digest, cls in COUNTED.items()}


ACTIVATIONS = "transformers.activations"
# torch's activations that compute each element by itself and draw no random numbers.
OF_TORCH = {
    *("CELU", "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid"),
    *("Mish", "ReLU", "ReLU6", "SELU", "Sigmoid", "SiLU", "Softplus", "Softsign", "Tanh"),
    *("celu", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid"),
    *("mish", "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softsign", "tanh"),
}
CODE_OF_TORCH = ("torch._C._nn", "torch.nn.functional", "functools")  # functools.partial itself


def known_digest(module: nn.Module) -> str | None:
    """Returns the digest of a module whose class's code is known to compute what its form does.

    None for any other. The functions and submodules that the code calls have to be torch's or
    transformers' own: its source says nothing about them.
    """
    cls = type(module)
    digest = KNOWN.get((cls.__module__, cls.__qualname__))
    code = code_of(cls, *code_starts(module))
    if digest is None or digest_of(code) != digest:
        return None
    attributes = {**module.__dict__, **module._modules}
    called = [attributes[name] for name in code.names if callable(attributes.get(name))]
    return digest if all(map(is_activation, called)) else None


def is_activation(value: Any) -> bool:
    """Tells whether a function or module is an activation of torch or transformers, unchanged."""
    if not isinstance(value, nn.Module):
        owners = (torch, nn.functional)
        return any(value is getattr(owner, name, None) for owner in owners for name in OF_TORCH)
    cls, forward = type(value), type(value).forward
    is_own = cls.__module__ == ACTIVATIONS
    is_own |= cls.__name__ in OF_TORCH and cls is getattr(nn, cls.__name__, None)
    tables = (value._parameters, value._buffers, value._modules)
    if not is_own or any(tables) or hook_of(value) is not None or "forward" in value.__dict__:
        return False
    for function in (forward, *value.__dict__.values()):
        for part in filter(callable, parts_of(function)):
            if defining_module(part) not in (cls.__module__, *CODE_OF_TORCH):
                return False
    return True


def defining_module(function: Any) -> str | None:
    """Returns the name of the module that has a function's code, whatever module it is used for."""
    function = getattr(function, "__func__", function)
    scope = getattr(function, "__globals__", {"__name__": getattr(function, "__module__", None)})
    found: str | None = scope["__name__"]
    return found
