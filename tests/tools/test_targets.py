"""The instructions of each target, in PTX and in machine code, as the table of ptx.cuh has them."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROBE = ROOT / "tests" / "tools" / "targets_probe.cu"
NVCC = shutil.which("nvcc")

# kernel: what PTX and machine code have where the target has the instruction, and from which
# targets on. PTX of 80 is JIT-compiled for all other GPUs.
AMPERE, GA10X, ADA, HOPPER = "80", "86", "89", "90a"
BLACKWELL, BLACKWELL_ULTRA, RTX = "100a", "103a", "120f"
TARGETS = (AMPERE, GA10X, ADA, HOPPER, BLACKWELL, BLACKWELL_ULTRA, RTX)
INSTRUCTIONS = {
    "magnitudes": (r"min\.xorsign\.abs\.f32", r"FMNMX\S*\.XORSIGN", TARGETS[1:]),
    "to_fp8": (r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32", r"F2FP\S*\.E[45]M[32]\.", TARGETS[2:]),
    "from_fp8": (r"cvt\.rn\.f16x2\.e[45]m[32]x2", r"F2FP\.F16\.E[45]M[32]\.", TARGETS[2:]),
    "bf16_products": (r"mul\.rn\.bf16x2", None, TARGETS[3:]),  # machine code has an fma
    "clusters": (r"barrier\.cluster", r"UCGABAR", TARGETS[3:]),
    "to_e2m1": (r"cvt\.rn\.satfinite\.e2m1x2", r"F2FP\S*\.E2M1\.", TARGETS[4:]),
    "to_e8m0": (r"cvt\.rp\.satfinite\.ue8m0x2", r"F2FP\S*\.E8\.\S*\.RP", TARGETS[4:]),
    "to_e2m1_stochastic": (r"cvt\.rs\.satfinite\.e2m1x4", r"F2FP\S*\.E2M1\S*\.RS", TARGETS[4:6]),
    "to_fp8_stochastic": (r"cvt\.rs\.satfinite\.e4m3x4", r"F2FP\S*\.E4M3\S*\.RS", TARGETS[4:6]),
}

pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not on the path")


def compiled(target: str, form: str, out: Path) -> Path:
    flags = ["-std=c++20", "--fmad=false", "--expt-relaxed-constexpr"]
    folders = [f"-I{ROOT / 'include'}", f"-I{ROOT / 'src'}"]
    code = f"compute_{target}" if form == "ptx" else f"sm_{target}"
    command = [NVCC, *flags, *folders, f"-gencode=arch=compute_{target},code={code}", f"-{form}"]
    subprocess.run([*command, "-o", str(out), str(PROBE)], check=True)
    return out


def of_kernels(text: str, starts: str) -> dict[str, str]:
    """Splits a listing by the lines that begin a kernel."""
    parts = re.split(starts, text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def disassembler() -> str | None:
    """Finds nvdisasm: the toolkit's, or that of Triton's package."""
    found = shutil.which("nvdisasm")
    spec = importlib.util.find_spec("triton")
    if found or not spec:
        return found
    inside = Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(inside) if inside.exists() else None


@pytest.mark.parametrize("target", TARGETS)
def test_ptx_has_the_instructions_of_the_table(target, tmp_path):
    kernels = of_kernels(
        compiled(target, "ptx", tmp_path / "probe.ptx").read_text(), r"^\.visible \.entry (\w+)\("
    )
    assert set(kernels) == set(INSTRUCTIONS)
    for kernel, (instruction, _, targets) in INSTRUCTIONS.items():
        assert bool(re.search(instruction, kernels[kernel])) == (target in targets), kernel


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_machine_code_has_the_instructions_of_the_table(target, tmp_path):
    if (tool := disassembler()) is None:
        pytest.skip("nvdisasm is neither on the path nor in Triton's package")
    cubin = compiled(target, "cubin", tmp_path / "probe.cubin")
    listing = subprocess.run([tool, str(cubin)], capture_output=True, text=True).stdout
    kernels = of_kernels(listing, r"^\.text\.(\w+):")
    if not kernels:
        pytest.skip(f"{tool} does not know sm_{target}")
    for kernel, (_, instruction, targets) in INSTRUCTIONS.items():
        if instruction:
            assert bool(re.search(instruction, kernels[kernel])) == (target in targets), kernel
