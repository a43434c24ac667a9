"""``fedsim data``: a module of commands on folders, and one of commands on the data sets of a config."""
