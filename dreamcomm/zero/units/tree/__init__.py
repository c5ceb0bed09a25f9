"""Trees of units: what they consist of, and when ranks read their parameters."""
