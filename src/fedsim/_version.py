"""The one place that states the version (read by the build and by ``fedsim --version``), and how pip finds fedsim."""

__version__ = "0.3.0.dev0"
DISTRIBUTION = "fedsim-reid"
"""name on the Python index, where fedsim is another project; that of the import and of the command is fedsim"""
