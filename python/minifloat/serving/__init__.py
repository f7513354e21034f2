"""Weights as servers read them: folders of safetensors with codes, and the scales of inputs."""
