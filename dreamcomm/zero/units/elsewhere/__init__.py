"""torch's own FSDP2 with the methods of this library, where ranks share no memory."""
