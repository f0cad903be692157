"""Templates are programs from anybody: what they may not do, what they do too much of, and what works as elsewhere."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from megarl.config.chat import ChatSettings
from megarl.config.tokenizer_files import TemplateSource
from megarl.core.errors import ConfigError, DataError, MegarlError
from megarl.data.chat_template import ChatTemplate
from megarl.data.tokenizer import load_tokenizer

# also what would be a format, if somebody took a user's words for one
MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "  What is\n1 + 1? é 50% of 1234567, {:{w}} and %*d {0:99999}  "},
    {"role": "assistant", "content": "2", "tool_calls": [{"name": "f", "arguments": {"x": [1, None, "é<"]}}]},
    {"role": "user", "content": "Thanks!"},
]
OPTIONS = {"tools": [{"name": "f"}], "flag": True, "count": 3}


def template(text: str, **chat: Any) -> ChatTemplate:
    source = TemplateSource(Path("chat.jinja"), text)
    return ChatTemplate(source, load_tokenizer("builtin:characters").control, {"eos_token": "."}, ChatSettings(**chat))


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content | trim }}\n    {% endif %}\n{% endfor %}",
        "{%- for m in messages -%} {{ m['role'] | upper ~ ': ' ~ m.content }}{{ eos_token }} {%- endfor -%}",
        "{{ messages[2].tool_calls | tojson }}{{ tools | tojson(indent=4) }}{{ messages[0] | tojson }}",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
        "{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% set x = 1 %}{% endgeneration %}{{ x }}{% endfor %}",
        "{% set ns = namespace(n=0, text='') %}{% for m in messages[::-1] %}{% set ns.n = ns.n + m.content | length %}"
        "{% set ns.text = ns.text + m.role[0] * 2 %}{% endfor %}{{ ns.n }} {{ ns.text }}",
        "{% macro turn(m, depth=0) %}{{ m.role }}{% if depth < 3 %}{{ turn(m, depth + 1) }}{% endif %}{% endmacro %}"
        "{{ turn(messages[0]) }}{{ messages | map(attribute='role') | join(', ') }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ documents is none }}{{ nothing }}"
        "{{ undefined_thing is defined }}{{ flag and count == 3 }}{{ '%s-%d' % ('a', count) }}"
        "{{ 'a{}'.format(count) }}",
        "{% for a in [[1, [2, 3]], [4]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}"
        "{{ 7 // 2 }}{{ 2 ** 10 }}",
        "{{ messages[1].content.strip().split('\\n')[-1].replace('1', 'one') }}{{ range(3) | list }}{{ 'x' is string }}"
        "{{ [messages[1].content, 'b'] | join('-') }}{{ messages[1].content.replace('é', 'e') | string | tojson }}"
        "{{ messages[1].content ~ '%s' % messages[1].content }}{{ '%d' % 1753142400 }}"
        "{{ '{}'.format(messages[1].content) }}"
        "{% if add_generation_prompt %}go{% endif %}{{ messages[0].content | replace('&', 'and') | indent(2) }}",
    ],
)
def test_a_template_means_what_it_means_in_transformers(text: str) -> None:
    variables = {"eos_token": ".", "flag": True, "count": 3}
    (expected,), _ = render_jinja_template(
        [MESSAGES], tools=OPTIONS["tools"], chat_template=text, add_generation_prompt=True, **variables
    )
    assert template(text, options=OPTIONS).render(MESSAGES) == expected


GROW_X = "{% set n = namespace(t='x') %}{% for i in range(99) %}"
HOSTILE = {
    "attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "MRL-1432"),
    "attributes by filter": ("{{ (messages | attr('__class__')).__base__ }}", "MRL-1432"),
    "globals": ("{{ raise_exception.__globals__['os'].system('true') }}", "MRL-1432"),
    "globals of a macro": ("{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}", "MRL-1432"),
    "template": ("{{ self._TemplateReference__context.environment }}", "MRL-1432"),
    "format": ("{{ '{0.__class__.__mro__}'.format(1) }}", "MRL-1432"),
    "format_map": ("{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}", "MRL-1432"),
    "changing a list": ("{{ messages.append(1) }}", "MRL-1432"),
    "changing a message": ("{{ messages[0].update({'role': 'x'}) }}", "MRL-1432"),
    "files": ("{% include '/etc/passwd' %}", "MRL-2044"),
    "clock": ("{{ strftime_now('%Y') }}", "MRL-2044"),
    "chance": ("{{ [1, 2] | random }}", "MRL-1431"),
    "lorem": ("{{ lipsum(n=1000000) }}", "MRL-2044"),
    "loop": ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "MRL-1433"),
    "loop without turns": (
        "{% for i in range(9999) %}{% for j in range(9999) if false %}{% endfor %}{% endfor %}",
        "MRL-1433",
    ),
    "long range": ("{% for i in range(10000000000) %}{% endfor %}", "MRL-1433"),
    "calls": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "MRL-1433",
    ),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "MRL-1433"),
    "recursive loop": ("{% for a in [[1]] recursive %}{{ loop([[1], [1]]) }}{% endfor %}", "MRL-1433"),
    "long output": ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "MRL-1433"),
    "times": ("{{ 'x' * 10000000000 }}", "MRL-1433"),
    "times a list": ("{{ ([[1] * 1000] * 1000) * 1000 }}", "MRL-1433"),
    "doubling +": (
        "{% set n = namespace(t='x') %}{% for i in range(99) %}{% set n.t = n.t + n.t %}{% endfor %}",
        "MRL-1433",
    ),
    "doubling ~": (
        "{% set n = namespace(t='x') %}{% for i in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
        "MRL-1433",
    ),
    "doubling a list": (
        "{% set n = namespace(t=[1]) %}{% for i in range(60) %}{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.t }}",
        "MRL-1433",
    ),
    "doubling by join": (
        "{% set n = namespace(t='xx') %}{% for i in range(60) %}{% set n.t = [n.t, n.t] | join(n.t) %}{% endfor %}",
        "MRL-1433",
    ),
    "replace": ("{{ ('x' * 100000).replace('x', 'y' * 100000) }}", "MRL-1433"),
    "replace by filter": ("{{ ('x' * 100000) | replace('x', 'y' * 100000) }}", "MRL-1433"),
    "padding": ("{{ 'x'.ljust(10000000000) }}", "MRL-1433"),
    "padding by filter": ("{{ 'x' | center(10000000000) }}", "MRL-1433"),
    "padding by format": ("{{ '{:>10000000000}'.format('x') }}", "MRL-1433"),
    "padding by %": ("{{ '%10000000000d' % 1 }}", "MRL-1433"),
    "padding by %*": ("{{ '%*d' % (10000000000, 1) }}", "MRL-1433"),
    "padding by {}": ("{{ '{:{w}}'.format('x', w=10000000000) }}", "MRL-1433"),
    "padding by filter format": ("{{ '%10000000000d' | format(1) }}", "MRL-1433"),
    "repeating by format": ("{{ ('%s' * 9000) % (['x' * 90000] * 9000) }}", "MRL-1433"),
    "padding by map": ("{{ ['x'] | map('center', 10000000000) | list }}", "MRL-1433"),
    "power": ("{{ 10 ** 10 ** 10 }}", "MRL-1433"),
    "squares": (
        "{% set n = namespace(t=9) %}{% for i in range(99) %}{% set n.t = n.t * n.t %}{% endfor %}",
        "MRL-1433",
    ),
    "syntax": ("{% if %}", "MRL-1431"),
    "nesting": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "MRL-1431"),
    "deep blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "MRL-1431"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped_with_one_clear_error(name: str) -> None:
    text, code = HOSTILE[name]
    start = time.thread_time()
    with pytest.raises((ConfigError, DataError), match=code) as caught:
        template(text).render(MESSAGES)
    assert "chat.jinja" in str(caught.value)
    assert isinstance(caught.value, MegarlError)
    # The limit on processor time is far above what any of these may take; it is what would show a hole.
    assert time.thread_time() - start < 10


def test_dates_are_what_the_settings_say() -> None:
    text = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}26 Jul 2024{% endif %}"
    assert template(text, date="2026-01-31").render(MESSAGES) == "31 Jan 2026"
    assert template(text).render(MESSAGES) == "26 Jul 2024"


def test_a_template_is_as_good_after_a_failure_as_before() -> None:
    own = template("{% for i in range(messages[0].content | length * 60000) %}{% endfor %}ok")
    for _ in range(2):
        with pytest.raises(ConfigError, match="MRL-1433"):
            own.render(MESSAGES)
        assert own.render([{"role": "user", "content": ""}]) == "ok"


def test_messages_are_not_changed_by_rendering() -> None:
    before = [dict(message) for message in MESSAGES]
    template("{% for m in messages %}{% set m = m.content %}{{ m }}{% endfor %}").render(MESSAGES)
    assert before == MESSAGES
