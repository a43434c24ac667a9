"""The facts of each setting, written once at its field; the table of all settings; the comparison of configurations."""
