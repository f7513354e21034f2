"""`minifloat --cmake-prefix`, of a package and of a source tree."""

import subprocess
import sys

import pytest
from minifloat import cli


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "cli.py"))
    return tmp_path


def test_the_prefix_of_an_installed_package(package, capsys):
    config = package / "lib/cmake/minifloat/minifloatConfig.cmake"
    config.parent.mkdir(parents=True)
    config.touch()
    with pytest.raises(SystemExit) as ended:
        cli.main(["--cmake-prefix"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"{package}\n"


def test_a_source_tree_has_no_prefix(package, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--cmake-prefix"])
    assert ended.value.code == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "expected an installed package" in captured.err
    assert "pip install ." in captured.err


def test_a_pipe_that_nobody_reads_ends_quietly(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # else argparse drops the error
    command = [sys.executable, "-m", "minifloat", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
