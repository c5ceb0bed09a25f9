"""The code of each rank of the benchmark."""
