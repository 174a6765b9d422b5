"""Define a fixture for tests that read or write Hugging Face folders."""

from functools import cache
from pathlib import Path

import pytest
import torch
from test_hugging_face import make_content
from transformers import AutoConfig, AutoModelForCausalLM


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory):
    """Return a function that lets transformers write a folder with the weights of a model of given family and sizes."""

    @cache
    def make(family: str, sizes: str = "{}", max_shard_size: str = "1GB") -> Path:
        folder = tmp_path_factory.mktemp("made")
        torch.manual_seed(1)
        config = AutoConfig.for_model(**make_content(family, sizes))
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.08)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return make
