"""Steps of a ZeroOptimizer on parameters of units."""
