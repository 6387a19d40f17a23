"""Where a run rests: checkpoints that are whole or absent, and their way into a Hugging Face folder."""
