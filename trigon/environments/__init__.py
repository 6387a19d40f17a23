"""Environments and tools: what a policy acts in over several turns.

protocol.py has what users write and what is exchanged. pool.py runs episodes, each in a process of
its own: it starts a fork server (fork_server.py), which loads the user's code once, confined as
reward workers are, and forks a process for each episode (episode.py). Tools (tools.py) are one
environment among others. Does not depend on engines, tokens and chat templates.
"""
