"""The class and the methods that a module has where its parameters lie once on the host."""
