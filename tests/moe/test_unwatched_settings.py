"""Experts whose forward reads what no record shows the changes of are left out."""

import collections
import contextvars
import importlib
import operator
import os
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch

from tests.moe.test_same_experts import Foreign, report_of

FACTOR = 1.0
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
ORDERED = collections.OrderedDict(factor=1.0)
DEFAULTS = collections.defaultdict(lambda: 1.0)
QUEUE = collections.deque([1.0])
PROXY = MappingProxyType({"factor": 1.0})


class Table(dict):
    pass


class Plain:
    def __init__(self) -> None:
        self.value = 1.0

    def scale(self):
        return self.value


TABLE = Table(factor=1.0)


def nested(depth: int) -> SimpleNamespace:
    return SimpleNamespace(deeper=nested(depth - 1) if depth else None, factor=1.0)


class Reads(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.plain = 1.0, Plain()
        self.config = SimpleNamespace(
            ordered=ORDERED, array=np.ones(1), tensor=torch.ones(()), nested=nested(8)
        )

    def weighted(self, y, weights):
        return y * self.read() * weights


class Ways:
    """What the forward multiplies by, each with a part of the reason."""

    def by_f_string(self):
        """reads by getattr of a name that the code computes"""
        return getattr(self, f"fac{'tor'}")

    def by_an_unpacked_list(self):
        """reads by getattr of a name that the code computes"""
        return getattr(*[self, "factor"])

    def by_variable(self, name="factor"):
        """reads by getattr of a name that the code computes"""
        return getattr(self, name)

    def by_alias(self):
        """reads by getattr of a name that the code computes"""
        read = getattr
        return read(self, "factor")

    def by_vars(self):
        """reads by vars"""
        return vars(self)["factor"]

    def by_dict(self):
        """reads by __dict__"""
        return self.__dict__["factor"]

    def by_getattribute(self):
        """reads by __getattribute__"""
        return self.__getattribute__("factor")

    def by_globals(self):
        """reads by globals"""
        return globals()["FACTOR"]

    def by_eval(self):
        """reads by eval"""
        return eval("FACTOR")

    def by_import(self):
        """reads by import_module"""
        return importlib.import_module(__name__).FACTOR

    def by_attrgetter(self):
        """reads by attrgetter"""
        return operator.attrgetter("factor")(self)

    def by_environ(self):
        """reads by environ"""
        return float(os.environ.get("FACTOR", "1"))

    def by_local_import(self):
        """reads by environ"""
        from os import environ as settings

        return float(settings.get("FACTOR", "1"))

    def context_variable(self):
        """reads ContextVar objects"""
        return VARIABLE.get()

    def ordered(self):
        """reads OrderedDict objects"""
        return ORDERED["factor"]

    def defaults(self):
        """reads defaultdict objects"""
        return DEFAULTS.get("factor", 1.0)

    def queue(self):
        """reads deque objects"""
        return QUEUE[0]

    def proxy(self):
        """reads mappingproxy objects"""
        return PROXY["factor"]

    def subclass(self):
        """reads Table objects"""
        return TABLE["factor"]

    def of_config(self):
        """reads OrderedDict objects"""
        return self.config.ordered["factor"]

    def array(self):
        """reads ndarray objects"""
        return float(self.config.array[0])

    def tensor(self):
        """reads Tensor objects"""
        return self.config.tensor

    def method(self):
        """reads scale of a Plain, which each read makes anew"""
        return self.plain.scale()

    def deep(self):
        """reads attributes that are nested deeper than 4 objects"""
        return self.config.nested.deeper.deeper.deeper.deeper.deeper.factor

    def autocast(self):
        """reads by is_autocast_enabled"""
        return 1 + torch.is_autocast_enabled()


@pytest.mark.parametrize("name", [name for name in vars(Ways) if name[:1] != "_"])
def test_reads_that_no_record_watches_are_left_out(name, monkeypatch):
    read = vars(Ways)[name]
    monkeypatch.setattr(Reads, "read", read, raising=False)
    assert read.__doc__ in dict(report_of(Reads()).skipped)["experts.down_proj"]
