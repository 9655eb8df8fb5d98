"""Keyword arguments that a dataclass declares: in the signature that help shows, and checked."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar, cast, get_type_hints

from lazyllm.support.checked import hint

Function = TypeVar("Function", bound=Callable[..., Any])


def takes(kind: type, *left_out: str, chosen: Collection[str] = ()) -> Callable[[Function], Function]:
    """Decorates a function whose last parameter is **options: options are the fields of this dataclass except
    those `left_out`. The fields in `chosen` default to None, for which the function chooses a value."""

    def decorate(function: Function) -> Function:
        hints = get_type_hints(kind)
        parameters = list(signature(function).parameters.values())[:-1]
        for field in fields(kind):
            default, kind_of = field.default, hints[field.name]
            if field.name in chosen:
                default, kind_of = None, kind_of | None
            elif field.default_factory is not MISSING:
                default = field.default_factory()
            elif default is MISSING:
                default = Parameter.empty
            if field.name not in left_out:
                parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind_of))
        shown = signature(function).replace(parameters=parameters)
        function.__signature__ = shown  # type: ignore[attr-defined]  # `wraps` copies it

        return names_its_options(function)

    return decorate


def names_its_options(function: Function) -> Function:
    """Decorates a function: errors about its arguments name it, and suggest options for one that it does not have."""
    shown = signature(function)
    names = [name for name in shown.parameters if name != "self"]

    @wraps(function)
    def checked(*values: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in names:
                advice = holder(name, shown.parameters.values()) or hint(name, names)
                raise TypeError(f"{function.__name__} has no option {name!r}; {advice}")
        try:
            shown.bind(*values, **keywords)
        except TypeError as error:
            raise TypeError(f"{function.__name__}: {error}") from None
        return function(*values, **keywords)

    return cast(Function, checked)


def holder(name: str, parameters: Iterable[Parameter]) -> str:
    """How to give an option that is a field of a parameter's dataclass, or a speedup; "" if it is neither."""
    for parameter in parameters:
        if (name, parameter.name) == ("speedup", "pruning"):
            return "a speedup is given as pruning=2.0"
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind) and name in {field.name for field in fields(kind)}:
            return f"give it as {parameter.name}={kind.__name__}({name}=…)"
    return ""
