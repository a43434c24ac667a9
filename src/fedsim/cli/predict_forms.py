"""The two forms of ``fedsim predict``: of the run's test sets, and of a folder of images, have options of their own."""

from __future__ import annotations

import inspect
from collections.abc import Collection

from fedsim.core.errors import ConfigError
from fedsim.parsing.options import own_options
from fedsim.settings.table import sections


def refuse_other_form(names: Collection[str]) -> None:
    """Raise ConfigError if one of the options, ``names`` without hyphens, is of the form that is not called."""
    of_test_sets = {*own_options("predict"), *sections()}
    foreign = [name for name in names if name.partition(".")[0] not in of_test_sets]
    if not foreign and "images" not in names:
        return  # without an import of torch
    from fedsim.inference.model import predict_images

    of_images = inspect.signature(predict_images).parameters
    for name in names if "images" in names else foreign:
        if "images" not in names and name in of_images:
            raise ConfigError(f"--{name}: is for --images FOLDER; add that, or leave --{name} out")
        if "images" in names and name not in of_images and name not in foreign and name != "help":
            raise ConfigError(f"--{name}: is for the run's test sets; leave --images out, or --{name}")
