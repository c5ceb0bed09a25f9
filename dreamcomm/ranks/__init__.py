"""Shared by all ways of training: agreement, parameters as given, pieces, errors."""
