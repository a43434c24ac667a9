"""From uploads to their means."""
