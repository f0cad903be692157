"""The configuration of examples/gsm8k: a row of GSM8K as it is becomes a conversation in the model's own form."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.config.load import load_config
from megarl.run.inputs import open_inputs
from tests.unit.chat_tokenizers import byte_level

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k"
ROW = {
    "question": "Natalia sold 48 clips in April, and half as many in May. How many in all?",
    "answer": "She sold 48/2 = <<48/2=24>>24 in May.\n48+24 = <<48+24=72>>72 in all.\n#### 1,072",
}


def test_a_row_becomes_a_conversation(tmp_path: Path) -> None:
    byte_level(tmp_path / "model")
    shape = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    shape |= {"architectures": ["LlamaForCausalLM"], "vocab_size": 512, "max_position_embeddings": 1024}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    rows = str(tmp_path / "rows.jsonl")
    overrides = [f"model.path={tmp_path / 'model'}", f"data.train={rows}", f"eval.sets.test.data={rows}"]
    config = load_config(EXAMPLE / "train.yaml", overrides)
    inputs = open_inputs(config, with_prompts=True)
    try:
        (prompt,) = inputs.eval_prompts["eval", "test"]
        text = inputs.tokenizer.decode(prompt.token_ids, skip_special=False)
    finally:
        inputs.close()
    assert text == (
        f"<|im_start|>system\n{config.chat.system}<|im_end|>\n<|im_start|>user\n{ROW['question']}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (prompt.text, prompt.answer) == (ROW["question"], "1072")
