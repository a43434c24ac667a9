"""``fedsim data``: a module for commands on folders, and one for those on the data sets of a config."""
