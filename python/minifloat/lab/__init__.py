"""The numerics lab: rules written in Python, and the errors of casts (docs/numerics_lab.md)."""
