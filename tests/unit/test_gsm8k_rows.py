"""Files as they are published: GSM8K's shape, and conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from megarl.core.errors import DataError
from megarl.core.sample import Group
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import PromptKeys, PromptSource, open_prompts
from megarl.data.record import read_groups, write_groups
from megarl.data.tokenizer import Tokenizer

GSM8K = PromptKeys("question", "answer", "answer", "####")
# of the shape of the published file: a worked answer with <<calculations>>, and the result behind ####
ROWS = (
    '{"question": "Mia packs 3 boxes with 12 pens each. How many pens is that?", '
    '"answer": "There are 3*12=<<3*12=36>>36 pens.\\n#### 36"}\n'
    '{"question": "A town of 900 people doubles, then loses 4. What\\u2019s left?", '
    '"answer": "It doubles to 2*900=<<2*900=1800>>1800.\\n1800-4=<<1800-4=1796>>1796\\n#### 1,796"}\n'
    '{"question": "It was 3 degrees and fell by 8. What is it now?", "answer": "3-8=<<3-8=-5>>-5\\n#### -5"}\n'
    '{"question": "Half of 7?", "answer": "7/2=<<7/2=3.5>>3.5 #### not yet\\n#### 3.5"}\n'
)


class AnyText(Tokenizer):
    """A token per character, all that are not ASCII being one: these tests are not about tokens."""

    def __init__(self) -> None:
        characters = {chr(code): code for code in range(128)}
        backend = tokenizers.Tokenizer(models.WordLevel({**characters, "?" * 2: 128}, unk_token="??"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        super().__init__("any", backend, 0, ())


class Transcript(PromptEncoder):
    """Messages become the sum of their contents."""

    def encode(self, content: Any) -> Any:
        return super().encode(content if isinstance(content, str) else "".join(one["content"] for one in content))


def open_text(path: Path, text: str, keys: PromptKeys | None = None, **options: Any) -> PromptSource:
    path.write_text(text, encoding="utf-8")
    return open_prompts(str(path), Transcript(AnyText()), keys, **options)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "train.jsonl"


def test_the_published_shape_loads_as_it_is(file: Path) -> None:
    source = open_text(file, ROWS, GSM8K, required=frozenset({"answer", "demonstration"}))
    prompts = [source[i] for i in range(len(source))]
    assert [prompt.answer for prompt in prompts] == ["36", "1796", "-5", "3.5"]
    assert prompts[0].text == "Mia packs 3 boxes with 12 pens each. How many pens is that?"
    assert prompts[0].demonstration == "There are 3*12=<<3*12=36>>36 pens.\n#### 36"
    assert prompts[0].metadata["answer"] == prompts[0].demonstration, "the whole solution stays at hand"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("no marker", 'key "answer" has no "####" (data.answer_after)'),
        ("#### ", 'key "answer" has nothing after its last "####" (data.answer_after)'),
    ],
)
def test_an_answer_without_its_end_is_a_bad_row(file: Path, answer: str, told: str) -> None:
    with pytest.raises(DataError) as caught:
        open_text(file, ROWS + f'{{"question": "1=", "answer": "{answer}"}}\n', GSM8K)
    assert str(caught.value).startswith(f"MRL-2001 {file}:5:20 {told}")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1,234,567.5", "1234567.5"),
        ("-12,000", "-12000"),
        ("1,2", "1,2"),
        ("(1,200)", "(1,200)"),
        ("1,200 and 3", "1,200 and 3"),
        ("12,34,567", "12,34,567"),
        ("A", "A"),
    ],
)
def test_only_a_number_loses_its_thousands_separators(file: Path, answer: str, expected: str) -> None:
    source = open_text(file, f'{{"question": "q", "answer": "so: #### {answer}"}}\n', GSM8K)
    assert source[0].answer == expected


CONVERSATION = (
    '{"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="}], "answer": "2"}\n'
    '{"prompt": [{"role": "user", "content": "2+2="}], "answer": "4"}\n'
    '{"prompt": [{"role": "user", "content": "look it up"}, {"role": "assistant", "content": null, '
    '"tool_calls": [{"name": "find"}]}, {"role": "tool", "content": "here"}]}\n'
)


def test_messages_become_messages(file: Path) -> None:
    class Contents(Transcript):
        def encode(self, content: Any) -> Any:
            return super().encode([{"content": one.get("content") or ""} for one in content])

    file.write_text(CONVERSATION)
    source = open_prompts(str(file), Contents(AnyText()))
    first, second, third = source[0], source[1], source[2]
    assert first.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="})
    assert first.text == "system: be brief\nuser: 1+1="
    assert first.token_ids.tolist() == AnyText().encode("be brief1+1=").tolist()
    assert second.text == "2+2="
    assert third.messages[1]["tool_calls"] == [{"name": "find"}]


def test_recordings_keep_messages(file: Path, tmp_path: Path) -> None:
    prompt = open_text(file, CONVERSATION.splitlines()[0])[0]
    write_groups(tmp_path / "groups.jsonl", 1, [Group(prompt, [])])
    (group,) = read_groups(tmp_path / "groups.jsonl")[1]
    assert group.prompt.messages == prompt.messages
