"""FSDP2 with weights that are gathered as codes."""
