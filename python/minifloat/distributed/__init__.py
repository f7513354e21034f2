"""Training on several ranks: FSDP2, tensor parallelism, and ZeRO with sharded masters."""
