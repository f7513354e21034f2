"""Each public name has an example in its docstring, which prints what it says."""

import doctest
import inspect
import io

import minifloat as mf
import pytest
import torch
import torch.distributed as dist

from tests.support.public_names import public_names


@pytest.fixture
def names():
    """What an example begins with. What one that fails leaves behind is undone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield {"mf": mf, "torch": torch}
    mf.tensor.check_groups(False)
    if dist.is_initialized():
        mf.distributed.destroy_process_group()


@pytest.mark.parametrize(("name", "thing"), public_names().items())
def test_the_example_of_a_name_prints_what_it_says(name, thing, names):
    found = doctest.DocTestFinder().find(thing, name, module=False, globs=names)
    own = [each for test in found if test.name == name for each in test.examples]
    assert own, f"mf.{name}: expected an example in its docstring"
    assert "\nExample:\n    >>> " in inspect.getdoc(thing)  # which the site shows as code
    assert not any(doctest.SKIP in each.options for each in own)

    runner, output = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), io.StringIO()
    for test in found:
        runner.run(test, out=output.write, clear_globs=False)
    assert runner.failures == 0, output.getvalue()
    if inspect.isclass(thing):
        assert any(isinstance(value, thing) for test in found for value in test.globs.values())
    else:
        assert any(f"mf.{name}(" in line.source for line in own)
