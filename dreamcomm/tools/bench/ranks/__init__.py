"""What each rank of the benchmark runs."""
