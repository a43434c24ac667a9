"""``fedsim report --html``: one page with everything that runs have left, which needs no network."""
