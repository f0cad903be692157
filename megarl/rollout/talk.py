"""One conversation: between the user's function, which asks, and the rounds in which the policy answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.errors import DataError
from megarl.core.protocols import Generation, GenerationRequest, SamplingParams
from megarl.core.sample import Message, Prompt, Sample
from megarl.core.seeding import derive_seed
from megarl.data.encoder import PromptEncoder
from megarl.rollout.answering import OnSample
from megarl.rollout.conversation import OutOfBudget, PolicyTurn, Reply
from megarl.rollout.converse import Converse, outcome_of
from megarl.rollout.rounds import Rounds
from megarl.rollout.transcript import Transcript


@dataclass(frozen=True, slots=True)
class TalkLimits:
    """Of one conversation. What it may have of tokens altogether is in its sampling params."""

    max_turns: int
    max_turn_tokens: int | None
    tool_timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Opening:
    """What a conversation begins with. ``place`` is its place among all of a call."""

    place: int
    name: str
    prompt: Prompt
    seed: int
    params: SamplingParams
    on_sample: OnSample


class UserTalk:
    """A conversation that a user's function leads. Over when it has a ``sample``."""

    def __init__(self, opening: Opening, converse: Converse, encoder: PromptEncoder, limits: TalkLimits) -> None:
        self.place = opening.place
        self.sample: Sample | None = None
        self.began = self.ended = 0.0
        self._opening = opening
        self._converse = converse
        self._encoder = encoder
        self._limits = limits
        self._transcript = Transcript(opening.prompt.token_ids, opening.params.max_new_tokens)
        # the reply and all tokens of the question that waits for the policy
        self._asked: tuple[str, NDArray[np.int64]] = ("", opening.prompt.token_ids)
        self._is_out_of_budget = False

    def start(self, rounds: Rounds) -> Callable[[], object]:
        """See `Talk`."""
        self.began = time.monotonic()

        def returned(result: Any, error: BaseException | None) -> None:
            rounds.returned(self, lambda has_asked: self._end(result, error, has_asked=has_asked))

        generate = self._async_generate(rounds) if self._converse.is_async else self._generate(rounds)
        return self._converse.start(self._opening.prompt, generate, returned)

    def take(self, generation: Generation) -> PolicyTurn:
        """See `Talk`."""
        tokenizer = self._encoder.tokenizer
        ids = generation.token_ids
        # The token that ends a turn is the policy's own choice and is learned, but it is no text.
        ended = generation.finish == "stop" and int(ids[-1]) in self._opening.params.stop_token_ids
        text = tokenizer.decode(ids[:-1] if ended else ids)
        self._transcript.add(*self._asked, generation, text)
        return PolicyTurn(text, len(ids), generation.finish, self._transcript.room)

    def time_out(self, seconds: float) -> None:
        """See `Talk`."""
        self._close(
            f'MRL-2151 converse "{self._converse.name}" was busy for more than {seconds:g} s '
            f"(rollout.converse.tool_timeout_seconds) after turn {self._transcript.num_policy_turns}"
        )

    def _generate(self, rounds: Rounds) -> Callable[..., PolicyTurn]:
        def generate(
            reply: Reply | None = None, *, max_new_tokens: int | None = None, stop: str | Sequence[str] = ()
        ) -> PolicyTurn:
            return self._ask(rounds, reply, max_new_tokens, stop).result()

        return generate

    def _async_generate(self, rounds: Rounds) -> Callable[..., Any]:
        async def generate(
            reply: Reply | None = None, *, max_new_tokens: int | None = None, stop: str | Sequence[str] = ()
        ) -> PolicyTurn:
            return await asyncio.wrap_future(self._ask(rounds, reply, max_new_tokens, stop))

        return generate

    def _ask(
        self, rounds: Rounds, reply: Reply | None, max_new_tokens: int | None, stop: str | Sequence[str]
    ) -> Future[PolicyTurn]:
        rounds.require_turn(self)
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"generate(max_new_tokens={max_new_tokens}): give 1 or more")
        text, reply_ids = self._encode(reply)
        stop_ids = [self._stop_token(one) for one in ([stop] if isinstance(stop, str) else stop)]
        transcript, params, limits = self._transcript, self._opening.params, self._limits
        turn, room = transcript.num_policy_turns, transcript.room - len(reply_ids)
        if room < 1 or turn >= limits.max_turns:
            return self._empty_turn()
        asked = transcript.with_reply(reply_ids)
        self._asked = (text, asked)
        params = replace(
            params,
            max_new_tokens=min(room, limits.max_turn_tokens or room, max_new_tokens or room),
            stop_token_ids=(*params.stop_token_ids, *stop_ids),
        )
        seed = derive_seed(self._opening.seed, "turn", turn)
        return rounds.ask(self, GenerationRequest(f"{self._opening.name}/{turn}", asked, seed, params))

    def _empty_turn(self) -> Future[PolicyTurn]:
        if self._is_out_of_budget:
            raise OutOfBudget("the conversation's budget is used up; end it when a turn's finish is 'length'")
        self._is_out_of_budget = True
        self._transcript.finish = "length"
        turn: Future[PolicyTurn] = Future()
        turn.set_result(PolicyTurn("", 0, "length", self._transcript.room))
        return turn

    def _encode(self, reply: Reply | None) -> tuple[str, NDArray[np.int64]]:
        """The reply as text for people and as tokens."""
        is_first = self._transcript.num_policy_turns == 0
        turn_ended = not is_first and self._transcript.last_token in self._opening.params.stop_token_ids
        if reply is None:
            if turn_ended:
                raise ValueError("generate() without a reply: the policy has ended its turn and waits for one")
            return "", np.zeros(0, dtype=np.int64)
        if is_first:
            raise ValueError("the first generate() answers the prompt and takes no reply")
        content: str | Sequence[Message] = [reply] if isinstance(reply, Mapping) else reply
        ids = self._encoder.encode_reply(content, turn_ended=turn_ended)
        if isinstance(content, str):
            return content, ids
        return "\n".join(str(message.get("content", "")) for message in content), ids

    def _stop_token(self, text: str) -> int:
        tokenizer = self._encoder.tokenizer
        ids = tokenizer.encode(tokenizer.control.hide(text))  # the user's own program may name control tokens
        if len(ids) != 1:
            raise ValueError(f"generate(stop={text!r}): this is {len(ids)} tokens; a turn can end with one token only")
        return int(ids[0])

    def _end(self, result: Any, error: BaseException | None, *, has_asked: bool) -> None:
        name = self._converse.name
        outcome = None
        failure = ""
        if error is not None and not isinstance(error, OutOfBudget):
            failure = self._converse.failure(error)
        elif has_asked:
            failure = f'MRL-2153 converse "{name}" returned before generate had answered; await every call'
        elif self._transcript.num_policy_turns == 0:
            failure = f'MRL-2153 converse "{name}" returned without a turn of the policy; call generate()'
        else:
            try:
                outcome = outcome_of(name, result)
            except DataError as wrong:
                failure = str(wrong)
        sample = self._close(failure)
        if outcome is not None:
            sample.outcome, sample.scores = outcome.value, outcome.scores
        if not failure:
            self._opening.on_sample(self._opening.prompt, sample)

    def _close(self, failure: str) -> Sample:
        self.ended = time.monotonic()
        sample = self._transcript.sample(self._opening.seed)
        if failure:
            sample.failure = f"{failure} for prompt {self._opening.prompt.id!r}."
        self.sample = sample
        return sample
