"""``fedsim doctor``: facts of this machine, their meaning for a fit, and the page that shows both."""
