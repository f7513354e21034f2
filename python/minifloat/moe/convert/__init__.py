"""Experts that mf.quantize_ converts, mf.MoE's and those of other libraries, and how."""
