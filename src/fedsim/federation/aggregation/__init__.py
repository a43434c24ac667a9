"""Aggregation: from uploads to their means."""
