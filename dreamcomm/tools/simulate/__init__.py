"""How long collectives and training steps would take on a cluster that is described, not there."""
