"""The papers: one file each, with the rows of their tables."""
