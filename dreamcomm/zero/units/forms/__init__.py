"""Where the parameters of units lie, and how ranks read whole ones."""
