"""A byte vocabulary for each published template: its special tokens are the markers that the template writes."""

import re
from collections.abc import Callable, Sequence

from tests.codec.byte_tokenizer import ByteTokenizer

NAMES = [
    "Apertus-8B-Instruct",
    "ByteDance-Seed-OSS",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "GLM-4.6",
    "HuggingFaceTB-SmolLM3-3B",
    "Kimi-K2-Instruct",
    "LFM2-8B-A1B",
    "MiniMax-M2",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-2-2b-it",
    "google-gemma-4-31B-it",
    "ibm-granite-granite-4.0",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "openai-gpt-oss-120b",
    "poolside-Laguna-S-2.1",
]

_SHAPED = re.compile(
    r"<[|｜][^<>\n'\"]{1,40}[|｜]>|<[a-z_]{2,24}\|>|<\|[a-z_]{2,24}>|<\|\"\|>|\[/?[A-Z_]{3,24}\]"
    r"|<(?:start|end)_of_turn>"
)
_BARE = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_EXTRA = {
    "ByteDance-Seed-OSS": [
        "<seed:bos>", "<seed:eos>", "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>",
    ],
    "MiniMax-M2": ["]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"],
    "GLM-4.6": ["[gMASK]", "<sop>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "poolside-Laguna-S-2.1": ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "mistralai-Mistral-Nemo-Instruct-2407": ["[TOOL_CALLS]"],
    "openai-gpt-oss-120b": [
        "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>",
    ],
    "LFM2-8B-A1B": ["<|tool_call_start|>", "<|tool_call_end|>"],
}  # fmt: skip
_ENDS = [
    "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<turn|>", "<seed:eos>", "[e~[", "<|END_OF_TURN_TOKEN|>",
    "<|assistant_end|>", "<|end_of_text|>", "<|return|>",
]  # fmt: skip


def model(name: str, templates: Callable[[str], str], more: Sequence[str] = ()) -> ByteTokenizer:
    """The tokenizer of a published template; `more` are special tokens that its vocabulary has beside those."""
    source = templates(name)
    found = [m for m in dict.fromkeys(_SHAPED.findall(source)) if "+" not in m]
    specials = list(
        dict.fromkeys(["<s>", "</s>", *found, *_EXTRA.get(name, []), *(m for m in _BARE if m in source), *more])
    )
    eos = next((end for end in _ENDS if end in specials), "</s>")
    return ByteTokenizer(
        specials, silent=[s for s in specials if s not in _BARE], bos="<s>", eos=eos, templates={None: source}
    )
