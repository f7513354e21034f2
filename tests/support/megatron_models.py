"""Small models of Megatron-Core on the CPU, and its groups of ranks, for tests/megatron.

begin(tp=2, pp=1, ep=1)     Megatron's groups of a world; again for another layout
build(config(), "te")       a GPTModel with the names of Transformer Engine's modules
loss(model, step)           of a batch that follows from the step and the data-parallel rank
"""

import multiprocessing
import queue
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

VOCABULARY, TOKENS, BATCH, WIDTH = 96, 32, 2, 64
SIZES = {
    "num_layers": 2,
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "ffn_hidden_size": 2 * WIDTH,
}
MLA = {
    "multi_latent_attention": True,
    "rope_type": "rope",
    "q_lora_rank": 64,
    "kv_lora_rank": 48,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": WIDTH,
    "moe_token_dispatcher_type": "alltoall",
}


@cache
def on_cpu():
    """Gives Megatron-Core the CPU, once a process."""
    warnings.filterwarnings("ignore", module="megatron")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import minifloat.megatron  # noqa: F401, which `import minifloat` leaves out
    from megatron_on_cpu import CpuForGpu

    CpuForGpu().__enter__()


def begin(tp=1, pp=1, ep=1, vpp=None, kind="cpu", **others):
    """Makes Megatron's groups of all ranks, and seeds its random numbers."""
    if kind == "cpu":
        on_cpu()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        **others,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return parallel_state


def config(**changes):
    """Returns a TransformerConfig for the groups that `begin` made: Llama's form, no dropout."""
    from megatron.core import parallel_state as groups
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    pp = groups.get_pipeline_model_parallel_world_size()
    given = {
        **SIZES,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "tensor_model_parallel_size": groups.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": groups.get_expert_model_parallel_world_size(),
    }
    given |= changes
    return (MLATransformerConfig if "q_lora_rank" in given else TransformerConfig)(**given)


def build(of, names="te", seed=0, vp_stage=None, **options):
    """Returns a GPTModel in bfloat16.

    names: "te" and "local" are minifloat's backend with the names of those specs; "megatron" is
        Megatron's own local spec.
    options: of GPTModel.
    """
    from contextlib import nullcontext

    from megatron.core import parallel_state as groups
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from minifloat.megatron import backend

    with nullcontext() if names == "megatron" else backend():
        spec = get_gpt_decoder_block_spec(
            of, use_transformer_engine=names == "te", vp_stage=vp_stage
        )
        torch.manual_seed(seed)
        stage = {} if vp_stage is None else {"vp_stage": vp_stage}
        return GPTModel(
            config=of,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=TOKENS,
            pre_process=groups.is_pipeline_first_stage(ignore_virtual=vp_stage is None, **stage),
            post_process=groups.is_pipeline_last_stage(ignore_virtual=vp_stage is None, **stage),
            **{
                "position_embedding_type": "rope",
                "share_embeddings_and_output_weights": False,
                **stage,
                **options,
            },
        ).bfloat16()


def batch(step, rank=0):
    """Returns (tokens, positions, labels), of which each token follows the one before."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    first = torch.randint(0, VOCABULARY, (BATCH, 1), generator=draw)
    positions = torch.arange(TOKENS).expand(BATCH, TOKENS)
    tokens = (first + positions) % VOCABULARY
    return tokens, positions, tokens.roll(-1, 1)


def loss(model, step=0):
    """Returns the mean loss of a batch, that of this data-parallel rank."""
    from megatron.core import parallel_state

    tokens, positions, labels = batch(step, parallel_state.get_data_parallel_rank())
    return model(tokens, positions, None, labels=labels).float().mean()


# ---- distributed checkpoints ---------------------------------------------------------------------


def sharded(model):
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group})


def save(model, folder):
    """Saves a model of all ranks to a folder; a model, or what `sharded` returned of one."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Megatron's queue of results has a process of its own, which would outlive those of a test.
    results = queue.Queue()
    for name in ("_get_write_results_queue", "get_write_results_queue"):  # of 0.16, of 0.19
        if hasattr(filesystem_async, name):
            setattr(filesystem_async, name, lambda: results)
    multiprocessing.current_process()._config["daemon"] = False  # its writer is a process too
    if dist.get_rank() == 0:
        Path(folder).mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(model if isinstance(model, dict) else sharded(model), folder)


def load(model, folder):
    """Loads what `save` saved, in any layout of ranks."""
    from megatron.core import dist_checkpointing

    model.load_state_dict(dist_checkpointing.load(sharded(model), folder))
