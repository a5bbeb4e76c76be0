"""Training: the adapter between a slice's loss and an optimiser."""
