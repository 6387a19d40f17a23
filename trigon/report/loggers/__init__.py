"""The loggers that trainer.logger can name, besides the console and the run folder.

A file is a logger. LOGGER makes it; `remedy` says what to do if it does not open. The file has the
name of its library's package, which only open() may import; a logger whose library has another name
says so in `library`, which is None if it needs no library.
"""
