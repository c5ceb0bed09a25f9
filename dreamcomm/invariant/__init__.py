"""Training with the same bits at every world size: a step is made of numbered shards."""
