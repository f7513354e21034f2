"""Files of earlier commits load in today's code, and training continues with equal random bits.

Each folder beside this file is named by the commit whose code wrote it, with write_checkpoints.py.
"""

import json
import lzma
import shutil
from pathlib import Path

import minifloat as mf
import pytest
import torch
import torch.distributed.checkpoint as dcp
from minifloat.train.recipes import FORMER_PRESETS

from . import exact_models as exact
from . import train_job

FOLDERS = [Path(__file__).parent / commit for commit in ("a7f7ec2",)]
OTHER = 900  # seed of weights that no file holds

pytestmark = [
    pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


PRODUCTS = (".y", ".dx", ".dw")  # of the one more step


@pytest.fixture(scope="module")
def expected():
    """Reads {folder: {name: bytes in hexadecimal digits}}, the values of the writer's code."""
    return {path: json.loads(lzma.open(path / "expected.json.xz").read()) for path in FOLDERS}


def assert_near(got, there, name):
    """Compares float32 values, from their bytes. A step of E2M1 is 1/12 of the largest value."""
    got, there = (torch.frombuffer(bytearray(b), dtype=torch.float32) for b in (got, there))
    assert (got - there).abs().max() <= 2**-20 * there.abs().max(), name


def assert_same(model, expected, prefix):
    """Compares a model's tensors, then those after one more training step, byte by byte.

    The products of nvfp4_pow2 have a factor that is no power of two, 1536 / 2688 and the like.
    Matrix libraries apply it before a sum or after it, so these values are compared instead.
    """
    found = exact.contents(model) | {f"probe.{k}": t for k, t in exact.probe(model).items()}
    want = {k.removeprefix(prefix): v for k, v in expected.items() if k.startswith(prefix)}
    assert found.keys() == want.keys()
    for name, tensor in found.items():
        got, there = bytes.fromhex(exact.hex_of(tensor)), bytes.fromhex(want[name])
        assert len(got) == len(there), name
        if "nvfp4_pow2" in prefix and name.endswith(PRODUCTS):
            assert_near(got, there, name)
            continue
        differ = [i for i, (a, b) in enumerate(zip(got, there)) if a != b]
        assert not differ, (
            f"{prefix}{name}: {len(differ)} of {len(got)} bytes differ, the first at {differ[0]}: "
            f"{got[differ[0]]:#04x}, expected {there[differ[0]]:#04x}"
        )


def fresh(recipe, **options):
    """Builds a converted model whose weights, seed and count are not those of the file."""
    recipe = FORMER_PRESETS.get(recipe, recipe)
    model = exact.convert(exact.sequential(OTHER), recipe, seed=OTHER, **options)
    exact.train_step(model, OTHER)
    return model


def load_into(model, state):
    model.load_state_dict(state["model"])
    mf.load_training_state(model, state["training"])


@pytest.mark.parametrize("recipe", exact.RECIPES)
def test_a_state_dict_loads(folder, expected, recipe):
    model = fresh(recipe)
    load_into(model, torch.load(folder / "states.pt", weights_only=True)[recipe])
    assert_same(model, expected[folder], f"states.pt:{recipe}:")


@pytest.mark.parametrize("recipe", [r for r in exact.RECIPES if r not in exact.NOT_PRIMARY])
@pytest.mark.parametrize("weights_only", [True, False])
def test_codes_that_are_the_parameters_load(folder, expected, recipe, weights_only):
    model = fresh(recipe, primary=True)
    load_into(model, torch.load(folder / "primary.pt", weights_only=weights_only)[recipe])
    assert_same(model, expected[folder], f"primary.pt:{recipe}:")


@pytest.mark.parametrize("name", ["mixed", "primary", "projections"])
def test_a_pickled_module_loads(folder, expected, name):
    modules = torch.load(folder / "modules.pt", weights_only=False)
    assert set(modules) == {"mixed", "primary", "projections"}
    assert all(isinstance(layer, mf.Linear) for _, layer in exact.layers_of(modules[name]))
    assert_same(modules[name], expected[folder], f"modules.pt:{name}:")


@pytest.mark.parametrize(
    ("name", "recipe", "primary"), [("dcp", exact.MIXED, False), ("dcp_primary", "nvfp4", True)]
)
def test_a_distributed_checkpoint_loads(folder, expected, name, recipe, primary):
    model = fresh(recipe, primary=primary)
    state = {"model": model.state_dict(), "training": mf.training_state(model)}
    dcp.load(state, checkpoint_id=folder / name, no_dist=True)
    load_into(model, state)
    assert_same(model, expected[folder], f"{name}:")


@pytest.mark.usefixtures("torch_as_it_was")
def test_a_job_goes_on(folder, tmp_path):
    """Resumes a job: optimizer, histories and random counter equal the saved ones, bit by bit.

    The losses are the writer's within 2%: another machine adds in another order, or multiplies in
    fp32 where the writer's did in bf16. The saved model's loss is 3.5 and falls to 3.26, a fresh
    model's is 5.6.
    """
    shutil.copytree(folder / "train", tmp_path / "train")
    there = json.loads((folder / "train" / "expected.json").read_text())
    before = train_job.checkpoint_at(tmp_path / "train", train_job.STOPPED)
    saved = train_job.read_checkpoint(before, tmp_path)

    assert train_job.train(tmp_path / "train", "--resume") == 0
    after = train_job.checkpoint_at(tmp_path / "train", train_job.STEPS)
    state = train_job.read_checkpoint(after, tmp_path)
    losses = train_job.losses_after_the_stop(tmp_path / "train")
    assert losses == pytest.approx(there["losses"], rel=0.02)
    assert state["minifloat"]["rng"].tolist() == there["rng"]
    steps = train_job.STEPS - train_job.STOPPED
    histories = [name for name in saved["minifloat"] if name.endswith("amax_history")]
    assert histories
    for name in histories:  # the oldest entries are the saved ones, one place on each step
        old, new = saved["minifloat"][name], state["minifloat"][name]
        assert old[:, 2].all()
        assert torch.equal(new[:, 2 + steps :], old[:, 2:-steps])
    decay = 0.95**steps  # AdamW's second moment: each step adds a squared gradient
    moments = [name for name in saved["optimizer"]["state"] if "weight" in name]
    assert moments
    for name in moments:
        old, new = (s["optimizer"]["state"][name] for s in (saved, state))
        assert new["step"] == old["step"] + steps == train_job.STEPS
        assert (new["exp_avg_sq"] >= decay * old["exp_avg_sq"] * (1 - 1e-6)).all()
