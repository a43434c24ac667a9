"""Variables of the environment that tests must not inherit."""

_OF_LAUNCHERS = ("MASTER_", "NODE_RANK", "PL_", "LOCAL_RANK", "WORLD_SIZE", "FEDSIM_LAUNCHER", "FAIL")


def is_of_a_launcher(name):
    """Whether an environment variable would make a process take itself for a rank of another run."""
    return name == "RANK" or name.startswith(_OF_LAUNCHERS)
