"""Parameters that are sharded in units: one copy a host, gathered, or by torch's own function."""
