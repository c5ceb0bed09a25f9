"""What wraps or mends torch."""
