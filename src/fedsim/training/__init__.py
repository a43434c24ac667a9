"""Clients, their models, optimizers and labels; and the server."""
