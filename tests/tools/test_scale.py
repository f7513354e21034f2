"""benchmarks/scale.py: bytes counted by hand, its limits, and the tables of research/scale.md."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

TREE = Path(__file__).parents[2]
SCALE = TREE / "benchmarks" / "scale.py"


@pytest.fixture(scope="module")
def of():
    """The program's names."""
    sys.path.insert(0, str(SCALE.parent))
    try:
        names = ("_scale_inputs", "_scale_model", "_scale_rows", "scale")
        modules = [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(SCALE.parent))
    return SimpleNamespace(**{k: v for module in modules for k, v in vars(module).items()})


@pytest.fixture(scope="module")
def tiny(of):
    """Two blocks of 4 * 128 * 128 + 3 * 128 * 256 = 163,840 weights; a root of 131,072."""
    return of.Model("tiny", 128, 2, 1, 256, 512, attention=4 * 128 * 128)


@pytest.fixture(scope="module")
def mixture(of):
    """A block of 65,536 weights and a shared expert's 49,152; eight experts of 49,152."""
    return of.Model("mixture", 128, 1, 1, 0, 0, 4 * 128 * 128, dense_layers=0, experts=8, top_k=2,
                    expert_hidden=128, shared=1)  # fmt: skip


def sent(of, model, recipe, **layout):
    step = of.step_of(model, recipe, of.MACHINES["H200"], of.Layout(**{"tokens": 64, **layout}))
    return {kind: round(sum_) for kind, sum_ in step.sent.items() if sum_}


def test_bytes_of_fsdp2(of, tiny):
    # 458,752 weights, three quarters from other ranks, two bytes, two gathers.
    expected = {"gather": 1_376_256, "reduce_scatter": 688_128}
    assert sent(of, tiny, "bf16", gpus=4) == expected
    # Blocks: 327,680 weights of 1 byte, or of 4.03125 bits; the root stays in bf16: 393,216 bytes.
    assert sent(of, tiny, "fp8_tensorwise", gpus=4)["gather"] == 491_520 + 393_216
    assert sent(of, tiny, "nvfp4", gpus=4)["gather"] == 247_680 + 393_216
    assert sent(of, tiny, "mxfp4", gpus=4)["gather"] == 261_120 + 393_216  # 4.25 bits, each gather
    again = sent(of, tiny, "mxfp4", gpus=4, recomputed=1.0)["gather"]
    assert again == 391_680 + 393_216  # 4.25 bits, and 8.5 before backward
    assert sent(of, tiny, "nvfp4", gpus=4, gathers="bf16") == expected
    assert sent(of, tiny, "nvfp4", gpus=4, gradient=1.0)["reduce_scatter"] == 344_064
    assert sent(of, tiny, "bf16", gpus=4, micro_batches=3)["gather"] == 3 * 1_376_256


def test_bytes_of_other_layouts(of, tiny):
    # ZeRO-1: one gather a step, of both directions where they are cast separately.
    once = sent(of, tiny, "fp8_rowwise", gpus=4, zero=1, micro_batches=3)
    assert once == {"gather": 491_520 + 196_608, "reduce_scatter": 688_128}
    # HSDP: a half from the other rank; the shard of 458,752 bytes is summed with one copy.
    shards = sent(of, tiny, "bf16", gpus=4, shard=2)
    assert shards == {"gather": 917_504, "reduce_scatter": 458_752 + 458_752}
    # TP 2: ten times in each of two blocks a half of 64 tokens of 128 elements of 2 bytes.
    parts = sent(of, tiny, "bf16", gpus=2, tp=2)
    assert parts == {"tensor_parallel": 163_840}
    assert sent(of, tiny, "bf16", gpus=2, tp=2, recomputed=1.0) == {"tensor_parallel": 229_376}


