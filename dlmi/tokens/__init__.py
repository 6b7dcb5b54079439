"""Which tokens a prompt may hold."""
