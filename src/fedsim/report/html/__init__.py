"""``fedsim report --html``: one page with all results of runs, which needs no network."""
