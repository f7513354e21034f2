"""Experts of other libraries: what mf.quantize_ converts, and how."""
