"""What servers read: folders of codes, written and loaded, and the scales of inputs."""
