"""What the multi-process tests share: ranks to run functions in, and their harness."""
