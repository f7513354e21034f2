"""Loading the native library: each failure is an ImportError with advice."""

import re

import minifloat as mf
import pytest
import torch
from minifloat import _native


def test_missing_library(tmp_path):
    with pytest.raises(ImportError, match=r"expected the native library .*found none.*make build"):
        _native.load(tmp_path)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.11.1"])
def test_broken_library(tmp_path, version):
    (tmp_path / "libminifloat_torch_2.11.so").write_bytes(b"not a library")
    with pytest.raises(ImportError, match=f"does not load under torch {re.escape(version)}"):
        _native.load(tmp_path, version)


@pytest.mark.parametrize("version", ["2.13.0", "2.1.0", "2.10.1+cpu"])
def test_another_torch(tmp_path, version):
    for built_for in ("2.14", "2.9", "2.11"):
        (tmp_path / f"libminifloat_torch_{built_for}.so").touch()
    expected = f"expected torch 2.9 or 2.11 or 2.14, .* got {re.escape(version)}"
    with pytest.raises(ImportError, match=f"{expected}.*--no-build-isolation"):
        _native.load(tmp_path, version)


def test_compiled_code_is_of_this_build(tmp_path):
    (library,) = _native.FOLDER.glob(f"*_torch_{'.'.join(torch.__version__.split('.')[:2])}.so")
    tag = _native.tag_of(library)
    assert torch.compiler.config.cache_key_tag.split().count(tag) == 1
    assert f"-{mf.__version__}-" in tag
    other = tmp_path / library.name
    other.write_bytes(library.read_bytes()[:-1] + b"~")
    assert _native.tag_of(other) != tag


@pytest.mark.parametrize(("cpu", "cuda"), [("CPU", "CUDA"), ("AutocastCPU", "AutocastCUDA")])
def test_every_op_of_the_cpu_is_registered_for_cuda(cpu, cuda):
    """Checks builds with and without a CUDA backend, whose absence the op itself reports."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("minifloat::")]
    assert any(has(name, cpu) for name in names)
    assert [n for n in names if has(n, cpu)] == [n for n in names if has(n, cuda)]
