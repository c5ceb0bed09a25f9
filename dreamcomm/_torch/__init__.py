"""Wrappers and fixes of torch."""
