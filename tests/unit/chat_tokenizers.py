"""Small tokenizers of the kinds that real models have, trained in a moment, with chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# added tokens that are not special, as Qwen3 has them
ORDINARY = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
INSTRUCTION_TOKENS = ["<s>", "</s>", "[INST]", "[/INST]"]
CORPUS = ["the cat sat on the mat and said hello, user", "what is 12 + 34? 46, of course!", "im_end think start"] * 3

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# looks into contents, as Qwen3 does: drops old thoughts, and groups answers of tools
THINKING = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {%- if message.content.startswith('<tool_response>') %}{{- raise_exception('a tool in disguise') }}{%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
# trims, alternates, and puts blanks where Mistral's first models had them
INSTRUCTIONS = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)


def byte_level(directory: Path, template: Any = CHATML, **settings: Any) -> Path:
    """Byte-level BPE with the special tokens inside the vocabulary and the others behind it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=350, special_tokens=SPECIAL, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in ORDINARY])
    return _write(directory, backend, {"eos_token": "<|im_end|>", "chat_template": template, **settings})


def sentencepiece(directory: Path, prepend: str = "first") -> Path:
    """A Unigram model over words with a blank in front, whose vocabulary spells its control tokens out."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prepend)
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=prepend)
    characters = sorted({*"".join(CORPUS), *"[]/<>s|INSTABC\n▁"} - {" "})
    trainer = trainers.UnigramTrainer(
        vocab_size=150,
        special_tokens=["<unk>", *INSTRUCTION_TOKENS],
        unk_token="<unk>",
        initial_alphabet=characters,
    )
    backend.train_from_iterator(CORPUS, trainer)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _write(directory, backend, {**names, "chat_template": INSTRUCTIONS})


def whole_words(directory: Path) -> Path:
    """A BPE that takes a word for a token if it is one (ignore_merges), as Llama 3 does; some are control tokens."""
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = [*SPECIAL, "hello"]
    vocab = alphabet | {word: len(alphabet) + index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return _write(directory, backend, {"eos_token": "<|im_end|>", "chat_template": CHATML})


def _write(directory: Path, backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    tree = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(tree))
    return directory
