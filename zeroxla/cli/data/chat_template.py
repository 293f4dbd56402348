"""`ChatTemplate`: turns a conversation into one text, and finds what the model learns of it.

Templates are Jinja2, as Hugging Face folders hold them. They run in a sandbox, with the names that
Transformers gives them: `messages`, `tools`, `add_generation_prompt`, `bos_token` and the other
special tokens, `raise_exception`, `strftime_now`, the filter `tojson`, and `{% generation %}`.
"""

from __future__ import annotations

import bisect
import datetime
import itertools
import json
import operator
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zeroxla.cli.data.bad_rows import RowError
from zeroxla.cli.data.row_values import CALLS, THOUGHTS, WEIGHTS, is_learned, text_of_content
from zeroxla.cli.data.traced_template import TracedTemplate, environment_of
from zeroxla.cli.data.traced_text import origins, traced
from zeroxla.cli.data.turns import ANSWER, GENERATION, Field, fields_of, pieces_of
from zeroxla.cli.data.vocabulary import special_tokens, tokenizer_config

TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""The folder beside `TEMPLATE` with templates of other names, a file each."""
OF_A_PROCESSOR = "chat_template.json"
"""The file in which older folders of multimodal models have their template."""

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

_WITH_TOOLS = "tool_use"


class Rendering(NamedTuple):
    """A conversation as one text.

    Attributes:
      text: the text.
      spans: what the model learns of it: first character, and the one after the last.
    """

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """A chat template, or several with names, of which "tool_use" writes conversations with tools.

    Args:
      source: the template; or the templates by name, with one named "default".
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
        self,
        source: str | Mapping[str, str],
        special: Mapping[str, str],
        *,
        now: datetime.datetime = NOW,
    ) -> None:
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        environment = environment_of(special, now)
        used = ("default", _WITH_TOOLS)
        self._templates = {
            x: TracedTemplate(environment, self.sources[x]) for x in used if x in self.sources
        }

    @property
    def source(self) -> str:
        """The template named "default"."""
        return self.sources["default"]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        num_given: int = 0,
    ) -> Rendering:
        """Turn messages into one text, and find what the model learns of it.

        That is what the assistant writes, in the messages that are learned (docs/data.md): between
        `{% generation %}` and `{% endgeneration %}`, or, in a template without these, from the end
        of the prompt for the answer to the end of what the template writes for the message.

        Args:
          messages: the conversation.
          tools: descriptions of tools.
          num_given: the number of messages at the beginning that are not learned.

        Raises:
          RowError: the template refuses the messages, leaves out some of what they say, or its text
            does not show where a turn is.

        Cost: one rendering, and another for each way in which the template begins an answer other
        than with the prompt for one.
        """
        assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [i for i in assistant if i >= num_given and is_learned(messages[i])]
        template, said, tools, text = self._written(messages, tools, False, learned)
        if not template.marks_turns:
            spans = template.turns.find(text, said, tools, learned)
        else:
            marked = [x[:2] for x in getattr(text, "spans", ()) if x[2] == GENERATION]
            spans = sorted((a, b) for a, b in marked if a < b)
            if learned != assistant:
                spans = _of_messages(spans, text, learned)
        return Rendering(str.__str__(text), spans)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None
    ) -> str:
        """Return the text of messages, up to where the assistant answers.

        Raises:
          RowError: the template refuses the messages, leaves out some of what they say, or makes no
            text of them.
        """
        text = str.__str__(self._written(messages, tools, True, ())[-1])
        if not text:
            raise RowError("the chat template makes no text of the conversation; give another one")
        return text

    def write(self, folder: Path) -> None:
        """Write the templates into a folder, as `find_template` reads them."""
        (folder / TEMPLATE).write_text(self.source, encoding="utf-8")
        for name, source in self.sources.items():
            if name != "default":
                (folder / MORE_TEMPLATES).mkdir(exist_ok=True)
                (folder / MORE_TEMPLATES / f"{name}.jinja").write_text(source, encoding="utf-8")

    def _written(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        learned: Collection[int],
    ) -> tuple[TracedTemplate, list[dict[str, Any]], Any, str]:
        """Return the template that is used, the messages and tools as it reads them, and its text.

        Contents may be text or parts, and arguments of calls objects or JSON text. A template may
        take one of the two only. So it first gets what the row has (and arguments as objects), and
        others if it refuses that or leaves it out.
        """
        name = _WITH_TOOLS if tools and _WITH_TOOLS in self._templates else "default"
        template, errors = self._templates[name], []
        stage = 0
        tools = traced(tools, Field(None, "tools")) if tools else None
        has_calls = any(key in message for message in messages for key in CALLS)
        kinds = {type(message.get("content")) for message in messages}
        forms = ("as it is", *["text"] * (list in kinds), *["parts"] * (str in kinds))
        for form, as_text in itertools.product(forms, (False, True)[: 1 + has_calls]):
            said = [
                _as_read(message, i, form=form, as_text=as_text)
                for i, message in enumerate(messages)
            ]
            try:
                stage = 0
                text = template(said, tools, add_generation_prompt)
                stage, there = 1, _written_fields(text, said)
                _check_contents(text, said, there, learned)
                stage = 2
                _check_fields(template.names, said, tools, there)
            except RowError as error:
                errors.append((stage, error))
            else:
                return template, said, tools, text
        # The form with which the template came furthest shows what is wrong.
        raise max(errors, key=operator.itemgetter(0))[1]


