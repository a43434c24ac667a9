"""Facts about a setting, declared at its field: ``threads: Annotated[int, ROUNDING] = 1``.

``make rows`` writes the facts of all settings into ``table.json``, from which every other part of fedsim reads them.
A setting without facts changes results, and is compared, grouped and listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Effect = Literal["results", "seconds", "rounding", "nothing"]
"""of a setting on the numbers of a run: seconds are the simulated ones alone, rounding is a change of the last bits"""
Group = Literal["data", "images", "network", "loss", "training", "method", "evaluation"]
"""the part of an experiment; images: their size and augmentation"""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a setting beside its type, default and text."""

    effect: Effect = "results"
    """of its value on the numbers of a run"""
    group: Group | None = None
    """the part of an experiment that it belongs to; None: that of the section around it"""
    needs: str = ""
    """a Python expression of other settings; while it is false, the setting has the effect ``otherwise``. A name is a
    setting of the same section, or begins with model, data or trainer; a class is its name, and ``shares`` of a method
    are the groups of tensors that clients may send"""
    otherwise: Effect = "nothing"
    """the effect while ``needs`` is false"""
    null: Any = None
    """the value that null stands for"""
    null_is: str = ""
    """the setting that null stands for, as in ``needs``, unless a client has another value of it"""
    overrides: str = ""
    """the section whose values its fields replace for single clients"""
    spellings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """another text of a value -> the value"""
    spelled_as: str = ""
    """the setting in whose classes :attr:`spellings` are those of its values, too"""
    is_file: bool = False
    """whether it is the path of a file or folder, whose content is the setting"""
    suffixes: tuple[str, ...] = ()
    """of ``is_file``: those of its files, where another value is a name; empty: each value is a path"""
    is_repeated: bool = False
    """whether runs with other values are repetitions of one experiment: seeds"""
    is_protocol: bool = False
    """whether an experiment consists of runs with several values, none of which is chosen: the left-out data set"""
    is_length: bool = False
    """whether a run that goes on with another value is still one run, which only ends elsewhere"""
    may_be_infinite: bool = False
    """whether an infinite number is valid"""
    is_set: bool = False
    """whether the order of its classes or values has no meaning"""
    is_list_of_names: bool = False
    """whether null in a list is a name, too"""
    synonyms: tuple[str, ...] = ()
    """other names by which users ask for it; such an option is answered with this one"""
    kind: str = ""
    """the word by which ``fedsim list`` names its classes"""
    usage: str | None = None
    """a value, or the form of one, with which the first screen of the help shows the setting; empty: by its name alone;
    None: not there"""
    commands: tuple[str, ...] = ()
    """the commands that use the option; empty: all that train or score. A config has each one with a default, so all
    of these commands take it"""
    of_one_run: str = ""
    """why a command that starts several runs refuses it"""
    expected: str = ""
    """the values it takes, for an error message, where its type does not say it"""
    remedy: str = ""
    """of a value that cannot be used, for an error message"""
    refused_by: str = ""
    """a pattern of a library's messages about it that do not name it"""
    base: str = ""
    """base class of the classes that it names, where its type does not say it"""


NOTHING = Facts(effect="nothing")
ROUNDING = Facts(effect="rounding")


def facts_of(hint: Any) -> Facts:
    """Return the facts in an annotation; those of a setting that states none, without them."""
    return next((facts for facts in getattr(hint, "__metadata__", ()) if isinstance(facts, Facts)), Facts())
