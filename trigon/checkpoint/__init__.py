"""Checkpoints that are complete or absent, and their export to Hugging Face folders."""
