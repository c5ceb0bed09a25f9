"""The timeline of all ranks in one file."""
