"""Advantages, losses and KL as functions of tensors, without configuration, files or collectives."""
