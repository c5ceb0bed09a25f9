"""Batch norm over the rows of all ranks, on CPUs."""
