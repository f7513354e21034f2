"""The numerics lab: rules written in Python, and the errors of casts (docs/numerics_lab.md)."""

from .errors import Errors, errors
from .rules import Rule, fake_quantize, round_to

__all__ = ["Errors", "Rule", "errors", "fake_quantize", "round_to"]
