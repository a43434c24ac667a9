"""Choices that any method can be combined with: who takes part, privacy, robust rules, hardware and bytes."""
