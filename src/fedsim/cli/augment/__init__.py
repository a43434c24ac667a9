"""``fedsim augment``."""
