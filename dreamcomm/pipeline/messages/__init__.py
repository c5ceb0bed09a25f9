"""Messages between the stages of a pipeline: values of any shape, matched by key."""
