"""Captures of CUDA graphs, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def captured(
    run: Callable[[], Result],
    *,
    warm_up: Callable[[], object] | None = None,
    warm_ups: int = 1,
    **options: Any,
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Captures run() in a graph, after runs on another stream that allocate lasting state.

    Args:
        run: what is captured.
        warm_up: what runs before; None: `run`.
        warm_ups: how often.
        options: of torch.cuda.graph.

    Returns:
        The graph, and what the captured run returned: tensors that replays write.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            (warm_up or run)()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        result = run()
    return graph, result
