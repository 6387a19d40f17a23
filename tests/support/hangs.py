"""Functions that hang in different ways, as source code for the processes that tests start."""

HANGS = """
import ctypes, time

def lock_twice(library):
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)

def hang_in_python():
    while True:
        time.sleep(0.01)

def hang_in_c():
    lock_twice(ctypes.CDLL(None))

def hang_in_c_with_the_interpreter_lock():
    lock_twice(ctypes.PyDLL(None))
"""
