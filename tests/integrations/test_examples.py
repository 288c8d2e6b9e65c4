"""The examples, as their docstrings tell to run them. `train_fsdp2.py` has a test of its own in `distributed/`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import script
import tiny
import torch
from safetensors.torch import load_file

EXAMPLES = Path(script.__file__).resolve().parents[2] / "examples"


def run(name: str, *options: str, folder: Path, **more: str) -> str:
    command = [sys.executable, script.__file__, str(EXAMPLES / name), *options]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent / "src"), "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_help_names_every_option(example: Path, tmp_path: Path) -> None:
    declared = re.findall(r'add_argument\(\s*"(--[a-z-]+)"', example.read_text(encoding="utf-8"))
    told = run(example.name, "--help", folder=tmp_path)
    assert len(declared) > 3 and all(option in told for option in declared)


def test_finetunes_and_resumes(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(300)))
    options = ("--data", str(text), "--output", "out", "--steps", "20", "--save-every", "12", "--batch-size", "4")
    options = (*options, "--context", "32", "--master-weights", "semi")
    first = run("finetune_transformers.py", *options, folder=tmp_path)
    loss = re.search(r"step 20: loss ([\d.]+) nats", first)
    assert loss and float(loss.group(1)) < 4.5  # ln 256 = 5.5 is chance
    whole = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16}
    (tmp_path / "out" / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "out" / "checkpoint-20")  # as if the run had been interrupted after step 12
    assert loss.group() in run("finetune_transformers.py", *options, "--resume", folder=tmp_path)
    tiny.assert_same_weights(load_file(tmp_path / "out" / "model.safetensors"), whole)
    assert "nothing is left to do" in run("finetune_transformers.py", *options, "--resume", folder=tmp_path)


def test_finetunes_a_saved_model(tmp_path: Path) -> None:
    """A pretrained model and its tokenizer, from a folder and back into one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(tmp_path / "model")
    before = load_file(tmp_path / "model" / "model.safetensors")
    options = ("--model", "model", "--output", "out", "--steps", "2", "--context", "64", "--lr", "1e-2")
    assert "step 2: loss" in run("finetune_transformers.py", *options, folder=tmp_path)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys() and all(not torch.equal(after[name], before[name]) for name in before)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("abc")["input_ids"] == tokenizer.encode("abc").ids


def test_vision_trains_and_resumes(tmp_path: Path) -> None:
    options = ("--steps", "30", "--batch-size", "16", "--lr", "8e-3", "--checkpoint")
    told = run("train_vision.py", *options, "whole.pt", folder=tmp_path)
    accuracy = re.search(r"accuracy on new pictures: ([\d.]+)%", told)
    assert accuracy and float(accuracy.group(1)) > 34  # one in six is chance
    run("train_vision.py", *options, "part.pt", "--stop", "13", folder=tmp_path)
    assert "from step 13" in run("train_vision.py", *options, "part.pt", "--resume", folder=tmp_path)
    whole, resumed = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "part"))
    assert resumed["step"] == whole["step"] == 30
    tiny.assert_same_weights(resumed["model"], whole["model"])


def test_notebook_runs_top_to_bottom(tmp_path: Path) -> None:
    """Its code cells as one script, with few steps. It is committed without what it printed."""
    notebook = json.loads((EXAMPLES / "luminav_quickstart.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    (tmp_path / "notebook.py").write_text("\n\n".join("".join(cell["source"]) for cell in cells), encoding="utf-8")
    environment = {"LUMINAV_NOTEBOOK_STEPS": "24", "MPLBACKEND": "Agg"}
    told = run(str(tmp_path / "notebook.py"), folder=tmp_path, **environment)
    assert "the same bits as the run that never stopped" in told
    assert "LuminaV, BF16: 6.0" in told and "AdamW, FP32:  12.0" in told
    losses = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", told)]
    assert len(losses) == 2 and max(losses) < 5.0  # ln 256 = 5.5 is chance
