"""Runs a model's Jinja template as what it is: a program by a stranger.

Jinja's immutable sandbox keeps it away from Python; this one also bounds its work. The syntax tree is rewritten before it is
compiled so that every loop turn, call, literal and piece of output passes through the environment, which counts it. What
could do much work in one step is either measured first or not there: filters, functions and methods are an allow-list.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any, TypeVar

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 500_000  # syntax nodes run, a fraction of a second
STEPS_PER_MESSAGE = 5_000  # long templates with tools take a tenth
MAX_TEXT = 4_000_000  # characters written, beyond what the messages themselves need
_CALL_STEPS = 10
_MAX_INT_BITS = 256
_MAX_INDENT = 16

_FILTERS = frozenset(
    {"abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "indent", "int", "items", "join"}
    | {"last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "safe", "select"}
    | {"selectattr", "sort", "string", "title", "tojson", "trim", "unique", "upper"}
)
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        {"capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower", "isnumeric"}
        | {"isspace", "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex"}
        | {"rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title", "upper"}
    ),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    LoopContext: frozenset({"changed", "cycle"}),
}
_Body = TypeVar("_Body", nodes.Macro, nodes.CallBlock)


class LimitExceeded(TemplateError):
    """The template does more work than any chat needs."""


class Sandbox(ImmutableSandboxedEnvironment):
    """One template's environment. `start` a budget before each render; a sandbox renders one thing at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], finalize=_finalize)
        self.globals = {
            "range": safe_range,
            "namespace": Namespace,
            "dict": dict,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.filters = {name: _counted(self, self.filters[name]) for name in _FILTERS}
        self.filters |= {"join": self._join, "replace": self._replace, "indent": self._indent, "string": self.text, "tojson": self._tojson}
        self._callables = (*self.globals.values(), self.turns, self.spend, self.measured, self.joined)
        self.start(messages=0, input_chars=0)

    def start(self, *, messages: int, input_chars: int) -> None:
        """A fresh budget for so many messages of `input_chars` characters together."""
        self.steps_left = MAX_STEPS + STEPS_PER_MESSAGE * messages + input_chars
        self.text_left = self.text_limit = MAX_TEXT + 16 * input_chars

    def compiled(self, source: str) -> Template:
        """The template, rewritten to count its work. Raises TemplateError for bad syntax."""
        return self.from_string(_Counting().visit(self.parse(source)))

    # What rewritten templates call.

    def spend(self, steps: int) -> str:
        self.steps_left -= steps
        if self.steps_left < 0:
            raise LimitExceeded("the chat template runs too long; it is broken or hostile")
        return ""

    def turns(self, items: Iterable[Any], weight: int) -> Iterator[Any]:
        """The turns of a loop whose body has `weight` syntax nodes."""
        for item in items:
            self.spend(weight)
            yield item

    def measured(self, value: Any) -> Any:
        self.measure(value)
        return value

    def joined(self, *values: Any) -> str:
        return self._limited(self.text(value) for value in values)

    def text(self, value: Any) -> str:
        self.measure(value)
        return str(value)

    def measure(self, value: Any) -> int:
        """Items and characters in `value`, containers counted as often as they are reached: what its text may cost."""
        size, stack = 0, [value]
        while stack:
            item = stack.pop()
            if isinstance(item, Namespace):
                raise LimitExceeded("the chat template uses a namespace as a value")
            if isinstance(item, str):
                size += len(item)
                self.spend(len(item) >> 6)
            elif isinstance(item, dict):
                stack += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                stack += item
            size += 1
            self.spend(1)
            self._check(size + len(stack))
        return size

    def write(self, text: str) -> str:
        self.text_left -= len(text)
        self._check(self.text_limit - self.text_left)
        return text

    # What Jinja calls.

    def is_safe_callable(self, obj: Any) -> bool:
        if isinstance(obj, Macro | Undefined) or any(obj == known for known in self._callables):
            return True
        owner: object = getattr(obj, "__self__", None)
        return any(isinstance(owner, kind) and getattr(obj, "__name__", "") in names for kind, names in _METHODS.items())

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # positional names keep keywords free
        self.spend(_CALL_STEPS)
        owner: object = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            self.spend(len(owner) >> 6)
            bounded = {"join": self._join_method, "replace": self._replace}.get(__obj.__name__)
            if bounded is not None:
                return bounded(owner, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.spend(1)
        sequences = [value for value in (left, right) if isinstance(value, str | list | tuple)]
        if operator == "+" and sequences:
            self._check(sum(map(self.measure, sequences)))
        elif operator == "*" and sequences:
            factor = next((value for value in (left, right) if isinstance(value, int)), 1)
            self._check(self.measure(sequences[0]) * max(factor, 0))
        elif operator == "%" and sequences:
            raise SecurityError("the chat template formats text with %, which is not supported")
        elif operator in ("*", "**"):
            _check_numbers(operator, left, right)
        return super().call_binop(context, operator, left, right)

    # Filters whose result can be much larger than what they are given.

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        items = value if attribute is None else (self.getitem(item, attribute) for item in value)
        return self._join_method(self.text(d), items)

    def _join_method(self, separator: str, items: Iterable[Any]) -> str:
        def parts() -> Iterator[str]:
            for n, item in enumerate(items):
                if n:
                    yield separator
                yield self.text(item)

        return self._limited(parts())

    def _replace(self, s: Any, old: str, new: str, count: int = -1) -> str:
        text = self.text(s)
        found = len(text) + 1 if not old else text.count(old)
        self._check(len(text) + len(new) * (min(found, count) if count >= 0 else found))
        return text.replace(old, new, count)

    def _indent(self, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        margin = width if isinstance(width, str) else " " * min(width, _MAX_INDENT)
        lines = (self.text(s) + "\n").splitlines()  # the last line may be empty
        indented = (margin + line if (line or blank if n else first) else line for n, line in enumerate(lines))
        return self._join_method("\n", indented)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as chat templates expect it: not escaped for HTML."""
        self.measure(value)
        indent = None if indent is None else min(indent, _MAX_INDENT)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def _limited(self, parts: Iterable[str]) -> str:
        size, kept = 0, list[str]()
        for part in parts:
            size += len(part)
            self._check(size)
            kept.append(part)
        return "".join(kept)

    def _check(self, size: int) -> None:
        if size > self.text_limit:
            raise LimitExceeded("the chat template writes too much; it is broken or hostile")


class _Counting(NodeTransformer):
    """Makes a template report its work to the sandbox."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        if node.recursive:
            raise TemplateError("the chat template uses a recursive loop, which is not supported")
        weight = _weight(node)
        self.generic_visit(node)
        node.iter = _call("turns", node.iter, nodes.Const(weight))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._spending(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._spending(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call("joined", *node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Call:
        self.generic_visit(node)
        return _call("measured", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Call:
        self.generic_visit(node)
        return _call("measured", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _call("measured", node) if node.ctx == "load" else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:
        return nodes.Const(node.data)  # unlike template data, a constant passes through `finalize`

    def _spending(self, node: _Body) -> _Body:
        weight = _weight(node)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("spend", nodes.Const(weight))))
        return node


def _weight(node: nodes.Node) -> int:
    return 1 + sum(1 for _ in node.find_all(nodes.Node))


def _call(name: str, *args: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


def _counted(sandbox: Sandbox, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # carries over Jinja's marks of what a filter wants passed
    def counted(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            if isinstance(value, str):
                sandbox.spend(len(value) >> 6)
            elif isinstance(value, list | tuple | dict | range):
                sandbox.spend(len(value) >> 3)
        sandbox.spend(1)
        result = function(*args, **kwargs)
        return sandbox.turns(result, 1) if isinstance(result, Iterator) else result

    return counted


@pass_context  # keeps Jinja from writing constants while it compiles
def _finalize(context: Context, value: Any) -> str:
    sandbox: Any = context.environment
    return sandbox.write(value if isinstance(value, str) else sandbox.text(value))


def _check_numbers(symbol: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = operator.mul(left.bit_length(), max(right, 0)) if symbol == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_INT_BITS:
            raise LimitExceeded("the chat template computes with huge numbers; it is broken or hostile")


def _raise_exception(message: object = "") -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:64])
