"""What servers read and write: exports and quantized checkpoints."""
