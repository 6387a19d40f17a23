"""Dataset rows become prompts, and groups of completions become packed rows."""