def _as_read(message: Mapping[str, Any], i: int, *, form: str, as_text: bool) -> dict[str, Any]:
    """Return message i as templates read it, all of its strings but the role traced to it.

    Args:
      message: the message.
      i: its place.
      form: give its content "as it is", as one "text", or as "parts".
      as_text: give the arguments of calls as JSON text, not as objects.
    """
    made: dict[str, Any] = {}
    for key, value in message.items():
        if key == "role":
            made[key] = value
        elif key == "tool_calls" and isinstance(value, list):
            made[key] = [_call(x, Field(i, key, (k,)), as_text) for k, x in enumerate(value)]
        elif key == "function_call":
            made[key] = _call(value, Field(i, key, (0,)), as_text)
        elif key not in WEIGHTS:
            if key == "content" and form == "text":
                value = text_of_content(value)
            elif key == "content" and form == "parts" and isinstance(value, str):
                value = [{"type": "text", "text": value}]
            made[key] = traced(value, Field(i, key))
    return made


def _call(call: Any, field: Field, as_text: bool) -> Any:
    """Return a call without keys that are null, its arguments an object, or JSON text."""
    if not isinstance(call, Mapping):
        return traced(call, field)
    made = {}
    for key, value in call.items():
        if key == "function":
            made[key] = _call(value, field, as_text)
        elif key == "arguments":
            read = _arguments(value)
            if as_text and isinstance(read, Mapping):
                read = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            made[key] = traced(read, field._replace(part=(*field.part, key)))
        elif value is not None:
            made[key] = traced(value, field)
    return made


def _arguments(value: Any) -> Any:
    """Return the object that the arguments of a call are; other values as they are."""
    if not isinstance(value, str):
        return {} if value is None else value
    if not value.strip():
        return {}
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return read if isinstance(read, dict) else value


def _written_fields(text: str, messages: Sequence[Mapping[str, Any]]) -> set[Any]:
    """Return what a text has of messages: fields, pairs of a message and a key, and messages of
    whose answer there is something."""
    pieces = pieces_of(text)
    there: set[Any] = set()
    for first, end, field in fields_of(text):
        if first == end:
            continue
        is_answer = field.message is not None and messages[field.message]["role"] == "assistant"
        around = pieces[bisect.bisect(pieces, first, key=operator.attrgetter("first")) - 1].message
        # The results of tools may repeat the name of a call.
        if not is_answer or around in (None, field.message):
            there |= {field, field[:2]} | ({field.message} if field.key in ANSWER else set())
    return there


def _check_fields(
    names: Collection[str], messages: Sequence[Mapping[str, Any]], tools: Any, there: set[Any]
) -> None:
    """Check that a template, with these names in it, wrote the tools, calls and thoughts."""
    if tools and (None, "tools") not in there:
        raise RowError(
            'the row has "tools", and the chat template does not write them; leave them out, or '
            f"give a template that does ({_OPTION})"
        )
    for i, message in enumerate(messages):
        role = message["role"]
        for key in THOUGHTS:
            if message.get(key) and key not in names and (i, key) not in there:
                raise RowError(
                    f'message {i} of the {role} has "{key}", which the chat template never reads; '
                    f"leave it out, rename it, or give a template that reads it ({_OPTION})"
                )
        for key in CALLS:
            for field in origins(message.get(key)):
                if field not in there:
                    what = field.part[-1] if len(field.part) > 1 else "name"
                    raise RowError(
                        f'message {i} of the {role} has "{key}", and the chat template does not '
                        f"write the {what} of call {field.part[0]}; leave the row out, or give a "
                        f"template that does ({_OPTION})"
                    )


