"""`ChatTemplate`: turns a conversation into one text, and finds the assistant's turns in it.

Templates are Jinja2, as Hugging Face folders hold them. They run in a sandbox, with the names that
Transformers gives them: `messages`, `tools`, `add_generation_prompt`, `bos_token` and the other
special tokens, `raise_exception`, `strftime_now`, the filter `tojson`, and `{% generation %}`.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zeroxla.cli.data.bad_rows import RowError
from zeroxla.cli.data.vocabulary import special_tokens, tokenizer_config
from zeroxla.program.extras import extra

TEMPLATE = "chat_template.jinja"

DEFAULT = """\
{{ bos_token }}{% for message in messages %}
<|{{ message.role }}|>
{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}

{% else %}
{{ message.content }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""
"""The template of a model whose folder has none. The document's first token begins a conversation.
A message is a line with its role, such as <|user|>, and its content; the assistant's ends with the
token that ends a document. The texts of roles are plain text, no special tokens."""

NOW = datetime.datetime(2025, 1, 1)
"""The time that templates read. It is the same in every run, so that a resumed run sees the same
tokens."""


class Rendering(NamedTuple):
    """A conversation as one text.

    Attributes:
      text: the text.
      spans: the assistant's turns in it: first character, and the one after the last.
    """

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """A chat template.

    The assistant's turns are what stands between `{% generation %}` and `{% endgeneration %}`. In a
    template without these, the turn of message i is the text that the first i + 1 messages have
    more than the first i messages with the prompt for an answer (`add_generation_prompt`).

    Args:
      source: the template.
      special: texts of special tokens by name: "bos_token", "eos_token". These two are empty if
        they are missing.
      now: the time that `strftime_now` gives.

    Raises:
      ImportError: jinja2 is not installed.
      ValueError: the template has an error of syntax.

    >>> template = ChatTemplate(DEFAULT, {"eos_token": "</s>"})
    >>> text, spans = template.render([
    ...     {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
    ... ])
    >>> text
    '<|user|>\\nHello\\n<|assistant|>\\nHi</s>\\n'
    >>> [text[first:end] for first, end in spans]
    ['Hi</s>']
    """

    def __init__(
        self, source: str, special: Mapping[str, str], *, now: datetime.datetime = NOW
    ) -> None:
        with extra("text", "chat templates need"):
            import jinja2
            import jinja2.nodes
            import jinja2.sandbox
        self.source = source
        # Marks around the assistant's turns. No text holds them by chance.
        mark = secrets.token_hex(16)
        self._begin = f"\N{REPLACEMENT CHARACTER}{mark}("
        self._end = f"){mark}\N{REPLACEMENT CHARACTER}"
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _generation(self._begin, self._end)],
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": now.strftime,
            "bos_token": "",
            "eos_token": "",
            **special,
        }
        self._errors = (
            *(jinja2.TemplateError, TypeError, ValueError, AttributeError),
            *(LookupError, ArithmeticError, RecursionError),
        )
        try:
            self._template = environment.from_string(source)
            nodes = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template is no Jinja2 (line {error.lineno}: {error.message}); correct it"
            ) from error
        self.marks_turns = any(
            node.name == _MARK for node in nodes.find_all(jinja2.nodes.ExtensionAttribute)
        )
        """Whether the template has `{% generation %}`."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendering:
        """Turn messages into one text.

        Raises:
          RowError: the template refuses the messages, or the assistant's turns cannot be found.
        """
        marked = self._text(messages, tools, add_generation_prompt)
        rendering = self._without_marks(marked)
        if self.marks_turns:
            return rendering
        text, spans = rendering.text, []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:i], tools, True) if i else ""
            upto = text if i + 1 == len(messages) else self._text(messages[: i + 1], tools, False)
            if not upto.startswith(before) or not text.startswith(upto):
                raise RowError(
                    f"the chat template writes the messages before the assistant's message {i} "
                    "otherwise in the whole conversation, so that this turn cannot be found; mark "
                    "the turns in the template with {% generation %} and {% endgeneration %}"
                )
            spans.append((len(before), len(upto)))
        return Rendering(text, spans)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None
    ) -> str:
        """Return the text of messages, up to where the assistant answers.

        Raises:
          RowError: the template refuses the messages, or makes no text of them.
        """
        text = self._without_marks(self._text(messages, tools, True)).text
        if not text:
            raise RowError("the chat template makes no text of the conversation; give another one")
        return text

    def _text(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool
    ) -> str:
        try:
            return self._template.render(
                messages=list(messages), tools=tools, add_generation_prompt=add_generation_prompt
            )
        except self._errors as error:
            raise RowError(f"the chat template refuses the conversation: {error}") from error

    def _without_marks(self, marked: str) -> Rendering:
        """Take the marks out of a text, and return where they were."""
        parts, spans, length = marked.split(self._begin), [], 0
        texts = [parts[0]]
        length = len(parts[0])
        for part in parts[1:]:
            turn, _, rest = part.partition(self._end)
            spans.append((length, length + len(turn)))
            texts += [turn, rest]
            length += len(turn) + len(rest)
        return Rendering("".join(texts), spans)


def find_template(folder: Path) -> str | None:
    """Return the chat template of a Hugging Face folder: `chat_template.jinja`, or the entry
    "chat_template" of `tokenizer_config.json` (of several templates the one named "default"). None
    if it has none.

    Raises:
      ValueError: a file cannot be read, or none of several templates is named "default".
    """
    file = folder / TEMPLATE
    if file.is_file():
        return read_template(file)
    found = tokenizer_config(folder).get("chat_template")
    if isinstance(found, list):
        named = {x.get("name"): x.get("template") for x in found if isinstance(x, dict)}
        if not isinstance(named.get("default"), str):
            raise ValueError(
                f"{folder} has chat templates named {', '.join(map(repr, named))} and none named "
                '"default"; give one as a file'
            )
        return named["default"]
    return found if isinstance(found, str) else None


def read_template(file: Path) -> str:
    """Read a chat template from its own file.

    Raises:
      ValueError: it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the chat template {file}: {error}") from error


def template_of(folder: Path, *, now: datetime.datetime = NOW) -> ChatTemplate:
    """Return the chat template of a Hugging Face folder with its special tokens, or `DEFAULT`.

    Raises:
      ImportError: jinja2 is not installed.
      ValueError: as `find_template`, or the template has an error.
    """
    return ChatTemplate(find_template(folder) or DEFAULT, special_tokens(folder), now=now)


_MARK = "_mark"


def _generation(begin: str, end: str) -> Any:
    """Return the extension of Jinja2 that puts marks around what `{% generation %}` encloses."""
    import jinja2.ext
    import jinja2.nodes

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012  (so Jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method(_MARK)
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{begin}{caller()}{end}"

    return Generation


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """Return JSON as it is, without the escapes that web pages need."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
