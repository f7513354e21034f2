"""Checks of the specs that the parts of a QuantizedTensor can have."""

from __future__ import annotations

from ..spec import Spec


def require_weight_spec(spec: str) -> str:
    """Returns the canonical spec; ValueError where it is no spec of a primary weight."""
    parsed = require_nearest(spec)
    if parsed.is_delayed:
        raise ValueError(
            f"QuantizedTensor: weights scale by their own amax, got the delayed {parsed.text}"
        )
    return parsed.text


def require_nearest(spec: str) -> Spec:
    """Parses a spec; ValueError where it does not quantize, or rounds stochastically."""
    parsed = Spec.parse(spec)
    if parsed.is_bf16:
        raise ValueError(
            "QuantizedTensor: expected a quantizing spec, got bf16; leave it out (None)"
        )
    if parsed.is_stochastic:
        raise ValueError(
            f"QuantizedTensor: weights round to nearest, got the stochastic {parsed.text}"
        )
    return parsed