def _check_contents(
    text: str, messages: Sequence[Mapping[str, Any]], there: set[Any], learned: Collection[int]
) -> None:
    """Check that a text has the contents of messages."""
    places, pieces = {field[:2] for _, _, field in fields_of(text)}, pieces_of(text)
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content", "")
        is_list, is_missing = isinstance(content, list), False
        if content := text_of_content(content).strip():
            # Templates may leave out the thoughts of an answer, and what is beside its calls.
            is_there = (i, "content") in there or (i in there and role == "assistant")
            mine = (text[x.first : x.end] for x in pieces if x.message == i and not is_list)
            is_missing = not is_there and not any(content in x for x in mine)
        if (is_missing and (role != "assistant" or i in learned)) or (
            # A list that left no place was written as Python writes lists, or passed over.
            is_list and (i, "content") not in places
        ):
            raise RowError(
                f"the chat template does not write the content of message {i}, whose role is "
                f'"{role}"; leave it out, or give a template that does ({_OPTION})'
            )


def _of_messages(
    spans: list[tuple[int, int]], text: str, learned: Collection[int]
) -> list[tuple[int, int]]:
    """Return the spans that are of messages that are learned."""
    pieces, kept = pieces_of(text), []
    for first, end in spans:
        (message, *others) = {x.message for x in pieces if max(x.first, first) < min(x.end, end)}
        if message is None and all(x.message is None for x in pieces if x.first >= first):
            # It ends the conversation, and so the last message.
            message = next((x.message for x in pieces[::-1] if x.message is not None), None)
        if others or message is None:
            raise RowError(
                "not all of the assistant's messages are to be learned, and the chat template does "
                "not show which message its {% generation %} is of; put {% generation %} into a "
                f"loop over messages, around one of them ({_OPTION})"
            )
        if message in learned:
            kept.append((first, end))
    return kept


def find_template(folder: Path) -> str | dict[str, str] | None:
    """Return the chat template of a Hugging Face folder, or several by name. None if it has none.

    It is `chat_template.jinja` with the files in `additional_chat_templates`; or the entry
    "chat_template" of `tokenizer_config.json`, or of `chat_template.json`.

    Raises:
      ValueError: a file cannot be read, or none of several templates is named "default".
    """
    if (folder / TEMPLATE).is_file() or any((folder / MORE_TEMPLATES).glob("*.jinja")):
        return read_template(folder / TEMPLATE)
    found = tokenizer_config(folder).get("chat_template")
    if found is None:
        found = tokenizer_config(folder, OF_A_PROCESSOR).get("chat_template")
    if isinstance(found, list):
        found = {x.get("name"): x.get("template") for x in found if isinstance(x, dict)}
    if isinstance(found, dict):
        return _with_default(found, folder)
    return found if isinstance(found, str) else None


def read_template(file: Path) -> str | dict[str, str]:
    """Read a chat template from its own file; one named `chat_template.jinja` with those of other
    names beside it, in the folder `additional_chat_templates`.

    Raises:
      ValueError: it cannot be read.
    """
    more = sorted((file.parent / MORE_TEMPLATES).glob("*.jinja")) if file.name == TEMPLATE else []
    found = {x.stem: _read(x) for x in more}
    if not found:
        return _read(file)
    if file.is_file():
        found["default"] = _read(file)
    return _with_default(found, file.parent)


def template_of(folder: Path, *, now: datetime.datetime = NOW) -> ChatTemplate:
    """Return the chat template of a Hugging Face folder with its special tokens, or `DEFAULT`.

    Raises:
      ImportError: jinja2 is not installed.
      ValueError: as `find_template`, or the template has an error.
    """
    return ChatTemplate(find_template(folder) or DEFAULT, special_tokens(folder), now=now)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the chat template {file}: {error}") from error


def _with_default(found: Mapping[Any, Any], folder: Path) -> dict[str, str]:
    named = {name: x for name, x in found.items() if isinstance(name, str) and isinstance(x, str)}
    if "default" not in named:
        raise ValueError(
            f"{folder} has chat templates named {', '.join(map(repr, found))} and none named "
            '"default"; give one as a file'
        )
    return named


_OPTION = "--chat-template"
