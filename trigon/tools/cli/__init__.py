"""The commands, one module each: they read arguments and environment variables."""
