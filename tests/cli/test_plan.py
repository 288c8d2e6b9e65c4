"""`luminav plan`: the table, JSON, and bad input in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import luminav
from luminav.cli.app import run

CONFIG = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_table(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", config, "--batch-size", "2", "--sequence-length", "8"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    plan = luminav.plan(CONFIG, batch_size=2, sequence_length=8)
    for line in [*plan.heading(), *plan.footing()]:
        assert line in printed.out.splitlines()
    for row in plan.table():
        (line,) = [line for line in printed.out.splitlines() if line[1:].strip().startswith(f"{row[0]} ")]
        assert all(cell in line for cell in row)


def test_json(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dtype", "float16", "--activation-checkpointing", "--device", "cpu", "--json"]
    assert run(["plan", config, "--batch-size", "2", "--sequence-length", "8", *options]) == 0
    plan = luminav.plan(
        CONFIG,
        dtype=luminav.cli.plan._DTYPES["float16"],
        batch_size=2,
        sequence_length=8,
        activation_checkpointing=True,
        device="cpu",
    )
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(plan.to_dict()))


def test_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "4.2B"]) == 0
    assert "A model of 4,200,000,000 parameters." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "argument"),
        (["nowhere.json"], "nowhere.json is no file"),
        (["0"], "must be > 0, and at most 1e+15, got 0"),
        (["{broken}"], "is not JSON"),
        (["{list}"], "must hold a JSON object, got list"),
        (["{config}", "--dtype", "int4"], "--dtype must be one of float16, bfloat16"),
        (["{config}", "--batch-size", "2"], "--sequence-length missing"),
        (["{config}", "--activation-checkpointing"], "--batch-size and --sequence-length missing"),
        (["4.2B", "--batch-size", "2", "--sequence-length", "8"], "activations are not known"),
        (["4.2B", "--device", "abacus"], "--device must be one of cuda"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"broken": "{", "list": "[]"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    places = {name: str(tmp_path / name) for name in files} | {"config": config}
    assert run(["plan", *(argument.format(**places) for argument in arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("luminav: ") and message in printed.err
