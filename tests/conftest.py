"""The option of tests/gpu, and fixtures of several folders of tests."""

import gc
import sys

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="what tests/gpu compares with the CPU (cpu: itself, which tests the tests)",
    )


def lacks_device(config: pytest.Config) -> bool:
    """Tells whether tests/gpu have no device to run on."""
    return config.getoption("--device") == "cuda" and not torch.cuda.is_available()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if lacks_device(config):
        terminalreporter.write_line("tests/gpu: not collected, torch sees no CUDA device")


@pytest.fixture(scope="module", autouse=True)
def frozen_imports():
    """Takes imported modules and collected tests, which stay, from what each collection reads."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    """Lets a test draw the same values whichever tests its process has run before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Clears what earlier tests compiled.

    After 8 recompilations of one function torch runs it uncompiled, with no error unless
    fullgraph=True. Compiled models share functions of torch, so all tests of a process share the 8.
    """
    if "torch._dynamo" in sys.modules:  # its import takes seconds, and few tests need it
        torch.compiler.reset()


@pytest.fixture
def torch_as_it_was():
    """Restores settings of torch that a test changes."""
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
