"""What the LM is to say, and the fixed tokens around a prompt."""
