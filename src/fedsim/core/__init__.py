"""Building blocks without re-ID knowledge: flat buffers, exact sums, seeding, placement, errors."""
