"""The golden files of the CPU, reproduced on a GPU (tests/golden/test_golden.py)."""

import pytest

from tests.golden import golden

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", [f for f in golden.FAMILIES if f not in golden.CPU_ONLY])
def test_bytes_are_those_of_the_golden_file(device, family):
    golden.require_golden(family, device)
