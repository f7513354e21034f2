"""mf.nn.quantized_model_init: which nn.Linear it converts, beside threads, tasks and generators."""

import asyncio
import contextvars
import inspect
import sys
import threading
from contextlib import ExitStack, contextmanager

import minifloat as mf
import pytest
from torch import nn

RECIPE = "mxfp8_2d"
INIT = nn.Linear.__init__


def is_converted(layer):
    assert isinstance(layer.weight.detach(), mf.QuantizedTensor) == (type(layer) is mf.Linear)
    return type(layer) is mf.Linear


def build():
    return nn.Linear(32, 32)


@pytest.fixture(autouse=True)
def leaves_torch_as_it_was():
    yield
    assert nn.Linear.__init__ is INIT
    assert not is_converted(build())


def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_layers_of_another_thread_are_not_converted():
    with mf.nn.quantized_model_init(RECIPE):
        assert not is_converted(in_thread(build))
        assert is_converted(build())


def test_a_thread_with_a_copy_of_the_context_converts_nothing():
    """As asyncio.to_thread copies it."""
    with mf.nn.quantized_model_init(RECIPE):
        context = contextvars.copy_context()
        assert not is_converted(in_thread(lambda: context.run(build)))


def test_subclasses_stay():
    """Their code knows a weight in high precision."""
    with mf.nn.quantized_model_init(RECIPE):
        out_proj = nn.MultiheadAttention(32, 2).out_proj
    assert isinstance(out_proj, nn.Linear)
    assert not isinstance(out_proj.weight, mf.QuantizedTensor)


def test_many_threads_build_at_a_time():
    """Opens and closes statements in some threads, while others build plain layers."""
    before, mistakes = sys.getswitchinterval(), []
    sys.setswitchinterval(1e-6)

    def run(recipe):
        for _ in range(60):
            if recipe is None:
                mistakes.append(is_converted(build()))
                continue
            with mf.nn.quantized_model_init(recipe):
                layer = build()
            mistakes.append(not is_converted(layer) or str(layer.recipe) != recipe)
            mistakes.append(is_converted(build()))

    recipes = (RECIPE, "nvfp4", None, "fp8_tensorwise", None)
    threads = [threading.Thread(target=run, args=(recipe,)) for recipe in recipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    assert len(mistakes) == 60 * 8
    assert not any(mistakes)


def test_statements_that_end_in_another_order():
    """The first one to open is the first to close."""
    opened, closes, done = (threading.Event() for _ in range(3))

    def other():
        with mf.nn.quantized_model_init("nvfp4"):
            opened.set()
            closes.wait(10)
            found.append(build())
        done.set()

    found = []
    with mf.nn.quantized_model_init(RECIPE):
        thread = threading.Thread(target=other)
        thread.start()
        opened.wait(10)
    assert not is_converted(build())
    closes.set()
    done.wait(10)
    thread.join()
    assert is_converted(found[0])


def test_a_suspended_generator():
    def layers():
        with mf.nn.quantized_model_init(RECIPE):
            while True:
                yield build()

    generator = layers()
    assert is_converted(next(generator))
    assert not is_converted(build())
    with mf.nn.quantized_model_init("nvfp4"):
        assert str(build().recipe) == "nvfp4"
    assert is_converted(next(generator))
    del generator


@contextmanager
def managed():
    with mf.nn.quantized_model_init(RECIPE):
        yield


class Managed:
    """Enters the statement in a method that returns."""

    def __enter__(self):
        self.manager = mf.nn.quantized_model_init(RECIPE)
        self.manager.__enter__()

    def __exit__(self, *error):
        self.manager.__exit__(*error)


@pytest.mark.parametrize("how", ["generator", "nested", "stack", "class", "decorator"])
def test_context_managers_around_the_statement(how):
    @contextmanager
    def nested():
        with managed():
            yield

    if how == "decorator":
        assert is_converted(mf.nn.quantized_model_init(RECIPE)(build)())
        return
    with ExitStack() as stack:
        manager = {"generator": managed, "nested": nested, "class": Managed}.get(how)
        stack.enter_context(mf.nn.quantized_model_init(RECIPE) if manager is None else manager())
        assert is_converted(build())


def test_tasks():
    async def converts(found):
        with mf.nn.quantized_model_init(RECIPE):
            for _ in range(3):
                await asyncio.sleep(0)  # lets the other task run
                found.append(build())

    async def builds(found):
        for _ in range(3):
            await asyncio.sleep(0)
            found.append(build())

    async def both(*found):
        await asyncio.gather(converts(found[0]), builds(found[1]))

    inside, beside = [], []
    asyncio.run(both(inside, beside))
    assert [is_converted(layer) for layer in inside] == [True] * 3
    assert [is_converted(layer) for layer in beside] == [False] * 3


def test_the_signature_stays():
    want = inspect.signature(nn.Linear)
    with mf.nn.quantized_model_init(RECIPE):
        assert inspect.signature(nn.Linear) == want
        layer = nn.utils.skip_init(nn.Linear, 32, 32)
    assert layer.weight.shape == (32, 32)


def test_an_error_within_the_statement():
    with pytest.raises(ZeroDivisionError), mf.nn.quantized_model_init(RECIPE):
        raise ZeroDivisionError


def test_another_library_replaces_the_method_too():
    """It wraps the method within the statement, and keeps its own afterwards."""
    with mf.nn.quantized_model_init(RECIPE):
        inner = nn.Linear.__init__

        def init(self, *args, **kwargs):
            inner(self, *args, **kwargs)

        nn.Linear.__init__ = init
        assert is_converted(build())
    try:
        assert not is_converted(build())
        with mf.nn.quantized_model_init("nvfp4"):
            assert str(build().recipe) == "nvfp4"
        assert not is_converted(build())
    finally:
        nn.Linear.__init__ = INIT


def test_layers_of_two_statements_need_a_seed_each():
    def layers_of(seeds):
        layers = []
        for seed in seeds:
            with mf.nn.quantized_model_init("nvfp4", seed=seed):
                layers.append(build())
        return nn.Sequential(*layers)

    mf.step(layers_of((0, 1)))
    with pytest.raises(ValueError, match=r"'1' and '0' .* pass each part its own seed"):
        mf.step(layers_of((0, 0)))
