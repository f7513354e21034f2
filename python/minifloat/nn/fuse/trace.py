"""A forward's graph, from a run of its code on stand-ins: no tensor, no foreign object is touched.

Python runs the code of the forward, and of the functions and modules that it calls, in copies of
those functions. Whatever they can reach is a stand-in or a constant:

    x                               a Symbol (nn/fuse/symbols.py), a term of a feed-forward
    self, globals, closures         Views (nn/fuse/views.py): reads are recorded, writes refused
    builtins                        those of views.BUILTINS, which have no effect
    numbers, texts, dtypes, None    themselves

So a forward that the run completes has no effect but its result, and reads nothing but what is
recorded. A node that the run does not know, a branch on a tensor or its shape, and a write all end
the run with Refused. Nothing outside the run changes: no list, buffer, attribute, generator, or
setting of torch. (torch.fx replaces methods of nn.Module for all threads while it traces, and
torch.export writes the states of global generators.)

Each dtype is run with every combination of `training` of the modules whose `training` is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..convert.reads import Reads, Record
from .run import Run
from .symbols import RESULT, Refused, Symbol, fields_of, kind_of, refuse, text_of

MOST_RUNS = 64  # combinations of `training`, of 6 modules


class Graph(NamedTuple):
    """A feed-forward: the names of its activation and its layers, in the op's order."""

    activation: str
    layers: tuple[str, ...]


def trace(
    module: nn.Module,
    cls: type,
    layers: dict[str, Any],
    dtypes: Iterable[torch.dtype],
) -> tuple[Graph, Reads]:
    """Returns a module's graph, and what its forward reads.

    Args:
        module: it is not changed, and nothing of it is called.
        cls: its class, without mf.MLP.
        layers: the linear layers among its children, by name.
        dtypes: of x.

    Raises:
        ValueError: the module is no feed-forward. The text names the node that differs.
    """
    found: Graph | None = None
    record = Record(module, cls)
    for dtype in dtypes:
        pending: list[dict[int, bool]] = [{}]  # id of a module -> whether it trains
        for _ in range(MOST_RUNS):
            if not pending:
                break
            run = Run(record, layers, pending.pop())
            graph = graph_of(run, dtype)
            if found not in (None, graph):
                raise ValueError("its forward computes something else in evaluation or in training")
            found = graph
            pending += run.other_modes()
        if pending:
            raise ValueError(f"its forward reads `training` in more than {MOST_RUNS} combinations")
    assert found is not None
    return found, record.reads()


def graph_of(run: Run, dtype: torch.dtype) -> Graph:
    """Runs a forward once; raises ValueError where it is none of a feed-forward."""
    try:
        y = run.start(Symbol("x", "x", dtype))
        if kind_of(y) is None:
            refuse(f"returns a {type(y).__name__}, not a tensor")
        if kind_of(y) != RESULT:
            refuse(f"returns {text_of(y)}, not the last layer's result")
        if sorted(run.called_layers) != sorted(run.layers):
            refuse("does not call each layer once")
    except Refused as refused:
        raise ValueError(str(refused)) from None
    except Exception as error:  # of foreign code, or of Python about a stand-in
        text = str(error).partition("\n")[0]
        raise ValueError(f"its forward raises {type(error).__name__}: {text}") from None
    finally:
        run.end()
    activation, *names = fields_of(y).parts
    return Graph(activation, tuple(names))
