"""The options of the built-in rewards, so that a wrong one is found before anything starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.section import REQUIRED, Section, setting

_MANY = 10_000_000


def _broken(text: str, **values: Any) -> PydanticCustomError:
    return PydanticCustomError("rule", text, values)


def _regular_expression(num_groups: int | None = None) -> Callable[[str], str]:
    def check(pattern: str) -> str:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise _broken("not a regular expression: {problem}", problem=str(error)) from None
        if num_groups is not None and compiled.groups != num_groups:
            raise _broken(
                "it must have exactly {wanted} group, and has {found}", wanted=num_groups, found=compiled.groups
            )
        return pattern

    return check


def _web_address(url: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#@]+(?:[/?][^\s#]*)?", url):
        raise _broken("it must start with http:// or https:// and name a host, without a user name and without #")
    return url


Url = Annotated[str, AfterValidator(_web_address)]


class NoOptions(Section):
    """Of rewards that take none."""


class ExactMatchOptions(Section):
    """Of exact_match."""

    after: str | None = setting(None, "Compare what follows the last such text.", min_length=1, rule="text or null")


class MathAnswerOptions(Section):
    """Of math_answer."""

    last_number: bool = setting(False, "A response that marks no answer answers with its last number.")


class FormatOptions(Section):
    """Of format."""

    preset: Literal["think_answer", "think", "boxed", "hashes"] | None = setting(
        None, "A form that is known: `<think>…</think><answer>…</answer>`, `<think>…</think>…`, a box, or `#### …`."
    )
    pattern: Annotated[str, AfterValidator(_regular_expression())] | None = setting(
        None,
        "A regular expression of Python's that the whole response must match; a dot matches line ends too.",
        rule="a regular expression, or null",
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> FormatOptions:
        if (self.preset is None) == (self.pattern is None):
            raise _broken("give exactly one of preset and pattern")
        return self


class LengthOptions(Section):
    """Of length."""

    max_tokens: int = setting(REQUIRED, "From so many tokens on, the reward is -1.", ge=1, le=_MANY)
    buffer_tokens: int = setting(
        REQUIRED, "The last so many tokens before `max_tokens` lead from 0 to -1 in a straight line.", ge=1, le=_MANY
    )

    @model_validator(mode="after")
    def _buffer_fits(self) -> LengthOptions:
        if self.buffer_tokens > self.max_tokens:
            raise _broken("buffer_tokens must not be larger than max_tokens")
        return self


class CodeOptions(Section):
    """Of code."""

    tests_key: str = setting("tests", "The key of the row that holds its tests.", min_length=1, rule="text")
    partial: bool = setting(False, "Give the share of passed tests; else 1 if all pass, or 0.")
    timeout_seconds: float = setting(
        8.0, "For all tests of a response together. Keep it below `scoring.timeout_seconds`.", gt=0, le=86_400
    )
    memory_gb: float = setting(1.0, "Memory (address space) of each process of a response.", ge=0.1, le=1024)


class RequestOptions(Section):
    """How often and how long a server is asked."""

    timeout_seconds: float = setting(
        5.0, "Longest time for one try. All tries together have `scoring.timeout_seconds`.", gt=0, le=86_400
    )
    max_tries: int = setting(
        5, "Tries about one sample. Lost connections, time-outs, 429 and 5xx are tried again.", ge=1, le=100
    )
    api_key: str | None = setting(
        None, "Sent as `Authorization: Bearer …`.", pattern=r"^(env|file):.+$", rule="env:NAME or file:PATH, or null"
    )


class RemoteOptions(RequestOptions):
    """Of remote."""

    url: Url = setting(REQUIRED, "Where each sample is sent by POST.", rule="an http or https address")
    headers: dict[str, str] = setting(
        {}, "Further headers. A value env:NAME or file:PATH is looked up.", rule="a mapping from names to text"
    )


class JudgeOptions(RequestOptions):
    """Of judge."""

    url: Url = setting(
        REQUIRED, "The endpoint up to and with /v1; /chat/completions is added.", rule="an http or https address"
    )
    model: str = setting(REQUIRED, "The model's name there.", min_length=1, rule="text")
    template: str | None = setting(
        None, "What is asked, with {question}, {answer} and {response}; null: the built-in one.", rule="text or null"
    )
    verdict: Annotated[str, AfterValidator(_regular_expression(1))] = setting(
        r"Score:\s*(-?\d+(?:\.\d+)?)",
        "A regular expression with one group, the score. The last match of the judge's text counts.",
        rule="a regular expression with one group",
    )
    min_score: float = setting(0.0, "The score that becomes 0.", ge=-1e9, le=1e9)
    max_score: float = setting(10.0, "The score that becomes 1.", ge=-1e9, le=1e9)
    max_new_tokens: int = setting(512, "Longest verdict.", ge=1, le=1_000_000)

    @model_validator(mode="after")
    def _fits(self) -> JudgeOptions:
        if self.min_score >= self.max_score:
            raise _broken("min_score must be smaller than max_score")
        if self.template is not None and "{response}" not in self.template:
            raise _broken("template must contain {{response}}")
        return self


REWARD_OPTIONS: dict[str, type[Section]] = {
    "exact_match": ExactMatchOptions,
    "math_answer": MathAnswerOptions,
    "format": FormatOptions,
    "length": LengthOptions,
    "code": CodeOptions,
    "remote": RemoteOptions,
    "judge": JudgeOptions,
    "outcome": NoOptions,
    "model": NoOptions,
    "coin_flip": NoOptions,
}
