"""Messages between two ranks outside of collectives: trees of values of any shape.

Pipelines, model servers and gossip send with it. It knows nothing of steps or stages. A messenger
has one contract, over an endpoint for each carrier; a channel finds messages by their keys.
"""
