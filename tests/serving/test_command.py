"""`minifloat export`: a folder of plain weights becomes one of codes."""

import json
import re

import minifloat as mf
import pytest
import torch
from minifloat import cli
from minifloat.serving.schemes import INDEX
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.same_bits import require_all_same
from tests.support.served_models import export, llama, read


@pytest.mark.filterwarnings("error")
def test_a_folder_is_quantized(tmp_path, capsys):
    llama().save_pretrained(tmp_path / "plain")
    (tmp_path / "plain/tokenizer.json").write_text("{}")
    plain, out = str(tmp_path / "plain"), str(tmp_path / "out")
    options = ["--recipe", "nvfp4", "--weight-only", "--share-amax", "servers"]
    assert cli.main(["export", plain, out, *options]) == 0
    assert "minifloat: 7 converted, 1 not" in capsys.readouterr().out
    model = llama()
    mf.quantize_(model, "nvfp4", share_amax="servers")
    want, _ = export(model, tmp_path / "want", weight_only=True)
    got, _ = read(out)
    require_all_same([got[name] for name in want], list(want.values()))
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, r"model.layers.1.*weight without weights"),
        ({"num_hidden_layers": 0}, r"model.layers.0.*weight not of this model"),
        ({"vocab_size": 8}, "expected a config.json and weights that transformers loads, got"),
        ({"hidden_act": "nope"}, "expected a config.json and .* loads, got KeyError: 'nope'"),
    ],
)
def test_a_config_of_other_weights_is_an_error(changes, message, tmp_path, capsys):
    llama().save_pretrained(tmp_path / "plain")
    config = tmp_path / "plain/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    plain, out = str(tmp_path / "plain"), str(tmp_path / "out")
    assert cli.main(["export", plain, out, "--recipe", "mxfp8"]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def split_folder(folder):
    """Saves a Llama in several files, and returns the index."""
    llama().save_pretrained(folder, max_shard_size="20KB")
    return json.loads((folder / INDEX).read_text())["weight_map"]


def leave_an_old_tensor(folder):
    index = split_folder(folder)
    name = "model.norm.weight"
    other = next(file for file in index.values() if file != index[name])
    tensors = load_file(folder / other) | {name: torch.full((64,), 9.0)}
    save_file(tensors, folder / other, {"format": "pt"})


def leave_a_whole_file(folder):
    split_folder(folder)
    llama().save_pretrained(folder)


def cut_a_file(folder):
    llama().save_pretrained(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (leave_an_old_tensor, r"expected each tensor in the file of .*: model\.norm\.weight in "),
        (leave_a_whole_file, r"expected model\.safetensors or .*index\.json in .*, got both"),
        (cut_a_file, r"expected a config\.json and weights that transformers loads, got "),
    ],
)
def test_files_that_are_not_those_of_an_index_are_errors(damage, message, tmp_path, capsys):
    damage(tmp_path / "plain")
    plain, out = str(tmp_path / "plain"), str(tmp_path / "out")
    assert cli.main(["export", plain, out, "--recipe", "mxfp8"]) == 1
    assert re.search(f"minifloat export: error: MODEL: {message}", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_tokenizers_files_are_copied(tmp_path):
    llama().save_pretrained(tmp_path / "plain")
    names = [
        "added_tokens.json",
        "spiece.model",
        "tekken.json",
        "additional_chat_templates/a",
    ]
    (tmp_path / "plain/additional_chat_templates").mkdir()
    for name in names:
        (tmp_path / "plain" / name).write_text(name)
    (tmp_path / "plain/tokenizer").mkdir()  # a folder that only begins like them
    plain, out = str(tmp_path / "plain"), str(tmp_path / "out")
    assert cli.main(["export", plain, out, "--recipe", "mxfp8"]) == 0
    assert all((tmp_path / "out" / name).read_text() == name for name in names)
    assert not (tmp_path / "out/tokenizer").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--recipe", "mxfp8", "--format", "gguf"], 2, "--format: invalid choice: 'gguf'"),
        (["--recipe", "mxfp8", "--share-amax", "me"], 2, "--share-amax: invalid choice: 'me'"),
        (["--recipe", "fp7"], 1, "fp7"),
    ],
)
def test_arguments_are_checked_before_a_model_is_loaded(
    arguments, code, message, tmp_path, capsys, monkeypatch
):
    llama().save_pretrained(tmp_path / "plain")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    command = ["export", str(tmp_path / "plain"), str(tmp_path / "out"), *arguments]
    if code == 2:
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code == 2
    else:
        assert cli.main(command) == 1
    assert message in capsys.readouterr().err


def test_a_folder_that_is_not_empty_is_refused_before_a_model_is_loaded(
    tmp_path, capsys, monkeypatch
):
    llama().save_pretrained(tmp_path / "plain")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    folder = str(tmp_path / "plain")
    assert cli.main(["export", folder, folder, "--recipe", "mxfp8"]) == 1
    assert "MODEL: expected OUT as an absent or empty folder" in capsys.readouterr().err


def test_errors_end_with_1(tmp_path, capsys):
    llama().save_pretrained(tmp_path / "plain")
    plain, out = str(tmp_path / "plain"), str(tmp_path / "out")
    assert cli.main(["export", plain, out, "--recipe", "nvfp4"]) == 1
    assert "minifloat export: error: export: expected a model" in capsys.readouterr().err
    assert cli.main(["export", out, out, "--recipe", "mxfp8"]) == 1
    assert "MODEL: expected a folder with config.json" in capsys.readouterr().err
    assert cli.main(["export", plain, out, "--recipe", "fp7"]) == 1
    assert cli.main(["export", plain, out, "--recipe", "mxfp8", "--share-amax", "servers"]) == 1
    assert "share_amax: expected layers that a server fuses" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert cli.main(["export", plain, out, "--recipe", "mxfp8"]) == 0
    assert cli.main(["export", out, str(tmp_path / "again"), "--recipe", "mxfp8"]) == 1
    assert "MODEL: expected plain weights, got quantized ones" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
