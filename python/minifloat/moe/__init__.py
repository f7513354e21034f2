"""Mixture of experts: the router, the order of rows, the experts' products, the layer."""

from .balance import balance_loss
from .ranks.gradients import average_expert_gradients

__all__ = ["average_expert_gradients", "balance_loss"]
