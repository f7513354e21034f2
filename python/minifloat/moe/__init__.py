"""Mixture of experts: the router, the order of rows, the experts' products, the layer."""
