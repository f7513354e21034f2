"""Ctrl-C at any time of `minifloat train`: exit code 130, one line, no traceback."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import minifloat
import pytest
import torch
from minifloat import cli
from minifloat.train import interrupt
from minifloat.train.interrupt import INTERRUPTED
from minifloat.train.job import train

STAND_IN = """
    import os, signal, time
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)
"""
SCRIPT = """\
import sys

from minifloat.cli import main

sys.exit(main())
"""


def interrupted_in(module, tmp_path, *how):
    """Sends Ctrl-C while `module` is imported; returns (exit code, output, errors)."""
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(STAND_IN))
    (tmp_path / "minifloat").write_text(SCRIPT)
    path = [str(tmp_path), str(Path(minifloat.__file__).parents[1])]
    started = subprocess.run(
        [sys.executable, *how, "train", "--out", str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        timeout=100,
    )
    return started.returncode, started.stdout, started.stderr


@pytest.mark.parametrize("how", ["-m minifloat", "-mminifloat.cli", "script"])
def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path, how):
    command = [str(tmp_path / "minifloat")] if how == "script" else how.split()
    ended = interrupted_in("torch", tmp_path, *command)
    assert ended == (INTERRUPTED, "", "minifloat: interrupted\n")


def test_ctrl_c_while_the_trainer_is_imported_is_one_line(tmp_path):
    ended = interrupted_in("tqdm", tmp_path, "-m", "minifloat")
    assert ended == (INTERRUPTED, "", "minifloat: interrupted\n")
    assert not (tmp_path / "out").exists()


def test_ctrl_c_after_the_imports_is_one_line(tmp_path, capsys, monkeypatch):
    def read(*_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train, "load_corpus", read)
    before, threads = signal.getsignal(signal.SIGINT), torch.get_num_threads()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main(["train", "--device", "cpu", "--out", str(tmp_path / "out")]) == INTERRUPTED
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert capsys.readouterr().err == "minifloat: interrupted\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "python", "want"),
    [
        (["/usr/bin/minifloat", "train"], ["python3", "/usr/bin/minifloat", "train"], True),
        (["-m", "train"], ["python3", "-m", "minifloat", "train"], True),
        (["-m", "train"], ["python3", "-u", "-mminifloat", "train"], True),
        (["-m", "train"], ["python3", "-um", "minifloat", "train"], False),  # a traceback there
        (["-m", "minifloat"], ["python3", "-m", "my_trainer", "minifloat"], False),
        (["train.py"], ["python3", "train.py"], False),
        (["-c"], ["python3", "-c", "import minifloat"], False),
        ([""], ["python3"], False),
    ],
)
def test_an_import_of_the_package_by_others_leaves_ctrl_c_alone(monkeypatch, argv, python, want):
    assert signal.getsignal(signal.SIGINT) is not interrupt.end
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", python)
    assert interrupt.is_the_command() is want
