"""The mathematics: tensors in, tensors out. Knows no configuration, no files and no collectives."""
