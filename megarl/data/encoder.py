"""How a row's prompt becomes tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megarl.config.chat import ChatSettings
from megarl.config.problems import show
from megarl.config.tokenizer_files import find_template
from megarl.core.errors import ConfigError, DataError
from megarl.core.excerpt import excerpt
from megarl.core.sample import Message
from megarl.data.chat_template import ChatTemplate
from megarl.data.tokenizer import Tokenizer

_QUESTION: Message = {"role": "user", "content": "a question"}


class PromptEncoder:
    """A prompt is a text, or messages; with a chat template, both go through it.

    No control token ever comes from the content. ``system`` opens conversations that do not begin with a system prompt
    of their own; it needs a template.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        # the token that the policy ends a turn with
        self.end_of_turn_id = tokenizer.eos_token_id
        if template is not None:
            self._require_usable(template)
            end = tokenizer.control.name_at_start(self._said_after_policy(template, [_QUESTION]).lstrip())
            if end is not None:
                self.end_of_turn_id = tokenizer.control.id_of(end)
        # a policy stops where its files say, and where its chat template ends a turn
        self.stop_token_ids = tuple(sorted({*tokenizer.stop_token_ids, self.end_of_turn_id}))

    def encode(self, content: str | Sequence[Message]) -> NDArray[np.int64]:
        """Token ids of a whole prompt, up to where the policy begins."""
        if self.template is None:
            return self.tokenizer.encode(_plain(content))
        messages = _messages(content)
        if messages[-1].get("role") == "assistant":
            raise DataError("MRL-2040", "the last message is the assistant's: nothing is left for the policy to say.")
        opening = [] if messages[0].get("role") in ("system", "developer") else self._system
        return self.tokenizer.encode(self.template.render([*opening, *messages]))

    def encode_reply(self, content: str | Sequence[Message], *, turn_ended: bool = True) -> NDArray[np.int64]:
        """Token ids of what is said to the policy after its turn, up to where it begins again.

        ``turn_ended``: the policy's last token ended its turn. If it was cut off instead, the end comes first here.
        Nothing that was said before is rendered again, so all tokens before stay as they were generated.
        """
        if self.template is None:
            return self._encode_further(_plain(content))
        text = self._said_after_policy(self.template, _messages(content))
        end = self.tokenizer.control.name_at_start(text.lstrip())
        if end is not None and turn_ended:
            return self.tokenizer.encode(text.lstrip())[1:]
        return self._encode_further(text)

    def encode_demonstration(self, text: str) -> NDArray[np.int64]:
        """Token ids of a worked answer as the policy would say it after a prompt, with the end of its turn."""
        if self.template is None:
            spoken = self.tokenizer.encode(self.tokenizer.control.hide_ordinary(text))
        else:
            spoken = self._encode_further(self._as_policy_says(self.template, text))
        return np.append(spoken, self.end_of_turn_id)

    def _encode_further(self, text: str) -> NDArray[np.int64]:
        """Text that goes on after other tokens. Behind some control token, it is not taken for a text's beginning."""
        name = self.tokenizer.control.name_before_text
        return self.tokenizer.encode(name + text)[1:] if name else self.tokenizer.encode(text)

    def _as_policy_says(self, template: ChatTemplate, text: str) -> str:
        """What the template makes of an answer: some begin it with a blank, or with an empty thought.

        The answer as it is, if the template would leave some of it out: thoughts of earlier turns are of no use to it.
        """
        prompt, rest = template.render([_QUESTION]), self._said_after_policy(template, [])
        whole = template.render([_QUESTION, {"role": "assistant", "content": text}])
        answer = self.tokenizer.control.hide_ordinary(text)
        spoken = whole.removeprefix(prompt).removesuffix(rest)
        is_whole = len(prompt) + len(spoken) + len(rest) == len(whole) and answer.strip() in spoken
        return spoken if is_whole else answer

    def _said_after_policy(self, template: ChatTemplate, messages: Sequence[Message]) -> str:
        """What the template writes after a turn of the policy's, when these messages follow it."""
        mark = self.tokenizer.control.mark
        _, found, after = template.render([_QUESTION, {"role": "assistant", "content": mark}, *messages]).rpartition(
            mark
        )
        if not found:
            raise ConfigError(
                "MRL-1436",
                f"chat template {template.source.path} does not write what the assistant said.\n"
                "It cannot hold a conversation. Name another one: chat.template: FILE.jinja",
            )
        return after

    def _require_usable(self, template: ChatTemplate) -> None:
        """Refuse a template that cannot hold a plain conversation, before any data is read."""
        control = self.tokenizer.control
        opening: list[Message] = [{"role": "system", "content": control.mark}] if self._system else []
        try:
            text = template.render([*opening, _QUESTION])
            text += template.render([*opening, _QUESTION, {"role": "assistant", "content": "an answer"}, _QUESTION])
        except DataError as error:
            asked = "a plain conversation with chat.system" if opening else "a plain conversation"
            raise ConfigError(
                "MRL-1434",
                f"chat template {template.source.path} cannot render {asked}:\n{error}\n"
                "Name another one (chat.template: FILE.jinja), or chat.template: none for plain text.",
            ) from error
        if opening and control.mark not in text:
            raise ConfigError(
                "MRL-1434",
                f"chat template {template.source.path} leaves out the system prompt, and chat.system is set.\n"
                "Set chat.system: null and put its text into the prompts, or name another template.",
            )
        spelled = control.spelled_in(control.without_names(text))
        if spelled is not None:
            raise ConfigError(
                "MRL-1436",
                f"chat template {template.source.path} puts the control token {show(spelled)} together from pieces, so "
                "that it cannot be told from a user's text.\n"
                "Write a copy of the template that spells it out, and name that: chat.template: FILE.jinja",
            )


def load_encoder(settings: ChatSettings, tokenizer: Tokenizer) -> PromptEncoder:
    """The encoder that these settings choose, with its template tried out."""
    source = find_template(settings, tokenizer.name)
    if source is None:
        return PromptEncoder(tokenizer)
    template = ChatTemplate(source, tokenizer.control, tokenizer.named_tokens, settings)
    return PromptEncoder(tokenizer, template, settings.system)


def _messages(content: str | Sequence[Message]) -> list[Message]:
    """A plain text is what the user says."""
    messages: list[Message] = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
    if not messages:
        raise DataError("MRL-2040", "a conversation must have at least one message.")
    for message in messages:
        if not isinstance(message, Mapping):
            raise DataError("MRL-2040", f"a message must have a role and a content, not be {excerpt(str(message))}.")
    return messages


def _plain(content: str | Sequence[Message]) -> str:
    if isinstance(content, str):
        return content
    raise DataError(
        "MRL-2042",
        "a prompt is a list of messages, but the tokenizer has no chat template to write them with.\n"
        "Name one (chat.template: FILE.jinja), or give prompts as text.",
    )
