"""`minifloat doctor --gpu`: no check fails where the other tests of this folder pass."""

from __future__ import annotations

import pytest
from minifloat.doctor import gpu_checks

pytestmark = pytest.mark.gpu


def test_no_check_fails(device):
    rows = list(gpu_checks.run_checks(device))
    assert len(rows) > 80
    assert not [row for row in rows if row[1]]
