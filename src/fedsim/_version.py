"""The one place that states the version (read by the build and by ``fedsim --version``)."""

__version__ = "0.4.0.dev0"
