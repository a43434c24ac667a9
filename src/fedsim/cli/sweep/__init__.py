"""``fedsim sweep``."""
