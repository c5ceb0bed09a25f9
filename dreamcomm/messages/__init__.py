"""Messages between two ranks outside of collectives: trees of values of any shape.

Pipelines, model servers and gossip send with it. It knows nothing of steps or stages.
"""
