"""Confinement of reward workers: what their code can reach of the system.

options.py says what is asked for, supervisor.py carries it out and ends everything that a reward
worker leaves. namespaces.py, capabilities.py, landlock.py and seccomp.py are one mechanism of the
Linux kernel each, by kernel.py; system_calls.py has their names and numbers. tree.py measures and
kills process trees. code_server.py runs code that a model wrote, in what sandbox.py makes. None of
them knows what a reward function is. They import only the standard library and modules that do the
same, since they run before each worker starts.
"""
