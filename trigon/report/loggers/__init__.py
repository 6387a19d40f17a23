"""The loggers to which a run can report, besides its folder and the console.

protocol.py is the interface of a logger; each library has a module, which is imported only if it is
configured. Does not read environment variables: trigon/tools/cli/train.py does.
"""
