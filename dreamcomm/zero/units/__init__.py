"""Parameters that are sharded in units: one copy a host, or by torch's own function."""
