"""The wheel for several torches: what it asks pip for, and what it is merged from."""

import sys
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import make_wheel  # noqa: E402

INFO = "minifloat-0.dist-info"


@pytest.mark.parametrize("torches", [make_wheel.TORCHES, ("2.11",), ("2.11", "2.12")])
def test_pip_may_take_each_of_the_torches_and_no_other(torches):
    allowed = SpecifierSet(make_wheel.requirement(torches).removeprefix("torch"))
    every = [f"2.{minor}.{patch}" for minor in range(8, 30) for patch in (0, 1)]
    taken = [version for version in every if version in allowed]
    assert taken == [v for v in every if v.rpartition(".")[0] in torches]


def wheel_for(folder, torch, library=b"kernels"):
    path = folder / f"{torch}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("minifloat/lib/libminifloat.so", library)
        archive.writestr(f"minifloat/lib/libminifloat_torch_{torch}.so", torch)
        archive.writestr(f"{INFO}/METADATA", "Name: minifloat\nRequires-Dist: torch==2.11.*\n\nX\n")
        archive.writestr(f"{INFO}/RECORD", torch)
    return path


def test_wheels_of_two_torches_become_one(tmp_path):
    wheels = [wheel_for(tmp_path, torch) for torch in ("2.11", "2.13")]
    make_wheel.merge(wheels, ("2.11", "2.13"), tmp_path / "merged")
    names = {p.name for p in (tmp_path / "merged").rglob("*") if p.is_file()}
    libraries = {f"libminifloat{end}.so" for end in ("", "_torch_2.11", "_torch_2.13")}
    assert names == libraries | {"METADATA"}
    metadata = (tmp_path / "merged" / INFO / "METADATA").read_text()
    wanted = f"Requires-Dist: {make_wheel.requirement(('2.11', '2.13'))}"
    assert metadata == f"Name: minifloat\n{wanted}\n\nX\n"


def test_another_libminifloat_is_refused(tmp_path):
    wheels = [wheel_for(tmp_path, "2.11"), wheel_for(tmp_path, "2.13", library=b"others")]
    with pytest.raises(RuntimeError, match=r"2\.13\.whl: minifloat/lib/libminifloat\.so differs"):
        make_wheel.merge(wheels, ("2.11", "2.13"), tmp_path / "merged")
