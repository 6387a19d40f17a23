"""The commands: one short file each. They read arguments and the environment, and call the rooms that do the work."""
