"""Megatron-Core's models under minifloat's recipes (docs/megatron.md).

    with minifloat.megatron.backend():
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    model = GPTModel(config, spec, …)
    mf.quantize_(model, "mxfp8")

mf.quantize_ converts models of Megatron's local specs too.
"""

from . import versions  # first: it checks the version
from .codes import gather_codes
from .specs import SpecProvider, backend
