"""Feed-forwards as one op: the module, and where mf.quantize_ puts it."""
