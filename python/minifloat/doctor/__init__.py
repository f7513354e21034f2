"""The subcommand `minifloat doctor`: describes a machine, and compares its GPU with its CPU."""