def test_bytes_of_experts(of, mixture):
    # 64 tokens have 128 rows, three quarters leave. A row of x: 128 codes, 4 scales and 12 bytes;
    # of g: 132, rounded up to 144; results and gradients of tokens: 256 each.
    codes = sent(of, mixture, "mxfp8", gpus=4, ep=4)
    assert codes["all_to_all"] == 96 * (144 + 144 + 256 + 256)
    assert sent(of, mixture, "mxfp8", gpus=4, ep=4, recomputed=1.0)["all_to_all"] == 96 * 1200
    values = sent(of, mixture, "mxfp8", gpus=4, ep=4, sends_codes=False)["all_to_all"]
    assert values == 96 * (272 + 256 + 256 + 256)
    # Two of eight experts on each rank, none of whose weights is sent: 114,688 others are.
    assert codes["reduce_scatter"] == 172_032
    # Over eight ranks the two that hold the same experts exchange half of them.
    assert sent(of, mixture, "bf16", gpus=8, ep=4)["reduce_scatter"] == 200_704 + 98_304


def test_bytes_an_element_as_published(of):
    """Bytes of two gathers and a gradient in bf16: bf16 6.0, MXFP8 4.06, NVFP4 in 16x16 3.01."""
    found = [sum(of.gathered_bits(recipe)[:2]) / 8 + 2 for recipe in ("bf16", "mxfp8", "nvfp4")]
    assert found == [6.0, 4.0625, 3.0078125]


def test_a_row_has_the_bytes_that_were_counted_on_ranks(of):
    """research/measured/distributed.md, "What a DeepSeek-style layer sends"."""
    counted = {"bf16": (14_352, 14_336), "fp8_rowwise": (7184, 7184), "nvfp4": (4048, 4032)}
    for recipe, expected in counted.items():
        assert tuple(of.row_bytes(recipe, name, 7168) for name in (of.X, of.G)) == expected


def test_compute_hides_messages_up_to_its_time(of):
    machine, step = replace(of.MACHINES["H200"], nvlink=1.0), of.Step()
    gather = of.Message(sent=1e9, transfer=2.0, latency=1.0)
    step.add(machine, 10, 1.5, gather=gather)
    assert (step.gather, step.latency) == (10.0, 5.0)  # half of 3 s is shown
    assert step.contention == pytest.approx(10 * of.CONTENTION * 0.5)
    step.add(machine, 10, 3.0, gather=gather, reduce_scatter=gather)
    assert (step.gather, step.reduce_scatter, step.latency) == (20.0, 10.0, 15.0)


def test_a_ring_is_as_slow_as_its_slower_link(of):
    machine = replace(of.MACHINES["H200"], nvlink=100.0, nic=10.0)
    within = of.ring(8e9, 8, 8, machine)
    assert (within.sent, within.transfer) == (7e9, pytest.approx(0.07))
    between = of.ring(16e9, 16, 8, machine)  # 8 GB enter a node by 80 GB/s, 15 GB pass NVLink
    assert between.transfer == pytest.approx(0.15)
    assert of.ring(16e9, 16, 1, machine).transfer == pytest.approx(1.5)
    assert between.latency == pytest.approx(machine.net_hop + 14 * machine.nvlink_hop)


def test_copies_of_a_shard_are_summed_by_the_quicker_of_ring_and_tree(of):
    machine = of.MACHINES["H200"]
    assert of.all_reduce(8e6, 16, 1, machine).latency == pytest.approx(2 * 4 * 14e-6)
    assert of.all_reduce(8e6, 4, 4, machine).latency == pytest.approx(2 * 3 * 3.4e-6)
    assert of.all_reduce(8e6, 16, 1, machine).transfer == pytest.approx(2 * 7.5e6 / 40e9)


def test_slow_compute_hides_all_but_the_first_gather_and_the_last_reduction(of, tiny):
    machine = replace(of.MACHINES["H200"], share=1e-6)
    step = of.step_of(tiny, "bf16", machine, of.Layout(4, 64, micro_batches=3, gradient=4.0))
    assert step.gather == pytest.approx(3 * 163_840 * 2 * 0.75 / 329e9)
    assert step.reduce_scatter == pytest.approx(3 * 163_840 * 4 * 0.75 / 329e9)
    assert step.latency == pytest.approx(3 * 2 * 3 * 3.4e-6)


