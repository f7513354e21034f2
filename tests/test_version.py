"""The package's version: one number, wherever it is asked for."""

import re
from importlib import metadata, util
from pathlib import Path

import minifloat as mf
import pytest
from minifloat._version import read_version

ROOT = Path(__file__).parents[1]


def test_a_source_tree_has_the_version_of_its_build(tmp_path):
    package = tmp_path / "python" / "minifloat"
    (tmp_path / "CMakeLists.txt").write_text("# a build\nproject(minifloat VERSION 3.14.1\n")
    assert read_version(package) == "3.14.1"


def test_a_package_of_links_has_the_version_of_the_tree(tmp_path):
    """As `make test-asan` makes one, for libraries of another build."""
    link = tmp_path / "_version.py"
    link.symlink_to(ROOT / "python" / "minifloat" / "_version.py")
    spec = util.spec_from_file_location("linked", link)
    linked = util.module_from_spec(spec)
    spec.loader.exec_module(linked)
    assert linked.__version__ == mf.__version__


@pytest.mark.parametrize("other", [None, "project(another VERSION 2.0)"])
def test_an_installed_package_has_the_version_of_its_metadata(other, tmp_path, monkeypatch):
    if other is not None:  # a project in whose folder python/minifloat was installed
        (tmp_path / "CMakeLists.txt").write_text(other)
    monkeypatch.setattr(metadata, "version", {"minifloat": "1.2.3"}.__getitem__)
    assert read_version(tmp_path / "site-packages" / "minifloat") == "1.2.3"


def test_the_metadata_have_the_same_number():
    """Finds the number as scikit-build-core does, by the expression of pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text()
    source, regex = re.search(r"^input = \"(.*)\"\nregex = '(.*)'$", project, re.MULTILINE).groups()
    assert re.search(regex, (ROOT / source).read_text())["value"] == mf.__version__
