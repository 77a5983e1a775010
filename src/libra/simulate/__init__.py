"""Choosing a configuration from a corpus's lengths, before any GPU is rented."""
