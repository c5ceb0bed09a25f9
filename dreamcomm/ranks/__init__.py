"""What ways of training share about the ranks of a group."""
