"""A module is left out where a run of its forward on stand-ins could show another graph.

So where a layer is read by a path that no comparison follows, where the forward writes what
outlives it, and where it asks what a stand-in is.
"""

import functools
import weakref

import minifloat as mf
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.traced_mlps import module_of, plain, require_twins, twins

COUNT = 0  # globals that forwards below write
LATER = 0


# ---- one path to a layer -------------------------------------------------------------------------


class Holder:
    """An object that is no module."""


def by_a_container(module):
    module.all = nn.ModuleDict({"w1": module.w1})
    return lambda m, x: m.w2(F.silu(m.all["w1"](x)) * m.w3(x))


def by_another_module(module):
    module.part = nn.Module()
    module.part.w1 = module.w1
    return lambda m, x: m.w2(F.silu(m.part.w1(x)) * m.w3(x))


def by_shared_submodules(module):
    module.part = nn.Module()
    module.part._modules = module._modules
    return lambda m, x: m.w2(F.silu(m.part.w1(x)) * m.w3(x))


def by_a_list(module):
    module.all = [module.w1]
    return lambda m, x: m.w2(F.silu(m.all[0](x)) * m.w3(x))


def by_a_tuple(module):
    module.all = (module.w1, module.w2)
    return lambda m, x: m.w2(F.silu(m.all[0](x)) * m.w3(x))


def by_a_dict(module):
    module.all = {"w1": module.w1}
    return lambda m, x: m.w2(F.silu(m.all["w1"](x)) * m.w3(x))


def by_an_object(module):
    module.holder = Holder()
    module.holder.w1 = module.w1
    return lambda m, x: m.w2(F.silu(m.holder.w1(x)) * m.w3(x))


def by_a_closure(module):
    w1 = module.w1
    return lambda m, x: m.w2(F.silu(w1(x)) * m.w3(x))


def by_a_default(module):
    def forward(m, x, w1=module.w1):
        return m.w2(F.silu(w1(x)) * m.w3(x))

    return forward


def by_a_bound_method(module):
    module.__dict__["product"] = module.w1.forward
    return lambda m, x: m.w2(F.silu(m.product(x)) * m.w3(x))


def by_a_partial(module):
    module.product = functools.partial(module.w1)
    return lambda m, x: m.w2(F.silu(m.product(x)) * m.w3(x))


def by_a_forward(module):
    module.act = nn.SiLU()
    module.act.__dict__["forward"] = module.w1
    return lambda m, x: m.w2(F.silu(m.act(x)) * m.w3(x))


def by_another_name(module):
    module.__dict__["other"] = module.w1
    return lambda m, x: m.w2(F.silu(m.other(x)) * m.w3(x))


PATHS = {
    by_a_container: "reads the layer w1 as all._modules['w1'], which is no submodule of its own",
    by_another_module: "reads the layer w1 as part.w1, which is no submodule of its own",
    by_shared_submodules: "reads the layer w1 as part.w1, which is no submodule of its own",
    by_a_list: "reads the items of all",
    by_a_tuple: "reads the layer w1 as all[0], which is no submodule of its own",
    by_a_dict: "reads the layer w1 as all['w1'], which is no submodule of its own",
    by_an_object: "reads the layer w1 as holder.w1, which is no submodule of its own",
    by_a_closure: "reads the layer w1 as w1, which is no submodule of its own",
    by_a_default: "reads the layer w1 as forward[0], which is no submodule of its own",
    by_a_bound_method: "reads the layer w1 as self, which is no submodule of its own",
    by_a_partial: "reads the layer w1 as Linear, which is no submodule of its own",
    by_a_forward: "reads the layer w1 as act, which is no submodule of its own",
    by_another_name: "reads the layer w1 as other, which is no submodule of its own",
}


@pytest.mark.parametrize("path", PATHS, ids=lambda f: f.__name__)
def test_a_layer_that_is_read_by_another_path(path):
    """Such a path may lead to another layer later, which no comparison of the submodules sees."""
    model = nn.Sequential(module_of(None))
    type(model[0]).forward = path(model[0])
    report = mf.quantize_(model, "mxfp8", keep="nothing", fuse=True)
    assert report.fused == []
    assert dict(report.not_fused)["0"] == f"its forward {PATHS[path]}"


def test_a_layer_under_two_names():
    module = module_of(lambda m, x: m.w2(F.silu(m.w1(x)) * m.w3(x)))
    module.w3 = module.w1
    fused, unfused, report = twins(module)
    assert report.not_fused == [("0", "its forward does not call each layer once")]
    require_twins(fused, unfused)


# ---- writes that a later run of inner code makes -------------------------------------------------


def sets_a_global(module, x):
    global COUNT
    COUNT += 1
    return plain(module, x)


def steps_that_set_a_global():
    global COUNT
    COUNT += 1
    yield 1


def in_a_generator_function(module, x):
    for _ in steps_that_set_a_global():
        pass
    return plain(module, x)


def in_an_inner_function(module, x):
    def note():
        global COUNT
        COUNT += 1

    note()
    return plain(module, x)


def deletes_a_global(module, x):
    def forget():
        global LATER
        del LATER

    if module.never:
        forget()
    return plain(module, x)


def closures():
    count = 0

    def counts(module, x):
        nonlocal count
        count += 1
        return plain(module, x)

    def in_a_generator(module, x):
        def steps():
            nonlocal count
            count += 1
            yield 1

        assert list(steps()) == [1]
        return plain(module, x)

    def in_two_functions(module, x):
        def outer():
            def inner():
                nonlocal count
                count += 1

            inner()

        outer()
        return plain(module, x)

    return counts, in_a_generator, in_two_functions, lambda: count


