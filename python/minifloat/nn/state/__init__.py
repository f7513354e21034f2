"""State of a layer beside its parameters: random bits, amax histories, checkpoints of them."""
