"""Collectives of arrays, for callers that have no process group."""
