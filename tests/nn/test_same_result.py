"""Replicas of modules, the contexts that their comparison runs outside of, and distances."""

import dataclasses

import pytest
import torch
from minifloat.nn.convert.replica import changed_part, replica, state_of
from minifloat.nn.convert.same_result import BOUND, distance, isolated
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class Holder(nn.Module):
    """A module whose parts are no children of it."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "hidden", nn.Linear(4, 4))
        self.others = [self.hidden, nn.Linear(4, 4)]
        self.nested = {"pair": (nn.BatchNorm1d(4), torch.ones(4))}
        self.owner = [nn.ModuleList([self])]
        self.others.append(self.others)


def test_a_replica_shares_no_part():
    module = Holder()
    made = replica(module)
    assert made.hidden is made.others[0]
    assert made.others[2] is made.others
    (norm, values), (old_norm, old_values) = made.nested["pair"], module.nested["pair"]
    for new, old in [*zip(made.others[:2], module.others), (norm, old_norm)]:
        assert new is not old
        assert type(new) is type(old)
        tensors = {id(t) for t in old.state_dict(keep_vars=True).values()}
        assert not tensors & {id(t) for t in new.state_dict(keep_vars=True).values()}
    assert values is not old_values
    assert torch.equal(values, old_values)
    assert made.owner[0] is module.owner[0]  # a module that contains this one stays


def test_replicas_of_fake_modules_have_values():
    with FakeTensorMode():
        module = nn.BatchNorm1d(4)
        with isolated():
            made = replica(module)
    tensors = [*module.parameters(), *module.buffers()]
    assert all(isinstance(t, FakeTensor) for t in tensors)
    assert not any(isinstance(t, FakeTensor) for t in [*made.parameters(), *made.buffers()])
    assert made(torch.ones(2, 4)).shape == (2, 4)


def test_a_state_that_is_read_twice_is_the_same():
    """Pickles of slots are made anew at each reading: no part may be taken for another's."""

    @dataclasses.dataclass(frozen=True, slots=True)
    class Layout:
        axes: dict[str, str]
        spec: object

    module = nn.Module()
    module.layouts = {name: Layout({"dp": name}, None) for name in "abcdefgh"}
    made = replica(module)
    assert changed_part(state_of(made), state_of(made)) is None
    names = [f"layouts[{name!r}].state[0]['dp']" for name in "abcdefgh"]
    assert [state_of(made)[name] for name in names] == list("abcdefgh")
    made.layouts["c"].axes["dp"] = "z"
    assert changed_part(state_of(module), state_of(made)) == names[2]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_value_that_is_not_finite_on_one_side_is_named(value):
    finite = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    other = finite.clone()
    other[1, 0] = value
    for want, got in ((finite, other), (other, finite)):
        assert distance(want, got, BOUND) == "is finite at other places than minifloat's"
    assert distance(finite, finite.clone(), BOUND) is None
