"""Shared by all ways of training: agreement between ranks, parameters as given, errors."""
