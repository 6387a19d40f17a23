"""The loggers that trainer.logger can name, besides the console and the run folder.

A file is a logger. Its name is that of the library's package, which only open() may import. LOGGER
makes it from a LoggerEnvironment; `remedy` says what to do if it does not open. Reads no
environment variables: trigon/tools/cli/train.py does.
"""
