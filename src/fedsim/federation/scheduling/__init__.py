"""Which rank trains which client."""