COUNTS, IN_A_GENERATOR, IN_TWO_FUNCTIONS, CLOSED_COUNT = closures()
OF_CLOSURE = "which writes count of an enclosing function"
WRITES = {
    sets_a_global: "which writes the global COUNT",
    in_a_generator_function: "which writes the global COUNT",
    in_an_inner_function: "which writes the global COUNT",
    deletes_a_global: "which writes the global LATER",
    COUNTS: OF_CLOSURE,
    IN_A_GENERATOR: OF_CLOSURE,
    IN_TWO_FUNCTIONS: OF_CLOSURE,
}


@pytest.mark.parametrize("forward", WRITES, ids=lambda f: f.__name__)
def test_a_write_of_what_outlives_the_call(forward):
    fused, unfused, report = twins(module_of(forward, never=False))
    assert report.fused == []
    assert report.not_fused[0][1].endswith(WRITES[forward])
    before = COUNT, CLOSED_COUNT()
    require_twins(fused, unfused)
    if forward is not deletes_a_global:
        assert (COUNT, CLOSED_COUNT()) != before


def tries_in_an_inner_function(module, x):
    def gate():
        try:
            return module.w1(x).clamp(max=1.0)
        except BaseException:
            return module.w1(x)

    return module.w2(F.silu(gate()) * module.w3(x))


# ---- what an object is ---------------------------------------------------------------------------


class Liar:
    """Says that it is of another class."""

    @property
    def __class__(self):
        return int


class Proxy:
    def __getattribute__(self, name):
        return int if name == "__class__" else object.__getattribute__(self, name)


class Meta(type):
    def __subclasscheck__(cls, other):
        CALLED.append(other)
        return True

    def __instancecheck__(cls, instance):
        return type.__instancecheck__(cls, instance)


CALLED = []


class Kind(metaclass=Meta):
    def method(self):
        return 1

    @classmethod
    def made(cls):
        return 1


def scaled(module, x, is_one):
    """The forward, of which a condition that a run on stand-ins could mistake decides."""
    return module.w2((F.silu if is_one else F.relu)(module.w1(x)) * module.w3(x))


def matches(module, x):
    match module.table:
        case {"kind": "silu"}:
            is_relu = True
        case _:
            is_relu = False
    return scaled(module, x, not is_relu)


def matches_a_list(module, x):
    match module.items:
        case [_, *_]:
            is_relu = True
        case _:
            is_relu = False
    return scaled(module, x, not is_relu)


IDENTITIES = {
    "x is an attribute": lambda m, x: scaled(m, x, x is not m.skip),
    "x is a product by 1": lambda m, x: scaled(m, x, (x * 1) is not x),
    "x in a list": lambda m, x: scaled(m, x, (x * 1) not in [x]),
    "x == an object": lambda m, x: scaled(m, x, m.holder != x),
    "a tuple": lambda m, x: scaled(m, x, m.pair is not m.pair),
    "a constant": lambda m, x: scaled(m, x, m.kind is not m.same_kind),
    "a choice": lambda m, x: scaled(m, x, x is not (m.skip if m.pair else None)),
    "a method": lambda m, x: scaled(m, x, m.items.append is not m.items.append),
    "isinstance of a method": lambda m, x: scaled(m, x, not isinstance(m.items.append, object)),
    "isinstance of a class's": lambda m, x: scaled(m, x, not isinstance(Kind.made, object)),
    "isinstance of super()": lambda m, x: scaled(m, x, not isinstance(super(type, m), super)),
    "isinstance of a liar": lambda m, x: scaled(m, x, not isinstance(m.liar, int)),
    "isinstance of a proxy": lambda m, x: scaled(m, x, not isinstance(m.proxy, int)),
    "isinstance of weakref.proxy": lambda m, x: scaled(m, x, not isinstance(m.weak, Holder)),
    "isinstance of the module": lambda m, x: scaled(m, x, isinstance(m, nn.Module)),
    "a metaclass": lambda m, x: scaled(m, x, not isinstance(m.holder, Kind)),
    "a pattern": matches,
    "a pattern of a list": matches_a_list,
    "an inner except": tries_in_an_inner_function,
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_a_question_that_a_stand_in_cannot_answer(name):
    holder = Holder()
    settings = {"skip": torch.zeros(1), "pair": (1, Holder()), "items": [1], "holder": holder}
    settings |= {"kind": "silu", "same_kind": "silu", "table": {"kind": "silu"}}
    settings |= {"liar": Liar(), "proxy": Proxy(), "weak": weakref.proxy(holder)}
    module = module_of(IDENTITIES[name], **settings)
    CALLED.clear()
    report = mf.quantize_(nn.Sequential(module), "mxfp8", keep="nothing", fuse=True)
    assert report.fused == []
    assert len(report.not_fused) == 1
    assert CALLED == []


@pytest.mark.parametrize(
    "condition",
    [
        lambda m, x: m.holder is not None,
        lambda m, x: (x is None) is False,
        lambda m, x: m.items is not ...,
        lambda m, x: m.kind is not True,
        lambda m, x: m.holder in [m.holder],
        lambda m, x: isinstance(m.holder, (int, Holder)),
        lambda m, x: isinstance(m.kind, str) and isinstance(x, torch.Tensor),
    ],
)
def test_questions_that_have_one_answer(condition):
    forward = lambda m, x: scaled(m, x, condition(m, x))  # noqa: E731
    module = module_of(forward, holder=Holder(), items=[1], kind="silu")
    fused, unfused, report = twins(module)
    assert report.fused, report.not_fused
    require_twins(fused, unfused)
