"""Let `transformers` read a Hugging Face directory and answer prompts, the likeliest token each time."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

QUESTION = "What is the capital of France?"


def main() -> None:
    """One question through the chat template, and the first sum of a file as it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="the directory")
    parser.add_argument("sums", type=Path, help="a file that arithmetic.py wrote")
    arguments = parser.parse_args()
    directory = arguments.model
    with arguments.sums.open(encoding="utf-8") as file:
        sum_prompt = json.loads(file.readline())["prompt"]
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    turns = [{"role": "user", "content": QUESTION}]
    chat = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    for shown, text, max_new_tokens in ((QUESTION, chat, 32), (sum_prompt, sum_prompt, 5)):
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)[0]
        response = tokenizer.decode(output[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        sys.stdout.write(f"{directory}: {shown!r} -> {response!r}\n")


if __name__ == "__main__":
    main()
