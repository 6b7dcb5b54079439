"""Temperatures, noise, relaxed samples and soft embeddings."""
