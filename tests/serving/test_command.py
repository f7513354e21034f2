"""`minifloat export`: a folder of plain weights becomes one of codes."""

import minifloat as mf
import pytest
from minifloat import cli

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
