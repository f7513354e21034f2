"""torchtitan's feed-forwards are one op, with the results of their layers one by one."""

import pytest

from tests.support.feed_forward_classes import HIDDEN, WIDTH, outcome_of, require_right
from tests.support.titan_job import prepare
from tests.support.worlds import run_world


def check_classes(rank):
    prepare("cpu")
    from torchtitan.models.llama3.model.model import FeedForward as Llama3
    from torchtitan.models.llama4.model.model import FeedForward as Llama4
    from torchtitan.models.moe.moe import FeedForward as SharedExpert
    from torchtitan.models.qwen3.model.model import FeedForward as Qwen3

    for cls in (Llama3, Llama4, Qwen3, SharedExpert):
        of_llama = {"multiple_of": 32, "ffn_dim_multiplier": None}
        module = cls(WIDTH, HIDDEN, **(of_llama if cls in (Llama3, Llama4) else {}))
        outcome = outcome_of(module)
        assert outcome == "w1, w3, w2 and silu are one op", cls
        require_right(module, outcome)


def test_feed_forwards_of_torchtitan():
    pytest.importorskip("torchtitan")
    run_world(1, check_classes)
