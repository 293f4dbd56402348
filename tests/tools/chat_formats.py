"""Chat formats, each twice: as a Jinja2 template, and as a writer in plain Python.

A writer knows what the model learns by itself: it returns the text in parts, each with whether the
assistant wrote it. It never sees the template. `Refused` says that a format cannot say something.
"""
# ruff: noqa: E501  (lines of templates are as long as in folders)

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
Parts = list[tuple[str, bool]]
Row = Mapping[str, Any]


class Refused(Exception):
    """The format has no way to say this."""


@dataclasses.dataclass(frozen=True)
class Format:
    """A chat format.

    Attributes:
      template: the Jinja2 template, or several by name.
      write: turns a row into parts.
    """

    template: str | dict[str, str]
    write: Callable[[Row], Parts]


def text_of(message: Row) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def calls_of(message: Row) -> list[tuple[str, dict[str, Any]]]:
    """The names of the functions that a message calls, with the arguments as objects."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        found.append((function["name"], arguments))
    return found


def no_tools(row: Row, *roles: str) -> None:
    """Refuse what only formats with tools can say, and other roles than these."""
    if row.get("tools") or any(calls_of(m) for m in row["messages"]):
        raise Refused
    if any(m["role"] not in roles for m in row["messages"] if roles):
        raise Refused


def no_thoughts(row: Row, *keys: str) -> None:
    """Refuse thoughts beside the content, but for those under these keys."""
    refused = {"reasoning_content", "thinking"} - {*keys}
    if any(refused & m.keys() for m in row["messages"]):
        raise Refused


def is_learned(message: Row) -> bool:
    return message["role"] == "assistant" and message.get("weight", 1) == 1


# ChatML: every role in the same frame. With marks, and without the prompt for an answer, too.

_FRAME = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
)
_GENERATION_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHATML = _FRAME + "{% endfor %}" + _GENERATION_PROMPT
CHATML_BARE = _FRAME + "{% endfor %}"
CHATML_MARKED = """\
{%- for m in messages %}
    {{- '<|im_start|>' ~ m['role'] ~ '\\n' }}
    {%- if m['role'] == 'assistant' %}
        {%- generation %}{{ m['content'] }}{{- '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- m['content'] ~ '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


# The prompt for an answer comes only after others than the assistant.
CHATML_AFTER_OTHERS = CHATML.replace("if add", "if messages[-1].role != 'assistant' and add")


def chatml(row: Row, *, end: str = "<|im_end|>\n") -> Parts:
    no_tools(row)
    no_thoughts(row)
    parts = []
    for m in row["messages"]:
        parts += [
            (f"<|im_start|>{m['role']}\n", False),
            (text_of(m) + end, is_learned(m)),
            ("<|im_end|>\n"[len(end) :], False),
        ]
    return parts


# As older Qwen: the first turn of the loop brings a system prompt, if the row has none.

QWEN2 = """\
{%- for message in messages %}
    {%- if loop.first and messages[0]['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def qwen2(row: Row) -> Parts:
    own = (
        []
        if row["messages"][0]["role"] == "system"
        else ["<|im_start|>system\nYou help.<|im_end|>\n"]
    )
    return [*((x, False) for x in own), *chatml(row)]


# Answers that follow each other share a frame.

SHARED = """\
{%- for m in messages %}
    {%- set before = messages[loop.index0 - 1].role if loop.index0 else '' %}
    {%- if m.role != 'assistant' %}{{- '<' + m.role + '>' + m.content + '</' + m.role + '>' }}
    {%- else %}
        {%- if before != 'assistant' %}{{- '<assistant>' }}{%- else %}{{- '\\n' }}{%- endif %}
        {{- m.content }}
        {%- if loop.last or loop.nextitem.role != 'assistant' %}{{- '</assistant>' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}
"""


def shared(row: Row) -> Parts:
    no_tools(row)
    no_thoughts(row)
    said, parts = row["messages"], []
    roles = ["", *(m["role"] for m in said), ""]
    for m, before, after in zip(said, roles, roles[2:], strict=False):
        if m["role"] != "assistant":
            parts.append((f"<{m['role']}>{text_of(m)}</{m['role']}>", False))
            continue
        is_first, is_last = before != "assistant", after != "assistant"
        parts.append(("<assistant>" * is_first, False))
        answer = "\n" * (not is_first) + text_of(m) + "</assistant>" * is_last
        parts.append((answer, is_learned(m)))
    return parts


# Alpaca and Vicuna: the question, or the prompt for an answer, brings the words before an answer.

ALPACA = """\
{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + eos_token + '\\n\\n' }}\
{% elif m.role == 'user' %}{{ '### Instruction:\\n' ~ m.content ~ '\\n\\n### Response:\\n' }}\
{% else %}{{ m.content ~ '\\n\\n' }}{% endif %}{% endfor %}"""
VICUNA = """\
{% for m in messages %}{% if m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + eos_token }}\
{% elif m.role == 'user' %}{{ 'USER: %s ' % m.content }}{% else %}{{ m.content + ' ' }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""


def alpaca(row: Row) -> Parts:
    no_tools(row)
    no_thoughts(row)
    parts = []
    for m in row["messages"]:
        if m["role"] == "assistant":
            parts.append((text_of(m) + "</s>\n\n", is_learned(m)))
        elif m["role"] == "user":
            parts.append((f"### Instruction:\n{text_of(m)}\n\n### Response:\n", False))
        else:
            parts.append((text_of(m) + "\n\n", False))
    return parts


def vicuna(row: Row) -> Parts:
    no_tools(row)
    no_thoughts(row)
    parts = []
    for m in row["messages"]:
        if m["role"] == "assistant":
            parts += [("ASSISTANT:", False), (f" {text_of(m)}</s>", is_learned(m))]
        else:
            parts.append((f"{'USER: ' * (m['role'] == 'user')}{text_of(m)} ", False))
    return parts


# Llama 3: contents are trimmed, the first message brings the token that begins the text.

LLAMA3 = """\
{% for message in messages %}
{% set written = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}
{% if loop.first %}{% set written = bos_token + written %}{% endif %}
{{- written }}
{%- endfor %}
{% if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""


def llama3(row: Row) -> Parts:
    no_tools(row)
    no_thoughts(row)
    parts = [("<s>", False)]
    for m in row["messages"]:
        parts.append((f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n", False))
        parts.append((text_of(m).strip() + "<|eot_id|>", is_learned(m)))
    return parts


# Mistral: no header before answers, the system prompt in the first question, tools before the last.

MISTRAL = """\
{%- set said = messages %}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\\n\\n' %}
    {%- set said = messages[1:] %}
{%- endif %}
{%- set asked = said | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in said %}
    {%- if m.role == 'user' %}
        {%- if tools and m == asked[-1] %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}
    {%- elif m.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {{- call.function | tojson }}{{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + (m.content | string) + '}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('unknown role ' + m.role) }}
    {%- endif %}
{%- endfor %}
"""


def mistral(row: Row) -> Parts:
    no_thoughts(row)
    said, system, parts = list(row["messages"]), "", [("<s>", False)]
    if said[0]["role"] == "system":
        system = text_of(said.pop(0)) + "\n\n"
    if not said or (system.strip() and said[0]["role"] != "user"):
        raise Refused
    asked = [m for m in said if m["role"] == "user"]
    if row.get("tools") and not asked:
        raise Refused
    for i, m in enumerate(said):
        if m["role"] == "user":
            if row.get("tools") and m == asked[-1]:
                tools = json.dumps(row["tools"])
                parts.append((f"[AVAILABLE_TOOLS] {tools}[/AVAILABLE_TOOLS]", False))
            first = system if i == 0 else ""
            parts.append((f"[INST] {first}{text_of(m)} [/INST]", False))
        elif calls := calls_of(m):
            each = (json.dumps({"name": n, "arguments": x}) for n, x in calls)
            parts.append((f"[TOOL_CALLS] [{', '.join(each)}]</s>", is_learned(m)))
        elif m["role"] == "assistant":
            parts.append((f" {text_of(m)}</s>", is_learned(m)))
        elif m["role"] == "tool":
            parts.append((f'[TOOL_RESULTS] {{"content": {text_of(m)}}}[/TOOL_RESULTS]', False))
        else:
            raise Refused
    return parts


# Gemma: the assistant is called "model", roles alternate, the system prompt is in the first turn.

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set before = messages[0]['content'] | trim + '\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set before = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (before if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""


def gemma(row: Row) -> Parts:
    no_tools(row)
    no_thoughts(row)
    said, system, parts = list(row["messages"]), "", [("<s>", False)]
    if said[0]["role"] == "system":
        system = text_of(said.pop(0)).strip() + "\n\n"
    if not said:
        raise Refused
    for i, m in enumerate(said):
        if (m["role"] == "user") != (i % 2 == 0):
            raise Refused
        name = "model" if m["role"] == "assistant" else m["role"]
        parts.append((f"<start_of_turn>{name}\n{system if i == 0 else ''}", False))
        texts = [text_of(m)] if isinstance(m["content"], str) else [x["text"] for x in m["content"]]
        parts.append(("".join(map(str.strip, texts)) + "<end_of_turn>\n", is_learned(m)))
    return parts


# Qwen3: thoughts of turns before the last question are dropped; tools, calls and results.

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'You may call:' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages | length - 1) %}
{%- for m in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and m.role == 'user' and m.content is string and not m.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.content is string %}{%- set content = m.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thoughts = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<|im_start|>' + m.role + '\\n<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + m.role + '\\n' + content }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def _thoughts_and_rest(m: Row) -> tuple[str, str]:
    content = text_of(m)
    if "reasoning_content" in m:
        return m["reasoning_content"], content
    if "</think>" in content:
        before = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
        return before, content.split("</think>")[-1].lstrip("\n")
    return "", content


def qwen3(row: Row) -> Parts:
    no_thoughts(row, "reasoning_content")
    said, parts = row["messages"], []
    system = text_of(said[0]) if said[0]["role"] == "system" else None
    if row.get("tools"):
        listed = "".join("\n" + json.dumps(tool) for tool in row["tools"])
        begin = "" if system is None else system + "\n\n"
        parts.append((f"<|im_start|>system\n{begin}You may call:{listed}<|im_end|>\n", False))
    elif system is not None:
        parts.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    questions = [i for i, m in enumerate(said) if m["role"] == "user"]
    last = questions[-1] if questions else len(said) - 1
    for i, m in enumerate(said):
        if m["role"] == "user" or (m["role"] == "system" and i):
            parts.append((f"<|im_start|>{m['role']}\n{text_of(m)}<|im_end|>\n", False))
        elif m["role"] == "assistant":
            thoughts, rest = _thoughts_and_rest(m)
            answer = rest
            if i > last and (i + 1 == len(said) or thoughts):
                stripped = thoughts.strip("\n")
                answer = f"<think>\n{stripped}\n</think>\n\n" + rest.lstrip("\n")
            for k, (name, arguments) in enumerate(calls_of(m)):
                answer += "\n" if rest or k else ""
                call = f'{{"name": "{name}", "arguments": {json.dumps(arguments)}}}'
                answer += f"<tool_call>\n{call}\n</tool_call>"
            parts.append(("<|im_start|>assistant\n", False))
            parts.append((answer + "<|im_end|>\n", is_learned(m)))
        elif m["role"] == "tool":
            if i == 0 or said[i - 1]["role"] != "tool":
                parts.append(("<|im_start|>user", False))
            parts.append((f"\n<tool_response>\n{text_of(m)}\n</tool_response>", False))
            if i + 1 == len(said) or said[i + 1]["role"] != "tool":
                parts.append(("<|im_end|>\n", False))
    return parts


# R1: thoughts of all turns are dropped, the prompt for an answer begins one; results of tools are
# closed by the answer that follows; arguments must be text.

R1 = """\
{%- set ns = namespace(in_results=false, system='') %}
{%- for m in messages %}{%- if m.role == 'system' %}{%- set ns.system = ns.system + m.content %}{%- endif %}{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.in_results = false %}
        {{- '<|User|>' + m.content }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '<|Assistant|>' + m.content + '<|calls|>' }}
        {%- for call in m.tool_calls %}
            {{- '<|call|>' + call.function.name + '\\n' + call.function.arguments + '<|/call|>' }}
        {%- endfor %}
        {{- '<|/calls|>' + eos_token }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content.split('</think>')[-1] if '</think>' in m.content else m.content %}
        {%- if ns.in_results %}
            {{- '<|/results|>' + content + eos_token }}
            {%- set ns.in_results = false %}
        {%- else %}
            {{- '<|Assistant|>' + content + eos_token }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {%- if not ns.in_results %}{{- '<|results|>' }}{%- set ns.in_results = true %}{%- endif %}
        {{- '<|result|>' + m.content + '<|/result|>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.in_results %}{{- '<|/results|>' }}{%- endif %}
{%- if add_generation_prompt and not ns.in_results %}{{- '<|Assistant|><think>\\n' }}{%- endif %}
"""


def r1(row: Row) -> Parts:
    no_thoughts(row)
    if row.get("tools"):
        raise Refused
    said, in_results = row["messages"], False
    parts = [("<s>" + "".join(text_of(m) for m in said if m["role"] == "system"), False)]
    for m in said:
        if m["role"] == "user":
            in_results = False
            parts.append(("<|User|>" + text_of(m), False))
        elif m["role"] == "assistant":
            closing = "<|/results|>" if in_results and not calls_of(m) else "<|Assistant|>"
            parts.append((closing, False))
            if calls := calls_of(m):
                # The row's own text of the arguments, if it has one.
                given = [x["function"]["arguments"] for x in m["tool_calls"]]
                texts = [x if isinstance(x, str) else json.dumps(x) for x in given]
                each = (
                    f"<|call|>{n}\n{x}<|/call|>" for (n, _), x in zip(calls, texts, strict=True)
                )
                answer = f"{text_of(m)}<|calls|>{''.join(each)}<|/calls|></s>"
            else:
                answer = text_of(m).split("</think>")[-1] + "</s>"
                in_results = False
            parts.append((answer, is_learned(m)))
        elif m["role"] == "tool":
            parts += [("<|results|>", False)] * (not in_results)
            in_results = True
            parts.append((f"<|result|>{text_of(m)}<|/result|>", False))
    return [*parts, ("<|/results|>", False)] if in_results else parts


# Command R: two named templates, of which one has tools; every turn has a frame of two tokens.

_COHERE = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}\
{% else %}{% set rest = messages %}{% set system = 'Help people.' %}{% endif %}\
{{ '<|START|><|SYSTEM|>' + system }}TOOLS{{ '<|END|>' }}\
{% for message in rest %}{% set content = message['content'] %}\
{% if message['role'] == 'user' %}{{ '<|START|><|USER|>' + content.strip() + '<|END|>' }}\
{% elif message['role'] == 'assistant' %}{{ '<|START|><|CHATBOT|>' + content.strip() }}CALLS{{ '<|END|>' }}\
{% elif message['role'] == 'tool' %}{{ '<|START|><|SYSTEM|>' + content + '<|END|>' }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ '<|START|><|CHATBOT|>' }}{% endif %}"""
_COHERE_TOOLS = "{{ '\\n\\nTools:' }}{% for tool in tools %}{{ '\\n' + tool.function.name + ': ' + tool.function.parameters | tojson }}{% endfor %}"
_COHERE_CALLS = """\
{% for call in message.tool_calls or [] %}{{ '\\nAction: ' }}\
{{ {'tool_name': call.function.name, 'parameters': call.function.arguments} | tojson(indent=2) }}{% endfor %}"""
COMMAND_R = {
    "default": _COHERE.replace("TOOLS", "").replace("CALLS", ""),
    "tool_use": _COHERE.replace("TOOLS", _COHERE_TOOLS).replace("CALLS", _COHERE_CALLS),
}


def command_r(row: Row) -> Parts:
    no_thoughts(row)
    said, tools, system = list(row["messages"]), row.get("tools") or (), "Help people."
    if not tools and any(calls_of(m) for m in said):
        raise Refused
    if said[0]["role"] == "system":
        system = text_of(said.pop(0))
    if any(m["role"] == "system" for m in said):
        raise Refused
    listed = [
        f"\n{x['function']['name']}: {json.dumps(x['function']['parameters'])}" for x in tools
    ]
    listed = "\n\nTools:" + "".join(listed) if tools else ""
    parts = [(f"<s><|START|><|SYSTEM|>{system}{listed}<|END|>", False)]
    for m in said:
        name = {"user": "USER", "assistant": "CHATBOT", "tool": "SYSTEM"}[m["role"]]
        content = text_of(m) if m["role"] == "tool" else text_of(m).strip()
        for function, arguments in calls_of(m):
            call = {"tool_name": function, "parameters": arguments}
            content += "\nAction: " + json.dumps(call, indent=2)
        parts += [(f"<|START|><|{name}|>", False), (content + "<|END|>", is_learned(m))]
    return parts


# Plain: roles as words, no prompt for an answer.

PLAIN = (
    "{% for m in messages %}{{ m.role.capitalize() }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
)


def plain(row: Row) -> Parts:
    no_tools(row)
    no_thoughts(row)
    parts = []
    for m in row["messages"]:
        parts.append((f"{m['role'].capitalize()}: ", False))
        parts.append((text_of(m) + "</s>\n", is_learned(m)))
    return parts


# Zephyr: the prompt for an answer is written by the last turn of the loop.

ZEPHYR = """\
{% for m in messages %}
{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""


def zephyr(row: Row) -> Parts:
    no_tools(row)
    no_thoughts(row)
    parts = []
    for m in row["messages"]:
        parts.append((f"<|{m['role']}|>\n", False))
        parts.append((text_of(m) + "</s>\n", is_learned(m)))
    return parts


# Channels, as gpt-oss has them: the model writes the channel of its answer itself.

CHANNELS = """\
{%- set ns = namespace(called=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
        {%- if m.tool_calls %}
            {%- set call = m.tool_calls[0].function %}
            {%- set ns.called = call.name %}
            {{- '<|start|>assistant to=' ~ call.name ~ '<|channel|>commentary<|message|>' ~ call.arguments | tojson ~ '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>' ~ ns.called ~ ' to=assistant<|message|>' ~ m.content | tojson ~ '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""


def channels(row: Row) -> Parts:
    no_thoughts(row, "thinking")
    if row.get("tools") or any(len(calls_of(m)) > 1 for m in row["messages"]):
        raise Refused
    said, called, parts = row["messages"], None, []
    for i, m in enumerate(said):
        if m["role"] == "assistant":
            parts.append(("<|start|>assistant", False))
            answer = ""
            if "thinking" in m:
                answer = f"<|channel|>analysis<|message|>{m['thinking']}<|end|><|start|>assistant"
            if calls := calls_of(m):
                ((called, arguments),) = calls
                answer += f" to={called}<|channel|>commentary<|message|>{json.dumps(arguments)}"
                answer += "<|call|>"
            else:
                end = "<|return|>" if i + 1 == len(said) else "<|end|>"
                answer += f"<|channel|>final<|message|>{text_of(m)}{end}"
            parts.append((answer, is_learned(m)))
        elif m["role"] == "tool":
            result = json.dumps(text_of(m))
            parts.append((f"<|start|>{called} to=assistant<|message|>{result}<|end|>", False))
        else:
            parts.append((f"<|start|>{m['role']}<|message|>{text_of(m)}<|end|>", False))
    return parts


# Results of calls stand inside the turn that called, which a loop over numbers writes.

INSIDE = """\
{%- for i in range(messages | length) %}
    {%- set m = messages[i] %}
    {%- if m.role == 'tool' %}{%- continue %}{%- endif %}
    {{- '<turn|' + m.role + '>' + m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<call|' + call.function.name }}
        {%- for key, value in call.function.arguments | items %}{{- '|' ~ key ~ '=' ~ value | tojson }}{%- endfor %}
        {{- '>' }}
    {%- endfor %}
    {%- set scan = namespace(on=true) %}
    {%- for k in range(i + 1, messages | length) %}
        {%- set follow = messages[k] %}
        {%- if follow.role != 'tool' %}{%- set scan.on = false %}{%- endif %}
        {%- if scan.on %}{{- '<result>' + follow.content + '</result>' }}{%- endif %}
    {%- endfor %}
    {{- '</turn>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<turn|assistant>' }}{%- endif %}
"""


def inside(row: Row) -> Parts:
    no_thoughts(row)
    said, parts = row["messages"], []
    first = itertools.takewhile(lambda m: m["role"] == "tool", said)
    if row.get("tools") or any(text_of(m).strip() for m in first):
        raise Refused
    for i, m in enumerate(said):
        if m["role"] == "tool":
            continue
        answer = text_of(m)
        for name, arguments in calls_of(m):
            pairs = (f"|{key}={json.dumps(value)}" for key, value in arguments.items())
            answer += f"<call|{name}{''.join(pairs)}>"
        parts += [(f"<turn|{m['role']}>", False), (answer, is_learned(m))]
        for follow in said[i + 1 :]:
            if follow["role"] != "tool":
                break
            parts.append((f"<result>{text_of(follow)}</result>", False))
        parts.append(("</turn>", is_learned(m)))
    return parts


# A template that gathers its text and writes it at the end, so that no loop shows where turns are.

GATHERED = """\
{% set ns = namespace(text='') %}
{% for m in messages %}{% set ns.text = ns.text + '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' %}{% endfor %}
{{- ns.text }}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

FORMATS = {
    "chatml": Format(CHATML, chatml),
    "chatml, marked": Format(CHATML_MARKED, lambda row: chatml(row, end="<|im_end|>")),
    "chatml, no prompt": Format(CHATML_BARE, chatml),
    "chatml, after others": Format(CHATML_AFTER_OTHERS, chatml),
    "qwen2": Format(QWEN2, qwen2),
    "shared": Format(SHARED, shared),
    "alpaca": Format(ALPACA, alpaca),
    "vicuna": Format(VICUNA, vicuna),
    "llama3": Format(LLAMA3, llama3),
    "mistral": Format(MISTRAL, mistral),
    "gemma": Format(GEMMA, gemma),
    "qwen3": Format(QWEN3, qwen3),
    "r1": Format(R1, r1),
    "command-r": Format(COMMAND_R, command_r),
    "plain": Format(PLAIN, plain),
    "zephyr": Format(ZEPHYR, zephyr),
    "channels": Format(CHANNELS, channels),
    "inside": Format(INSIDE, inside),
    "gathered": Format(GATHERED, chatml),
}
