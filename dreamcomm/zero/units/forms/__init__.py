"""Where the parameters of units lie, and how ranks come to read whole ones."""
