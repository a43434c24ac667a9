"""The papers: one file per paper, with the rows of its tables."""
