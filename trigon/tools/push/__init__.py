"""Publishes what a run learned: the exported model with a model card, on the Hugging Face Hub."""
