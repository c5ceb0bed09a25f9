"""Trees of arrays: one call for all arrays of a dtype."""
