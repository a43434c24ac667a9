"""Constructors whose arguments are the fields of a dataclass, which defines and documents them once."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Any, Concatenate, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from fedsim.core.annotations import check_arguments, python_number
from fedsim.core.as_made import first_change, noted

P = ParamSpec("P")
S = TypeVar("S")


def takes_fields(settings: Callable[P, S]) -> Callable[[Callable[[Any, S], None]], Callable[Concatenate[Any, P], None]]:
    """Let a constructor of one argument, an instance of the dataclass ``settings``, take its fields instead.

    Type checkers, ``help()`` and jsonargparse show the names, types, defaults and texts of the fields.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Size:
    ...     height: int
    ...     width: int = 128
    >>> class Image:
    ...     @takes_fields(Size)
    ...     def __init__(self, size):
    ...         self.pixels = size.height * size.width
    >>> Image(256).pixels, inspect.signature(Image)
    (32768, <Signature (height: int, width: int = 128) -> None>)
    """
    types = get_type_hints(settings)
    fields = [p.replace(annotation=types[name]) for name, p in inspect.signature(settings).parameters.items()]

    def with_fields(constructor: Callable[[Any, S], None]) -> Callable[Concatenate[Any, P], None]:
        def construct(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            constructor(self, settings(*args, **kwargs))

        functools.update_wrapper(construct, constructor)
        del construct.__wrapped__  # type: ignore[attr-defined] # its signature differs
        self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.Signature([self_parameter, *fields], return_annotation=None)
        construct.__signature__ = signature  # type: ignore[attr-defined] # inspect reads it
        construct.__annotations__ = {**types, "return": None}  # for readers of type hints
        construct.__doc__ = _text(settings)
        return construct

    return with_fields


class ChecksArguments:
    """Base of classes whose arguments are checked by their annotations; ``option`` is that of their objects.

    >>> class Bag(ChecksArguments, option="model.bag"):
    ...     def __init__(self, is_full: bool = False) -> None:
    ...         pass
    >>> Bag("no")
    Traceback (most recent call last):
    fedsim.core.errors.ConfigError: model.bag.is_full: expected bool, got no
    """

    _option = ""  # without annotation: the parser would look for its names in the modules of derived classes

    def __init_subclass__(cls, option: str = "", **options: Any) -> None:
        """Keep the option, which a class derived from this one has, too."""
        super().__init_subclass__(**options)
        cls._option = option or cls._option

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments; without any, an object is copied."""
        if (args or kwargs) and cls.__init__ is object.__init__:  # which ignores them beside a __new__
            raise TypeError(f"{cls.__name__}() takes no arguments")
        check_arguments(cls, cls._option, args, kwargs)
        return super().__new__(cls)


@dataclass(frozen=True)
class Section:
    """Base of the dataclasses that are sections of a config, with the check of :class:`ChecksArguments`.

    It is a dataclass itself: only a class whose bases all are is a section for the parser, and no choice of a class.
    """

    _option = ""  # without annotation: the parser would look for its names in the modules of derived classes

    def __init_subclass__(cls, option: str = "", **options: Any) -> None:
        """Keep the option, which a class derived from this one has, too."""
        super().__init_subclass__(**options)
        cls._option = option or cls._option

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Check the fields; without any, an object is copied."""
        check_arguments(cls, cls._option, args, kwargs)
        return super().__new__(cls)


class KeepsArguments(ChecksArguments):
    """Base of classes whose objects can be written into a config: they know with what, and as what, they were made."""

    def __init_subclass__(cls, option: str = "", **options: Any) -> None:
        """Let the constructor note what it has made."""
        super().__init_subclass__(option=option, **options)
        owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
        if owner is cls or not (owner is object or issubclass(owner, KeepsArguments)):  # its own, or a mixin's
            cls.__init__ = _noting(cls.__init__)  # type: ignore[method-assign] # the class's own

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Keep the arguments."""
        made = super().__new__(cls, *args, **kwargs)
        kept = {name: _own(value) for name, value in kwargs.items()}
        made.__dict__["_made_with"] = (tuple(map(_own, args)), kept)
        return made


def _own(value: Any) -> Any:
    """Copy a collection, which its owner may change later."""
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def _noting(constructor: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that notes the object when the outermost one has ended."""

    @functools.wraps(constructor)
    def construct(self: Any, /, *args: Any, **kwargs: Any) -> None:
        if type(self).__init__ is not construct:
            return constructor(self, *args, **kwargs)
        inner = [value for value in (*args, *kwargs.values()) if isinstance(value, KeepsArguments)]
        changed = [name for value in inner if (name := first_change(value, vars(value).get("_noted", {})))]
        constructor(self, *args, **kwargs)
        vars(self).update(_noted=noted(self), _changed_before=changed)
        for value in inner if hasattr(self, "named_modules") else ():
            vars(value).pop("_noted", None)  # a layer of this network, which may change it
        return None

    return construct


def arguments_of(made: KeepsArguments) -> dict[str, Any]:
    """Return the arguments with which an object was made, and the defaults of the others.

    >>> class Box(KeepsArguments):
    ...     def __init__(self, width: int, height: int = 2) -> None:
    ...         pass
    >>> arguments_of(Box(3))
    {'width': 3, 'height': 2}
    """
    args, kwargs = vars(made)["_made_with"]
    signature = inspect.signature(type(made))
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        parameter_kind = signature.parameters[name].kind
        if parameter_kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        elif parameter_kind is not inspect.Parameter.VAR_POSITIONAL:
            arguments[name] = value
    return {name: python_number(value) for name, value in arguments.items()}


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def texts_of_fields(node: ast.ClassDef) -> dict[str, str]:
    """Return, for each field of a dataclass, the text below it in one line."""
    texts = {}
    for field, below in itertools.pairwise(node.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts


def _text(settings: Callable[..., Any]) -> str:
    """Return the docstring of a constructor with the texts of the fields of ``settings``."""
    try:
        [node] = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    except OSError:  # typed into a shell
        return ""
    assert isinstance(node, ast.ClassDef)
    lines = [f"    {name}: {description}" for name, description in texts_of_fields(node).items()]
    return "\n".join([f"Take the fields of {node.name}.", "", "Args:", *lines])
