"""Environments and tools: what a policy acts in over several turns.

protocol.py has what users write and what is exchanged. pool.py runs episodes, each in a process of
its own (episode.py): a fork server, which is confined as reward workers are, loads the user's code
once, and forks a process for each episode. Tools (tools.py) are one environment among others. Does
not depend on engines, tokens and chat templates.
"""
