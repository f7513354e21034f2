"""torchtitan 0.2's own trainer on a CPU: FSDP2, tensor parallelism, expert parallelism over gloo.

debug models of torchtitan · text and a tokenizer made here · a few steps of its training loop
"""

import json
import random
from pathlib import Path

import minifloat as mf
import pytest
from minifloat._native import ops
from minifloat.nn.checkpoint_policy import PRODUCTS

from tests.support.titan_job import prepare, train, write_assets
from tests.support.worlds import run_world

pytestmark = pytest.mark.slow  # each starts torchtitan, most of them twice

STEPS = 5
OPTIONS = [
    f"--training.steps={STEPS}",
    "--training.seq_len=64",
    "--training.local_batch_size=2",
    "--metrics.log_freq=1",
    "--optimizer.implementation=foreach",
    "--lr_scheduler.warmup_steps=2",
    "--activation_checkpoint.mode=none",
]
CONFIG = Path(__file__).parents[2] / "examples" / "torchtitan_llama3.toml"
EAGER_TP = ["--parallelism.tensor_parallel_degree=2"]
COMPILED_TP = [*EAGER_TP, "--compile.enable", "--compile.backend=aot_eager"]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    draw = random.Random(1)
    words = ["the", "a", "cat", "dog", "sat", "on", "in", "mat", "hat", "and", "ran"]
    texts = [" ".join(draw.choices(words, k=400)) for _ in range(60)]
    return write_assets(tmp_path_factory.mktemp("assets"), 512, texts)


def of_kind(trainer, kind):
    return [m for part in trainer.model_parts for m in part.modules() if isinstance(m, kind)]


def is_gathered_as_codes(trainer):
    layers = of_kind(trainer, mf.Linear)
    assert layers
    assert all(layer.weight_gather is not None for layer in layers)


def has_rank_experts(trainer):
    products = of_kind(trainer, mf.nn.grouped_product.GroupedProduct)
    assert len(products) == 5 * 3
    ranges = {(p.expert_range.count, p.expert_range.experts) for p in products}
    assert ranges == {(4, 8)}
    assert {p.first_expert for p in products} == {p.expert_range.begin for p in products}


def has_products_saved(trainer):
    """Selective checkpointing saves products: backward casts again, and multiplies no more."""
    from torchtitan.models.deepseek_v3.infra import parallelize

    products = {*PRODUCTS, ops.scaled_grouped_mm.default}
    assert products <= parallelize._op_sac_save_list
    assert of_kind(trainer, mf.Linear)


def is_cut(trainer):
    layers = of_kind(trainer, mf.Linear)
    assert layers
    assert all(layer.weight.device_mesh.size() == 2 for layer in layers)


CHECKS = (is_gathered_as_codes, has_rank_experts, has_products_saved, is_cut)


def run_rank(rank, assets, recipe, check, options):
    prepare("cpu")
    converter = ["--model.converters=minifloat", f"--minifloat.recipe={recipe}"]
    checks = {f.__name__: f for f in CHECKS}
    rows = train(assets, [*OPTIONS, *converter, *options], checks[check] if check else None)
    losses = [row["loss_metrics/global_avg_loss"] for row in rows]
    (assets / f"losses.{rank}.json").write_text(json.dumps(losses))


def run_plain(rank, assets, options):
    prepare("cpu")
    train(assets, [*OPTIONS, *options])


def run_config(rank, assets):
    """Trains as examples/torchtitan_llama3.toml says, but for a CPU's steps and optimizer."""
    prepare("cpu")
    rows = train(assets, [f"--job.config_file={CONFIG}", *OPTIONS], is_gathered_as_codes)
    losses = [row["loss_metrics/global_avg_loss"] for row in rows]
    assert losses[-1] < losses[0] - 1, losses


def losses_of(assets: Path, ranks: int, recipe: str, check: str, *options: str) -> list[float]:
    """Trains on that many ranks, and returns the losses of all steps."""
    run_world(ranks, run_rank, assets, recipe, check, options)
    losses = json.loads((assets / "losses.0.json").read_text())
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 1, losses  # the text has eleven words
    return losses


def test_fsdp_gathers_codes(assets):
    losses_of(assets, 2, "nvfp4", "is_gathered_as_codes")


def test_the_example_of_a_config_trains(assets):
    run_world(2, run_config, assets)


def test_selective_checkpointing_saves_products(assets):
    options = ["--model.name=deepseek_v3", "--activation_checkpoint.mode=selective"]
    options += ["--activation_checkpoint.selective_ac_option=op"]
    losses_of(assets, 1, "fp8_delayed", "has_products_saved", *options)


def test_expert_parallel(assets):
    options = ["--model.name=deepseek_v3", "--parallelism.expert_parallel_degree=2"]
    losses_of(assets, 2, "fp8_rowwise", "has_rank_experts", *options)


def test_blocks_compile_whole_under_tensor_parallelism(assets):
    """torchtitan compiles each block with fullgraph=True, so that a graph break raises."""
    eager = losses_of(assets, 2, "nvfp4", "is_cut", *EAGER_TP)
    compiled = losses_of(assets, 2, "nvfp4", "is_cut", *COMPILED_TP)
    # The first step has the same weights and random bits. Other ops may round in another order.
    assert compiled[0] == pytest.approx(eager[0], rel=1e-4)


# ---- Checkpoints ---------------------------------------------------------------------------------
SAVED = 2  # the step of the checkpoint that is resumed
CHECKPOINTS = ["--checkpoint.enable", f"--checkpoint.interval={SAVED}"]
RESUMED = [*CHECKPOINTS, f"--checkpoint.load_step={SAVED}"]


def test_a_resumed_run_draws_the_next_random_bits(assets, tmp_path):
    folder = f"--checkpoint.folder={tmp_path}"  # beside the folder of other tests
    whole = losses_of(assets, 1, "nvfp4", "", *CHECKPOINTS, folder)
    for options in ((), ("--checkpoint.exclude_from_loading=minifloat",)):
        run_world(1, run_rank, assets, "nvfp4", "", (*RESUMED, folder, *options))
        resumed = json.loads((assets / "losses.0.json").read_text())
        assert (resumed == whole[SAVED:]) == (not options), (resumed, whole)


def test_resumed_experts_have_their_amax_histories(assets, tmp_path):
    options = ["--model.name=deepseek_v3", "--parallelism.expert_parallel_degree=2"]
    options += [f"--checkpoint.folder={tmp_path}"]
    whole = losses_of(assets, 2, "fp8_delayed", "", *options, *CHECKPOINTS)
    run_world(2, run_rank, assets, "fp8_delayed", "", (*options, *RESUMED))
    resumed = json.loads((assets / "losses.0.json").read_text())
    assert resumed == whole[SAVED:]


def test_a_checkpoint_without_the_state_is_an_error_or_left_out(assets, tmp_path):
    """A run that was not converted has none; checkpoint.exclude_from_loading leaves it out."""
    folder = f"--checkpoint.folder={tmp_path}"
    run_world(1, run_plain, assets, (*CHECKPOINTS, folder))
    with pytest.raises(Exception, match=r"minifloat\.rng"):
        run_world(1, run_rank, assets, "nvfp4", "", (*RESUMED, folder))
    options = (*RESUMED, folder, "--checkpoint.exclude_from_loading=minifloat")
    run_world(1, run_rank, assets, "nvfp4", "", options)
    assert len(json.loads((assets / "losses.0.json").read_text())) == STEPS - SAVED
