"""Reports a run: on the console, in the run folder and to loggers."""
