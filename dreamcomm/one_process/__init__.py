"""One process on several devices: replicas of a module in threads, and parts of one on devices."""
