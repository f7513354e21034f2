"""`minifloat --cmake-prefix`, of a package and of a source tree; a command in a thread."""

import threading

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


def test_a_command_runs_in_another_thread(tmp_path, capsys):
    """Python sets signal handlers in the main thread alone."""
    text = tmp_path / "text.txt"
    text.write_text("a line of words to learn from\n" * 2000)
    options = "--recipes mxfp8 --model 32,1,1,1,64 --steps 1 --batch 1 --seq 16 --vocab 300"
    options += f" --threads 1 --device cpu --data {text} --cache {tmp_path}/cache --out {tmp_path}"
    codes = []
    thread = threading.Thread(target=lambda: codes.append(cli.main(["train", *options.split()])))
    thread.start()
    thread.join()
    assert codes == [0], capsys.readouterr().err
    assert (tmp_path / "report.md").exists()
