"""The assignment of clients to ranks."""
