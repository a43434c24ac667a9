"""Settings that earlier versions had."""

GONE = {"camera_reduction": "", "choice_images": "", "flat_step": "model.client", "unit_features": ""}
"""setting -> the section in which each config up to 0.2 has it: it changed no result, and is dropped; empty: refused"""


def line_of_gone(name: str) -> str:
    """Return the error line for a gone setting, without its place; empty for other names.

    >>> line_of_gone("flat_step"), line_of_gone("step")
    ('flat_step is gone since 0.3; remove it', '')
    """
    return f"{name} is gone since 0.3; remove it" if name in GONE else ""
