"""Norms and feed-forwards whose results become codes in the kernel that computes them."""
