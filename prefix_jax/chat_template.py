"""Chat templates, rendered as transformers renders them."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    names: Mapping[str, Any],
    more_names: Mapping[str, Any],
    *,
    continues: bool = False,
) -> str:
    """The template over `messages` and what else it knows by name. continues: the text ends with the last message's
    content. ValueError for whatever the template raises, and for a name given twice."""
    if continues:
        messages = _marked(messages)
    try:
        text = _compile(template).render(messages=messages, **names, **more_names)
    except Exception as error:  # a template is a program
        raise ValueError(f"the chat template refused the messages: {error}") from error
    return _cut_at_mark(text) if continues else text


class _Generation(Extension):
    """transformers' {% generation %} … {% endgeneration %}, which marks what the assistant says: it stays as it is."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
    return environment.from_string(source)


_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own, which templates may know


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """With a mark behind the content of the last message."""
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"there is no content to continue in the last message: {messages[-1]!r:.80}")
    return [*messages[:-1], {**messages[-1], "content": content + _MARK}]


def _cut_at_mark(text: str) -> str:
    """A rendered chat up to its mark, without spaces there if the template strips them."""
    place = text.rfind(_MARK.strip())
    if place < 0:
        raise ValueError("there is no content to continue: the chat template does not show that of the last message")
    return text[:place] if text.startswith(_MARK, place) else text[:place].rstrip()
