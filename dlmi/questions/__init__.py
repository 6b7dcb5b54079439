"""Questions with answers: how many an LM gets right after a prompt."""
