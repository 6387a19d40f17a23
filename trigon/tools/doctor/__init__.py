"""Checks of this machine: versions, kernels, the rollout engine, memory and speed.

`trigon doctor` runs the check of the environment, `trigon doctor --gpu` all of them, each in a
process of its own. On a machine without a GPU they run to their end on the CPU, in small shapes.
"""
