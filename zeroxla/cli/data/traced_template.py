"""`TracedTemplate`: a chat template as Jinja2 compiles it, whose texts know where they are from."""

from __future__ import annotations

import datetime
import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zeroxla.cli.data.bad_rows import RowError
from zeroxla.cli.data.traced_text import Traced, concat, origins, traced
from zeroxla.cli.data.turns import BEGIN, GENERATION, Field, LoopPlace, TurnFinder
from zeroxla.program.extras import extra

_MARK = "_mark"
# Variables that the instrumented template reads; no template has them by chance.
_ENTER, _LEAVE = "zeroxla_enter_loop", "zeroxla_leave_loop"
_AT, _SET = "zeroxla_at_item", "zeroxla_set_to"


class TracedTemplate:
    """A template that Jinja2 has compiled. Its texts are `Traced`: fields of messages, loops over
    messages, and what `{% generation %}` encloses."""

    def __init__(self, environment: Any, source: str) -> None:
        import jinja2
        import jinja2.nodes

        try:
            tree = environment.parse(source)
            self.names = _names(tree)
            self.marks_turns = any(
                node.name == _MARK for node in tree.find_all(jinja2.nodes.ExtensionAttribute)
            )
            self._template = environment.from_string(_with_loops(tree).set_environment(environment))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template is no Jinja2 (line {error.lineno}: {error.message}); correct it"
            ) from error
        self._errors = (
            *(jinja2.TemplateError, TypeError, ValueError, AttributeError),
            *(LookupError, ArithmeticError, RecursionError),
        )
        self.turns = TurnFinder(self)

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool
    ) -> str:
        places = {id(message): i for i, message in enumerate(messages)}

        def at(item: Any) -> str:
            found = places.get(id(item))
            if found is None and isinstance(item, Mapping):  # made of a message by the template
                fields = {x.message for x in origins(item) if isinstance(x, Field)}
                found = fields.pop() if len(fields) == 1 else None
            return Traced("", [(0, 0, LoopPlace("at", found))])

        def set_to(value: Any) -> str:
            found = places.get(id(value))
            return "" if found is None else Traced("", [(0, 0, LoopPlace("set", found))])

        loop = {_ENTER: _place("enter"), _AT: at, _SET: set_to, _LEAVE: _place("leave")}
        try:
            return self._template.render(
                messages=list(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **loop,
            )
        except self._errors as error:
            name = Traced.__name__
            reason = str(error).replace(f"{Traced.__module__}.", "").replace(name, "str")
            raise RowError(f"the chat template refuses the conversation: {reason}") from error


def environment_of(special: Mapping[str, str], now: datetime.datetime) -> Any:
    """Return Jinja2's environment of templates, which keeps the origins of texts."""
    with extra("text", "chat templates need"):
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Traces what `{% generation %}` encloses."""

        tags = {"generation"}  # noqa: RUF012  (so Jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method(_MARK)
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            text = caller()
            return Traced(text, [*getattr(text, "spans", ()), (0, len(text), GENERATION)])

    class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
        concat = staticmethod(concat)  # of what a template, a block or a macro writes

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            text = getattr(function, "__self__", None)
            if isinstance(text, str) and getattr(function, "__name__", "") == "join":
                function = Traced(text, getattr(text, "spans", ())).join  # of a literal, too
            return super().call(context, function, *args, **kwargs)

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    join = environment.filters["join"]

    @functools.wraps(join)
    def traced_join(context: Any, value: Any, d: str = "", attribute: Any = None) -> str:
        return join(context, value, Traced(d), attribute)

    environment.filters |= {"tojson": _tojson, "join": traced_join}
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": now.strftime,
        "eos_token": "",
        **special,
        BEGIN: traced(special.get(BEGIN, ""), Field(None, BEGIN)),
    }
    return environment


def _with_loops(node: Any) -> Any:
    """Return a template's tree that writes, as places without characters, where it enters a loop,
    is at an item, sets a name and leaves the loop; and in which `~` keeps the origins of texts, as
    `+` does."""
    from jinja2 import nodes

    def output(value: Any, line: int) -> Any:
        return nodes.Output([value]).set_lineno(line)

    def told(name: str, child: Any) -> Any:
        is_name = isinstance(child.target, nodes.Name)
        value = nodes.Name(child.target.name, "load") if is_name else nodes.Const(None)
        call = nodes.Call(nodes.Name(name, "load"), [value], [], None, None)
        return output(call, child.lineno)

    def statements(child: Any) -> Iterator[Any]:
        child = _with_loops(child)
        if isinstance(child, nodes.For):
            child.body.insert(0, told(_AT, child))
            yield output(nodes.Name(_ENTER, "load"), child.lineno)
            yield child
            yield output(nodes.Name(_LEAVE, "load"), child.lineno)
        elif isinstance(child, nodes.Assign):
            yield child
            yield told(_SET, child)
        else:
            yield child

    for name, value in node.iter_fields():
        if isinstance(value, list):
            children = [statements(x) if isinstance(x, nodes.Node) else (x,) for x in value]
            setattr(node, name, list(itertools.chain.from_iterable(children)))
        elif isinstance(value, nodes.Node):
            setattr(node, name, _with_loops(value))
    if isinstance(node, nodes.Concat):
        texts = [nodes.Filter(x, "string", [], [], None, None) for x in node.nodes]
        return functools.reduce(nodes.Add, texts).set_lineno(node.lineno)
    return node


def _names(tree: Any) -> set[str]:
    """Return the names and the words that a template has: it reads no others."""
    from jinja2 import nodes

    words = {x.attr for x in tree.find_all(nodes.Getattr)}
    return words | {x.value for x in tree.find_all(nodes.Const) if isinstance(x.value, str)}


def _place(event: str) -> str:
    return Traced("", [(0, 0, LoopPlace(event))])


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Return JSON as it is, without the escapes that web pages need; all of it is of the origins
    that strings in it have."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)
    found = dict.fromkeys(origins(value))
    return Traced(text, [(0, len(text), x) for x in found]) if found else text


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
