"""`minifloat doctor`: what it finds, what it says where it finds nothing, and which checks fail."""

import json
import re

import minifloat as mf
import pytest
import torch
from minifloat import _native, cli
from minifloat.doctor import gpu_checks, report

PRESETS = ("bf16", "fp8_delayed", "nvfp4_mxfp8")
CPU = torch.device("cpu")


@pytest.fixture
def quick(monkeypatch):
    """Times a small layer once."""
    monkeypatch.setattr(report, "LAYERS", {"cpu": (32, 64, 64), "cuda": (512, 512, 512)})
    monkeypatch.setattr(report, "SECONDS", 0.0)


@pytest.fixture
def few(monkeypatch):
    """Checks three presets."""
    monkeypatch.setattr(gpu_checks, "presets", lambda: PRESETS)


def failed(rows):
    return {check: error for check, error in rows if error}


# ---- The report ----------------------------------------------------------------------------------


def test_the_report_as_text(quick, capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in (torch.__version__, "NVIDIA driver", "threads", "GPU targets", "missing:"):
        assert word in out
    for preset in mf.presets():
        assert f"\n  {preset} " in out
    assert "linear   fprop, dgrad, wgrad: " in out


def test_the_report_as_json(quick, capsys):
    assert cli.main(["doctor", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert list(about["recipes"]) == mf.presets()
    for preset, row in about["recipes"].items():
        assert row["ms"] > 0, row
        assert row["speed"] == pytest.approx(row["bf16_ms"] / row["ms"], abs=0.1, rel=0.1)
        for layer in ("linear", "experts"):
            text = "\n".join(row[layer])
            for e in mf.engines(preset, experts=layer == "experts"):
                assert f"{'native' if e.native else 'emulated'} ({e.name}): {e.does}" in text
    assert about["native library"]["GPU targets"].startswith("none") != _native.ops.has_cuda()


def test_engines_are_merged_where_equal():
    row = report.describe_recipe("mxfp8_nvfp4", (9, 0), "none")
    assert row["speed"] == "not found: 'none'"  # a device that has no layer
    assert [line.partition(":")[0] for line in row["linear"]] == ["fprop, dgrad, wgrad"]
    assert "10.0, 10.3, 12.0, 12.1" in row["linear"][0]
    halves = report.describe_recipe("fp8_rowwise_gw_hp", (9, 0), "none")["linear"]
    assert [line.partition(" (")[0] for line in halves] == ["fprop, dgrad: native", "wgrad: native"]


def test_what_cannot_be_found_has_its_reason(quick, monkeypatch, capsys):
    def fails(*_):
        raise OSError("no such thing")

    for name in ("driver", "describe_cpu", "list_gpus", "time_layer"):
        monkeypatch.setattr(report, name, fails)
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.count("not found: no such thing") == 3 + len(mf.presets())


GPU = ["NVIDIA H100, compute capability 9.0, 81559 MiB"]


@pytest.mark.parametrize(
    ("gpus", "driver", "backend", "has_bf16", "want"),
    [
        ("not found: none", "not found: nvidia-smi", False, True, []),
        ("not found: too old", "580.1", True, True, ["a torch that sees .*too old"]),
        (GPU, "580.1", False, True, ["the CUDA backend, which this build lacks.*nvcc"]),
        (GPU, "580.1", True, True, ["casts on GPU 0; not found: no code", "CUTLASS"]),
        ([], "580.1", True, False, ["fast bf16 products.*fp32"]),
    ],
)
def test_what_is_missing(monkeypatch, gpus, driver, backend, has_bf16, want):
    def cast_on(index):
        raise RuntimeError("no code")

    monkeypatch.setattr(report, "driver", lambda: driver)
    monkeypatch.setattr(report, "cast_on", cast_on)
    monkeypatch.setattr(report, "has_fast_bf16", lambda: has_bf16)
    monkeypatch.setattr(_native.ops, "has_cuda", lambda: backend)
    lines = list(report.find_missing(gpus))
    if mf.engines("mxfp8", (9, 0), experts=True)[0].name != "exact_grouped":
        want = [text for text in want if text != "CUTLASS"]  # this build has the kernels
    assert len(lines) == len(want), lines
    for line, text in zip(lines, want):
        assert re.search(text, line)


# ---- --gpu ---------------------------------------------------------------------------------------


def test_without_a_gpu_or_its_backend(monkeypatch, capsys):
    for sees_device, text in ((False, "torch sees none"), (True, "for the CPU alone")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda sees=sees_device: sees)
        monkeypatch.setattr(_native.ops, "has_cuda", lambda: False)
        assert cli.main(["doctor", "--gpu"]) == 1
        assert text in capsys.readouterr().err


def test_the_checks_are_no_json(capsys):
    assert cli.main(["doctor", "--gpu", "--json"]) == 2
    printed = capsys.readouterr()
    error = "--gpu: expected no --json beside, as the checks print text alone"
    assert (printed.out, printed.err) == ("", f"minifloat doctor: error: {error}\n")


def test_rows_and_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_native.ops, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"number {index}")
    for error, code in (("", 0), ("wrong", 1)):
        rows = [("casts", ""), ("products", error)]
        monkeypatch.setattr(gpu_checks, "run_checks", lambda device, rows=rows: iter(rows))
        assert cli.main(["doctor", "--gpu"]) == code
        out = capsys.readouterr().out
        assert out.startswith("GPU 0, number 0\nok      casts\n")
        assert out.count("GPU 1, number 1\nok      casts\n") == 1


def test_the_cpu_is_like_itself(few):
    rows = dict(gpu_checks.run_checks(CPU))
    assert not failed(rows.items())
    kinds = ("casts of", "layouts of", "linear: fprop", "experts: wgrad", "a step of")
    assert all(any(check.startswith(kind) for check in rows) for kind in kinds)


def test_a_wrong_byte_fails(few, monkeypatch):
    """Flips a bit of the last byte of each cast and layout, on the device alone."""
    calls, call_op = [], gpu_checks.call_op

    def wrong(op, given, device):
        results = [
            t.clone()
            for t in torch.utils._pytree.tree_leaves(call_op(op, given, device))
            if isinstance(t, torch.Tensor)
        ]
        calls.append(op)
        if len(calls) % 2:
            largest = max(results, key=torch.Tensor.numel)
            largest.view(torch.uint8).view(-1)[-1] ^= 1
        return results

    monkeypatch.setattr(gpu_checks, "call_op", wrong)
    monkeypatch.setattr(gpu_checks, "products", lambda *_: [])
    found = failed(gpu_checks.run_checks(CPU))
    assert sum(check.startswith("casts") for check in found) == len(PRESETS) - 1
    assert sum(check.startswith("layouts") for check in found) == 5
    error = found["casts of nvfp4_mxfp8"]
    assert "1 of 32768 bytes differ, the first at 32767: expected 0x" in error
    assert "quantize of torch.bfloat16 (128, 256) to ('nvfp4', 'mxfp8')" in error


@pytest.mark.parametrize(("name", "kind"), [("linear", "linear"), ("scaled_grouped_mm", "experts")])
def test_a_wrong_product_fails(few, monkeypatch, name, kind):
    calls, multiply = [], getattr(gpu_checks, name)

    def wrong(*args, **how):
        calls.append(how)
        return multiply(*args, **how) * (1.02 if len(calls) % 2 else 1)

    monkeypatch.setattr(gpu_checks, name, wrong)
    found = failed(gpu_checks.run_checks(CPU))
    assert {check.partition(":")[0] for check in found} == {kind}
    assert len(found) == 9  # of three presets without a product in common
    assert "expected a relative error of at most 0.0078, got 0.020" in next(iter(found.values()))


def test_an_exception_is_named_with_its_arguments(few, monkeypatch):
    def refuses(*args, **how):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(gpu_checks, "linear", refuses)
    found = failed(gpu_checks.run_checks(CPU))
    error = found["linear: dgrad mxfp8*mxfp8, exact"]
    sizes = "'m': 256, 'n': 384, 'k': 128, 'out_dtype': torch.bfloat16"
    assert error.startswith("exact of {" + sizes)
    assert error.endswith("compute capability 0.0: RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED")


def test_a_device_that_answers_no_more_ends_the_checks(few, monkeypatch):
    def dies(*_, **__):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(gpu_checks, "casts", lambda preset: [gpu_checks.Case("quantize", dies)])
    monkeypatch.setattr(gpu_checks, "draw", dies)
    monkeypatch.setattr(torch, "ones", dies)
    rows = list(gpu_checks.run_checks(CPU))
    assert [check for check, _ in rows] == ["casts of fp8_delayed", "the checks after that"]
    assert "illegal memory access" in rows[1][1]
