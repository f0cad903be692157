"""A model's chat template: from messages to the text that the model was trained on."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from megarl.config.chat import ChatSettings
from megarl.config.tokenizer_files import TemplateSource
from megarl.core.errors import ConfigError, DataError, MegarlError
from megarl.core.excerpt import excerpt
from megarl.core.sample import Message
from megarl.data.chat_sandbox import ChatEnvironment, RefusedByTemplate, TooMuchWork
from megarl.data.control_tokens import ControlTokens

# A role is no text: templates write it next to control tokens, and some spell control tokens with it.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "environment")


class ChatTemplate:
    """Renders conversations, always up to where the policy begins to speak.

    In what `render` gives, control tokens have their secret names where the template placed them, and the contents of
    messages are as they were. ``tokens``: what the template knows as ``bos_token``, ``eos_token`` and so on.
    """

    def __init__(
        self, source: TemplateSource, control: ControlTokens, tokens: Mapping[str, str], settings: ChatSettings
    ) -> None:
        self.source = source
        self._control = control
        date = None if settings.date is None else datetime.date.fromisoformat(settings.date)
        self._environment = ChatEnvironment(date)
        self._variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            **{name: control.hide(text) for name, text in tokens.items()},
            **settings.options,
        }
        try:
            self._template = self._environment.load_text(source.text, control.hide)
        except TooMuchWork as error:
            raise self._too_much(error) from error
        except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:
            number = getattr(error, "lineno", None)
            line = "" if number is None else f":{number}"
            raise ConfigError(
                "MRL-1431", f"chat template {source.path}{line} is not valid Jinja: {excerpt(str(error))}."
            ) from error

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, with the prompt for the next turn of the policy's."""
        own = [self._own(message, index) for index, message in enumerate(messages)]
        variables = {**self._variables, "messages": own, "add_generation_prompt": True}
        try:
            return self._environment.render(self._template, variables)
        except RefusedByTemplate as error:
            raise DataError(
                "MRL-2041", f"the chat template {self.source.path} does not take the messages: {excerpt(str(error))}."
            ) from error
        except SecurityError as error:
            raise ConfigError(
                "MRL-1432",
                f"chat template {self.source.path} reaches for what no template needs: {excerpt(str(error))}.\n"
                "It may be hostile, and was stopped. Name another one: chat.template: FILE.jinja",
            ) from error
        except (TooMuchWork, RecursionError, MemoryError) as error:
            raise self._too_much(error) from error
        except Exception as error:  # a template is a program: anything may be wrong with it, or with what it is given
            raise DataError(
                "MRL-2044",
                f"the chat template {self.source.path} fails on the messages: {type(error).__name__}: "
                f"{excerpt(str(error))}.\nDo the messages have what it reads? {_OF_TODAY}",
            ) from error

    def _own(self, message: Message, index: int) -> dict[str, Any]:
        """What the template sees of a message: a copy; of the policy's own words, the tokens for thinking are real."""
        where = f"message {index + 1}"
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise DataError("MRL-2040", f"{where}: role {excerpt(str(role))} is not one of {', '.join(ROLES)}.")
        if not isinstance(content, (str, list)) and not (content is None and role == "assistant"):
            raise DataError("MRL-2040", f"{where}: content must be text, not {excerpt(str(content))}.")
        own = {str(key): value for key, value in message.items()}
        if role == "assistant" and isinstance(content, str):
            own["content"] = self._control.hide_ordinary(content)
        return own

    def _too_much(self, error: BaseException) -> MegarlError:
        return ConfigError(
            "MRL-1433",
            f"chat template {self.source.path} does too much: {excerpt(str(error) or type(error).__name__)}.\n"
            "Name another one: chat.template: FILE.jinja",
        )


_OF_TODAY = "A template that asks for today's date (strftime_now) needs chat.date."
