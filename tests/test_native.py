"""Loading the native library: each failure is an ImportError with advice."""

import re

import pytest
import torch
from minifloat import _native


def test_missing_library(tmp_path):
    with pytest.raises(ImportError, match="expected the native library at"):
        _native.load(tmp_path / "lib.so")


def test_broken_library(tmp_path):
    path = tmp_path / "lib.so"
    path.write_bytes(b"not a library")
    with pytest.raises(ImportError, match=re.escape(torch.__version__)):
        _native.load(path)


@pytest.mark.parametrize(("built", "running"), [("2.11", "2.11.0+cu130"), ("2.11", "2.11.1")])
def test_same_torch(built, running):
    _native.require_torch(built, running)


@pytest.mark.parametrize(("built", "running"), [("2.11", "2.12.0"), ("2.1", "2.11.0")])
def test_another_torch(built, running):
    with pytest.raises(ImportError, match=rf"built for torch {built}.*torch {re.escape(running)}"):
        _native.require_torch(built, running)


def test_every_public_name_exists():
    import minifloat as mf

    assert all(hasattr(mf, name) for name in mf.__all__)


@pytest.mark.parametrize(("cpu", "cuda"), [("CPU", "CUDA"), ("AutocastCPU", "AutocastCUDA")])
def test_every_op_of_the_cpu_is_registered_for_cuda(cpu, cuda):
    """Checks builds with and without a CUDA backend, whose absence the op itself reports."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("minifloat::")]
    assert any(has(name, cpu) for name in names)
    assert [n for n in names if has(n, cpu)] == [n for n in names if has(n, cuda)]
