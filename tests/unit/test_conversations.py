"""Conversations of several turns: what is drawn, what is masked, who waits for whom, and what becomes of failures."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megarl.core.protocols import GenerationRequest
from megarl.core.sample import Prompt, Sample, Turn
from megarl.core.seeding import derive_seed
from megarl.core.world import World
from megarl.data.encoder import PromptEncoder
from megarl.metrics.meter import Meter
from megarl.rewards.reward import Reward
from megarl.rollout.conversation import Abandoned, AsyncGenerate, Generate, OutOfBudget, PolicyTurn
from megarl.rollout.converse import Converse
from tests.unit.one_rank import one_rank_world, reported
from tests.unit.talking import EOS, TOKENIZER, ScriptedPolicy, Setting, samples, says, talk


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as world:
        yield world


def ids_of(text: str) -> list[int]:
    return [int(token) for token in TOKENIZER.encode(text)]


# -- what a conversation is made of


def test_the_tokens_of_fifty_turns_are_those_that_were_drawn_and_told(world: World) -> None:
    """Texts play no part in it: what was drawn, token by token, with what was told in between."""
    drawn: dict[str, list[tuple[list[int], list[float]]]] = {}
    policy = ScriptedPolicy()

    def converse(prompt: Prompt, generate: Generate) -> float:
        turn = generate()
        for i in range(49):
            turn = generate(f"#{i}")
        return float(turn.num_tokens)

    groups = talk(world, converse, policy, Setting(max_new_tokens=4000, max_turns=50, max_turn_tokens=60))
    for requests in policy.rounds:
        for request in requests:
            ids, _ = policy.speak(request)
            own = [-float(i + 1 + request.seed % 5) for i in range(len(ids))]
            drawn.setdefault(request.id.rpartition("/")[0], []).append((ids, own))
    assert len(policy.rounds) == 50
    for row, group in enumerate(groups):
        for column, sample in enumerate(group.samples):
            turns = drawn[f"1/{row}/{column}"]
            assert len(turns) == 50
            expected_ids, expected_mask, expected_logprobs = list(group.prompt.token_ids), [0] * 4, [0.0] * 4
            for i, (ids, logprobs) in enumerate(turns):
                told = ids_of(f"#{i - 1}") if i else []
                expected_ids += told + ids
                expected_mask += [0] * len(told) + [1] * len(ids)
                expected_logprobs += [0.0] * len(told) + logprobs
            assert sample.token_ids.tolist() == expected_ids
            assert sample.loss_mask.tolist() == expected_mask
            assert sample.rollout_logprobs.tolist() == expected_logprobs
            assert [turn.speaker for turn in sample.turns] == ["policy", *["environment", "policy"] * 49]
            assert sum(turn.num_tokens for turn in sample.turns) == len(sample.token_ids) - 4


def test_every_question_holds_all_tokens_before_it_and_a_seed_of_its_own(world: World) -> None:
    policy = ScriptedPolicy(says("ab", "cd"))

    def converse(prompt: Prompt, generate: Generate) -> None:
        generate()
        generate("xy")

    (sample,) = samples(talk(world, converse, policy, Setting(num_prompts=1, num_samples=1)))
    first, second = (requests[0] for requests in policy.rounds)
    assert first.token_ids.tolist() == ids_of("0+1=")
    assert second.token_ids.tolist() == [*ids_of("0+1=ab"), EOS, *ids_of("xy")]
    seed = derive_seed(7, "sampling", 1, 0, 0)
    assert (first.seed, second.seed) == (derive_seed(seed, "turn", 0), derive_seed(seed, "turn", 1))
    assert sample.seed == seed
    assert sample.turns == (Turn("policy", "ab", 3), Turn("environment", "xy", 2), Turn("policy", "cd", 3))
    assert (sample.response, sample.finish, sample.version) == ("ab\nxy\ncd", "stop", 3)


def test_a_turn_may_end_with_a_control_token(world: World) -> None:
    """Foreign text cannot spell one (`</tool_call>`), but the function that leads the conversation may name it."""
    policy = ScriptedPolicy(says("ab"))

    def converse(prompt: Prompt, generate: Generate) -> None:
        generate(stop="<pad>")

    talk(world, converse, policy, Setting(num_prompts=1, num_samples=1))
    pad, eos = 0, EOS
    assert set(policy.rounds[0][0].params.stop_token_ids) == {pad, eos}


def test_a_stop_ends_the_turn_and_is_part_of_what_was_said(world: World) -> None:
    policy = ScriptedPolicy(says("7*8?", "56"))
    heard: list[PolicyTurn] = []

    def converse(prompt: Prompt, generate: Generate) -> float:
        heard.append(generate(stop="?"))
        heard.append(generate("56 ", stop=["?", "#"]))
        return 1.0

    def stopping(request: GenerationRequest) -> tuple[list[int], str]:
        ids, finish = policy_says(request)
        cut = next((i for i, token in enumerate(ids) if token in request.params.stop_token_ids), len(ids) - 1)
        return ids[: cut + 1], finish

    policy_says, policy.speak = policy.speak, stopping
    (sample,) = samples(talk(world, converse, policy, Setting(num_prompts=1, num_samples=1)))
    assert [(turn.text, turn.num_tokens, turn.finish) for turn in heard] == [("7*8?", 4, "stop"), ("56", 3, "stop")]
    assert [turn.num_tokens_left for turn in heard] == [36, 30]
    assert sample.token_ids.tolist() == [*ids_of("0+1=7*8?56 56"), EOS]


class Speaker(PromptEncoder):
    """Writes messages as role and content, and asks for the end of a turn that was cut."""

    def encode_reply(self, content: Any, *, turn_ended: bool) -> NDArray[np.int64]:
        text = "".join(f"{message['role']}:{message['content']}" for message in content)
        return self.tokenizer.encode(text if turn_ended else "#" + text)


def test_messages_go_through_the_encoder_which_is_told_whether_the_turn_ended(world: World) -> None:
    def converse(prompt: Prompt, generate: Generate) -> None:
        generate()
        generate({"role": "tool", "content": "56"}, max_new_tokens=1)
        generate([{"role": "tool", "content": "7"}, {"role": "user", "content": "8"}])

    setting = Setting(num_prompts=1, num_samples=1, encoder=Speaker(TOKENIZER))
    (sample,) = samples(talk(world, converse, ScriptedPolicy(says("a", "b", "c")), setting))
    assert sample.token_ids.tolist() == [*ids_of("0+1=a"), EOS, *ids_of("tool:56b#tool:7user:8c"), EOS]
    assert sample.response == "a\n56\nb\n7\n8\nc"


def test_without_a_chat_template_messages_fail_the_conversation(world: World) -> None:
    def converse(prompt: Prompt, generate: Generate) -> None:
        generate()
        generate([{"role": "tool", "content": "56"}])

    for sample in samples(talk(world, converse, ScriptedPolicy(says("a", "b")), Setting())):
        assert sample.failure.startswith("MRL-2150")


# -- budgets


@settings(deadline=None, max_examples=40)
@given(
    budget=st.integers(1, 60),
    max_turns=st.integers(1, 6),
    max_turn_tokens=st.none() | st.integers(1, 20),
    reply=st.text("ab0", min_size=0, max_size=12),
)
def test_no_budget_is_ever_exceeded(
    world: World, budget: int, max_turns: int, max_turn_tokens: int | None, reply: str
) -> None:
    empty: list[PolicyTurn] = []

    def converse(prompt: Prompt, generate: Generate) -> float:
        turn = generate()
        while turn.num_tokens:
            turn = generate(reply)
        empty.append(turn)
        return 0.0

    setting = Setting(budget, max_turns, max_turn_tokens, num_prompts=3, num_samples=1)
    for sample in samples(talk(world, converse, ScriptedPolicy(), setting)):
        assert not sample.failure
        assert len(sample.token_ids) - 4 <= budget
        assert 1 <= sum(turn.speaker == "policy" for turn in sample.turns) <= max_turns
        assert all(t.num_tokens <= (max_turn_tokens or budget) for t in sample.turns if t.speaker == "policy")
        assert sample.loss_mask[-1] == 1  # what nobody answered is not in it
        assert sample.finish == "length" and sample.outcome == 0.0
    assert all(turn.text == "" and turn.finish == "length" for turn in empty)


def test_going_on_without_budget_ends_the_conversation_without_an_outcome(world: World) -> None:
    def converse(prompt: Prompt, generate: Generate) -> float:
        generate()
        while True:
            generate("more")

    for sample in samples(talk(world, converse, ScriptedPolicy(), Setting(max_turns=3))):
        assert sample.failure == "" and sample.outcome is None and sample.finish == "length"


def test_the_function_may_catch_that_the_budget_is_used_up(world: World) -> None:
    def converse(prompt: Prompt, generate: Generate) -> float:
        try:
            generate()
            while True:
                generate("more")
        except OutOfBudget:
            return -1.0

    assert {s.outcome for s in samples(talk(world, converse, ScriptedPolicy(), Setting(max_turns=3)))} == {-1.0}


# -- plain and async functions, and rounds


def plain(prompt: Prompt, generate: Generate, reply: str = "ok") -> float:
    first = generate()
    second = generate(reply, max_new_tokens=5) if first.num_tokens % 2 else first
    return first.num_tokens + second.num_tokens / 100


async def asynchronous(prompt: Prompt, generate: AsyncGenerate, reply: str = "ok") -> float:
    first = await generate()
    await asyncio.sleep(0)
    second = await generate(reply, max_new_tokens=5) if first.num_tokens % 2 else first
    return first.num_tokens + second.num_tokens / 100


class Stateful:
    """An object is a function too."""

    async def __call__(self, prompt: Prompt, generate: AsyncGenerate, reply: str = "ok") -> float:
        return await asynchronous(prompt, generate, reply)


def seen(sample: Sample) -> tuple[Any, ...]:
    return sample.token_ids.tolist(), sample.loss_mask.tolist(), sample.rollout_logprobs.tolist(), sample.outcome


@pytest.mark.parametrize("function", [plain, asynchronous, Stateful()])
@pytest.mark.parametrize("max_in_flight", [1, 3, 64])
def test_samples_do_not_depend_on_how_conversations_run(
    world: World, function: Callable[..., Any], max_in_flight: int
) -> None:
    setting = Setting(num_prompts=5, num_samples=4)
    expected = [seen(sample) for sample in samples(talk(world, plain, ScriptedPolicy(), setting))]
    setting.max_in_flight = max_in_flight
    policy = ScriptedPolicy()
    assert [seen(sample) for sample in samples(talk(world, function, policy, setting))] == expected
    assert max(len(requests) for requests in policy.rounds) <= max_in_flight


def test_all_who_wait_are_answered_together_in_their_order(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_QUIET_SECONDS", "_MAX_WAIT_SECONDS"):  # however busy the machine is
        monkeypatch.setattr(f"megarl.rollout.rounds.{name}", 20.0)
    policy = ScriptedPolicy(says("x", "y", "z"))

    def converse(prompt: Prompt, generate: Generate) -> None:
        for reply in (None, "a", "b"):
            generate(reply)

    talk(world, converse, policy, Setting(num_prompts=8, num_samples=4))
    assert [len(requests) for requests in policy.rounds] == [32, 32, 32]
    for turn, requests in enumerate(policy.rounds):
        assert [r.id for r in requests] == [f"1/{row}/{column}/{turn}" for row in range(8) for column in range(4)]
    # the samples of one prompt share its array: engines prefill it once
    assert policy.rounds[0][0].token_ids is policy.rounds[0][1].token_ids


def test_a_slow_tool_holds_up_nobody_else(world: World) -> None:
    """It is released only when the others have had all their turns: a round that waited for it would never begin."""
    others_done, num_done, lock = threading.Event(), 0, threading.Lock()

    def converse(prompt: Prompt, generate: Generate) -> float:
        nonlocal num_done
        generate()
        if prompt.id == "p0":
            assert others_done.wait(20)
        generate("a")
        generate("b")
        with lock:
            num_done += 1
            if num_done == 3:
                others_done.set()
        return 1.0

    groups = talk(world, converse, ScriptedPolicy(), Setting(num_prompts=4, num_samples=1))
    assert [sample.outcome for sample in samples(groups)] == [1.0] * 4


def test_samples_are_handed_on_while_others_are_still_talking(world: World) -> None:
    handed: list[str] = []
    first_is_scored = threading.Event()

    def on_sample(prompt: Prompt, sample: Sample) -> None:
        handed.append(prompt.id)
        first_is_scored.set()

    def converse(prompt: Prompt, generate: Generate) -> Reward:
        generate()
        if prompt.id == "p1":
            assert first_is_scored.wait(20)
        return Reward(2.0, {"calls": 3})

    groups = talk(world, converse, ScriptedPolicy(), Setting(num_samples=1, on_sample=on_sample))
    assert handed == ["p0", "p1"]
    assert [(sample.outcome, sample.scores) for sample in samples(groups)] == [(2.0, {"calls": 3.0})] * 2


def test_a_round_waits_for_samples_that_are_being_made(world: World) -> None:
    """The last conversation is over when its sample is handed on, not when its function returns."""
    slow = threading.Event()

    def on_sample(prompt: Prompt, sample: Sample) -> None:
        slow.wait(0.2)  # longer than a round's grace

    groups = talk(world, plain, ScriptedPolicy(), Setting(on_sample=on_sample))
    assert all(sample.outcome is not None for sample in samples(groups))


def test_an_error_of_who_takes_the_samples_reaches_the_driver(world: World) -> None:
    def refuse(prompt: Prompt, sample: Sample) -> None:
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        talk(world, plain, ScriptedPolicy(), Setting(on_sample=refuse))


def test_times_and_turns_are_reported(world: World) -> None:
    meter = Meter()
    talk(world, plain, ScriptedPolicy(), Setting(), meter)
    numbers = reported(meter, world)
    for name in ("run", "task"):
        low, high = (numbers[f"rollout/time/{name}_execution/{end}"] for end in ("min", "max"))
        assert 0 < low <= numbers[f"rollout/time/{name}_execution/mean"] <= high


# -- failures


def raises(prompt: Prompt, generate: Generate) -> float:
    generate()
    return [][int(prompt.id == "p0")]  # the line that is blamed


def gives_text(prompt: Prompt, generate: Generate) -> Any:
    return generate().text


def gives_nan(prompt: Prompt, generate: Generate) -> float:
    generate()
    return float("nan")


def gives_bad_score(prompt: Prompt, generate: Generate) -> Reward:
    generate()
    return Reward(1.0, {"calls": None})  # type: ignore[dict-item]


def says_nothing(prompt: Prompt, generate: Generate) -> float:
    return 1.0


def exits(prompt: Prompt, generate: Generate) -> float:
    raise SystemExit(3)


def replies_first(prompt: Prompt, generate: Generate) -> None:
    generate("hello")


def asks_without_a_reply(prompt: Prompt, generate: Generate) -> None:
    while generate().finish == "stop":
        """It has ended its turn: there is nothing to go on with."""


def stops_at_a_word(prompt: Prompt, generate: Generate) -> None:
    generate(stop="word")


def tells_what_cannot_be_written(prompt: Prompt, generate: Generate) -> None:
    generate()
    generate("ÄÖÜ")


async def forgets_to_await(prompt: Prompt, generate: AsyncGenerate) -> float:
    await generate()
    task = asyncio.ensure_future(generate("x"))
    await asyncio.sleep(0)  # the question is asked
    assert not task.done()
    return 1.0


async def asks_twice_at_once(prompt: Prompt, generate: AsyncGenerate) -> None:
    await generate()
    await asyncio.gather(generate("x"), generate("y"))


async def async_exits(prompt: Prompt, generate: AsyncGenerate) -> None:
    await generate()
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (raises, f"MRL-2150 .* raised IndexError: .*test_conversations.py:{raises.__code__.co_firstlineno + 2}"),
        (gives_text, "MRL-2152 .* returned .*str.*expected a finite number"),
        (gives_nan, "MRL-2152 .* returned nan"),
        (gives_bad_score, "MRL-2152 .* returned None"),
        (says_nothing, "MRL-2153 .* without a turn of the policy"),
        (exits, "MRL-2150 .* raised SystemExit"),
        (replies_first, "MRL-2150 .* takes no reply"),
        (asks_without_a_reply, "MRL-2150 .* ended its turn"),
        (stops_at_a_word, "MRL-2150 .* 4 tokens"),
        (tells_what_cannot_be_written, "MRL-2150 .* DataError: .MRL-2004"),
        (forgets_to_await, "MRL-2153 .* before generate had answered"),
        (asks_twice_at_once, "MRL-2150 .* one turn at a time"),
        (async_exits, "MRL-2150 .* raised SystemExit"),
    ],
)
def test_a_failed_conversation_says_why_and_leaves_the_others_alone(
    world: World, function: Callable[..., Any], told: str
) -> None:
    scored: list[str] = []

    async def awaited(prompt: Prompt, generate: AsyncGenerate) -> Any:
        return await (function(prompt, generate) if prompt.id == "p0" else asynchronous(prompt, generate))

    def called(prompt: Prompt, generate: Generate) -> Any:
        return function(prompt, generate) if prompt.id == "p0" else plain(prompt, generate)

    mixed: Callable[..., Any] = awaited if asyncio.iscoroutinefunction(function) else called
    setting = Setting(on_sample=lambda prompt, sample: scored.append(prompt.id))
    policy = ScriptedPolicy(lambda request: ([5, EOS], "stop"))
    failed, whole = talk(world, mixed, policy, setting)
    for sample in failed.samples:
        assert sample.reward is None and sample.outcome is None
        assert sample.failure.endswith("for prompt 'p0'.")
        assert re.search(told, sample.failure), sample.failure
    assert [sample.failure for sample in whole.samples] == ["", ""]
    assert sorted(scored) == ["p1", "p1"]


def test_a_plain_function_that_hangs_fails_alone_and_is_told_when_it_comes_back(world: World) -> None:
    released, told = threading.Event(), threading.Event()

    def converse(prompt: Prompt, generate: Generate) -> float:
        generate()
        if prompt.id == "p0":
            released.wait(30)
            try:
                generate("too late")
            except Abandoned:
                told.set()
                raise
        return 1.0

    hung, whole = talk(world, converse, ScriptedPolicy(), Setting(num_samples=1, tool_timeout_seconds=1.0))
    assert "MRL-2151" in hung.samples[0].failure and "1 s" in hung.samples[0].failure
    assert "after turn 1" in hung.samples[0].failure
    assert hung.samples[0].num_response_tokens > 0  # what was said until then is there to be looked at
    assert whole.samples[0].outcome == 1.0
    released.set()
    assert told.wait(10)


def test_late_is_late_even_if_nobody_noticed(world: World) -> None:
    """While a round runs nobody looks at clocks; who comes back too late has failed all the same."""
    in_tool, came_back = threading.Event(), threading.Event()
    first = threading.Event()

    def speak(request: GenerationRequest) -> tuple[list[int], str]:
        if request.id.endswith("/1/0/1"):  # the other conversation's second turn lasts until the slow tool is done
            assert in_tool.is_set() and came_back.wait(20)
        return [5, EOS], "stop"

    def converse(prompt: Prompt, generate: Generate) -> float:
        generate()
        if prompt.id == "p0":
            in_tool.set()
            first.wait(1.5)
            try:
                generate("x")
            finally:
                came_back.set()
        else:
            assert in_tool.wait(20)
            generate("y")
        return 1.0

    late, whole = talk(world, converse, ScriptedPolicy(speak), Setting(num_samples=1, tool_timeout_seconds=1.0))
    assert "MRL-2151" in late.samples[0].failure
    assert whole.samples[0].outcome == 1.0


def test_an_async_function_that_hangs_is_cancelled(world: World) -> None:
    cancelled = threading.Event()

    async def converse(prompt: Prompt, generate: AsyncGenerate) -> float:
        await generate()
        if prompt.id == "p0":
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()
        return 1.0

    hung, whole = talk(world, converse, ScriptedPolicy(), Setting(num_samples=1, tool_timeout_seconds=1.0))
    assert "MRL-2151" in hung.samples[0].failure
    assert whole.samples[0].outcome == 1.0
    assert cancelled.wait(10)


def test_a_function_that_blocks_the_event_loop_costs_one_step_and_no_exit(world: World) -> None:
    released = threading.Event()

    async def converse(prompt: Prompt, generate: AsyncGenerate) -> float:
        await generate()
        if prompt.id == "p0" and not released.is_set():
            released.wait(30)
        return 1.0

    converse_of_run = Converse("test:converse", converse, {})
    done: list[Any] = []

    async def generate() -> None: ...

    prompt = Prompt("p0", "", np.zeros(1, np.int64))
    converse_of_run.start(prompt, generate, lambda *result: done.append(result))
    deadline = time.monotonic() + 10
    while converse_of_run._loop is not None and time.monotonic() < deadline:
        converse_of_run.replace_blocked_loop()
    assert converse_of_run._loop is None
    other = Prompt("p1", "", np.zeros(1, np.int64))
    finished = threading.Event()
    converse_of_run.start(other, generate, lambda *_: finished.set())
    assert finished.wait(10)
    converse_of_run.close()
    released.set()


def test_engines_that_fail_set_all_conversations_free(world: World) -> None:
    free = threading.Semaphore(0)

    def converse(prompt: Prompt, generate: Generate) -> None:
        try:
            generate()
        except Abandoned:
            free.release()
            raise

    def broken(request: GenerationRequest) -> tuple[list[int], str]:
        raise RuntimeError("engine lost")

    with pytest.raises(RuntimeError, match="engine lost"):
        talk(world, converse, ScriptedPolicy(broken), Setting())
    assert all(free.acquire(timeout=10) for _ in range(4))