def test_a_pipelines_bubble(of):
    model, machine = of.MODELS["llama3_70b"], of.MACHINES["H200"]
    step = of.step_of(model, "bf16", machine, of.Layout(4, pp=4, vp=2, micro_batches=8))
    assert step.bubble == pytest.approx((step.seconds - step.bubble) * 3 / 16)
    whole = of.step_of(model, "bf16", machine, of.Layout(1, micro_batches=8))
    assert whole.compute == pytest.approx(4 * step.compute)
    assert whole.tokens == 4 * step.tokens


def test_one_gpu_sends_nothing_and_free_links_cost_nothing(of):
    machine, model = of.MACHINES["H200"], of.MODELS["llama3_8b"]
    one = of.step_of(model, "bf16", machine, of.Layout(1))
    assert sum(one.sent.values()) == 0
    assert one.seconds == one.compute
    free = replace(machine, nvlink=1e12, nic=1e12, nvlink_hop=0.0, net_hop=0.0)
    for name, layout in (
        ("llama3_70b", of.Layout(4096, 512)),
        ("deepseek_v3", of.Layout(4096, 512, ep=64)),
    ):
        step = of.step_of(of.MODELS[name], "bf16", free, layout)
        assert step.seconds == pytest.approx(step.compute, rel=1e-3)
        assert step.limit == "compute"
        slow = of.step_of(of.MODELS[name], "bf16", replace(free, net_hop=14e-6), layout)
        assert slow.limit == "latency"


@pytest.mark.parametrize("name", ["nvlink", "nic"])
def test_a_faster_link_never_slows_a_step(of, name):
    for model, ep in (("llama3_70b", 1), ("deepseek_v3", 64)):
        times = []
        for factor in (0.25, 0.5, 1, 2, 4):
            machine = of.MACHINES["B200"]
            machine = replace(machine, **{name: factor * getattr(machine, name)})
            layout = of.Layout(512, 1024, ep=ep)
            times.append(of.step_of(of.MODELS[model], "mxfp8", machine, layout).seconds)
        assert times == sorted(times, reverse=True)
        assert times[0] > times[-1]


def test_gpus_are_divided(of):
    for layout in (of.Layout(8, tp=3), of.Layout(8, tp=2, ep=8), of.Layout(12, shard=8)):
        with pytest.raises(ValueError, match="expected sizes that divide the GPUs"):
            of.step_of(of.MODELS["deepseek_v3"], "bf16", of.MACHINES["H200"], layout)


def test_the_rates_fill_the_steps_that_they_were_read_from(of):
    fitted = [check for check in of.of_one_step() if check.is_fitted]
    assert len(fitted) == 6
    assert all(abs(check.error) < 0.005 for check in fitted)


def test_the_pages_tables(of):
    page = (TREE / "research" / "scale.md").read_text(encoding="utf-8")
    for name, content in of.tables().items():
        begin, end = f"<!-- scale.py: {name} -->\n", f"<!-- /scale.py: {name} -->"
        assert page[page.index(begin) + len(begin) : page.index(end)] == content, (
            f"{name}: python benchmarks/scale.py --page research/scale.md"
        )


def test_a_step_of_ones_own(of, monkeypatch, capsys):
    own = ["--model", "llama3_8b", "--gpus", "8,16", "--recipes", "nvfp4"]

    def run(*options):
        monkeypatch.setattr(sys, "argv", [str(SCALE), *own, *options])
        return of.main()

    assert run("--layout", "tokens=4096,gradient=1.04", "--links", "nic=45") == 0
    header, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [row.split(" | ")[:2] for row in rows] == [["| 8", "nvfp4"], ["| 16", "nvfp4"]]
    assert "| limit |" in header
    for options, error in (
        (("--layout", "gpu=4"), "--layout: expected a name of gpus, tokens"),
        (("--recipes", "mxfp8_2d"), "expected a recipe of bf16, fp8_delayed"),
        (("--layout", "tp=3"), "expected sizes that divide the GPUs"),
    ):
        with pytest.raises(SystemExit) as raised:
            run(*options)
        assert error in f"{raised.value}{capsys.readouterr().err}"
