"""Commands that write files to begin with: ``fedsim init`` a config, ``fedsim slurm`` the scripts of a queue."""
