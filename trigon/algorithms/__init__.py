"""Advantages, losses and KL: functions of tensors, without configuration, files or collectives."""
