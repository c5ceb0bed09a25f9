"""Parameters of units: whole ones, rows of ranks, and the memory that both lie in."""
