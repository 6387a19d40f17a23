"""The confinement of processes that run user code, and the sandbox of code that a model wrote.

options.py says what is asked for. supervisor.py carries it out, and ends all that a confined
process leaves. mechanisms.py and seccomp.py are what the Linux kernel offers for that; kernel.py
calls it. code_server.py runs code that a model wrote, in what sandbox.py makes. None of them knows
reward functions or environments. They import only the standard library and modules that do the
same, since they run before each confined process starts.

Packages were compared and are not used. The wheels of bubblewrap cannot limit the number of files
in /tmp, and are not made by its project; pyseccomp needs libseccomp, which slim images lack, and
knows no system call that is newer than that; the bindings of Landlock with signal scopes are in
their first versions.
"""
