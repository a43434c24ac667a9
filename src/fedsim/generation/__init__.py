"""Generators of training images, one per client (paper 002, Figures 5 and 6)."""
