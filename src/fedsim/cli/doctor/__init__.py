"""``fedsim doctor``: facts of this machine, what they mean for a fit, and the page that says so."""
