"""What casts do to a model's operands: mf.inspect, StepGuard, and what is not finite."""

from .guard import StepGuard
from .inspection import Inspection

__all__ = ["Inspection", "StepGuard"]
