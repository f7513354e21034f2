"""Checkpoints of converted models are Megatron-Core's: names, shards and bytes."""

import tempfile
import warnings

import minifloat as mf
import pytest
import torch
import torch.distributed as dist

from tests.support.megatron_models import begin, build, config, load, loss, save, sharded
from tests.support.same_bits import require_same
from tests.support.worlds import run_world

EXTRA = "_extra_state"


def entries(model):
    """Returns key -> global shape, place of this rank's shard and dtype, of what Megatron saves."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = sharded(model)
    apply_factories(state)
    found = {}
    for entry in nested_values(state):
        is_tensor = isinstance(entry, ShardedTensor)
        what = (entry.global_shape, entry.global_offset, entry.dtype) if is_tensor else "object"
        found[entry.key, what[1] if is_tensor else entry.global_offset] = what
    return found


def folder_of_all():
    """Makes a new folder that all ranks know."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return names[0]


def tensors(model):
    return {name: t.detach().clone() for name, t in model.named_parameters()}


def converted(recipe="nvfp4", names="te", seed=0):
    model = build(config(), names, seed=seed)
    mf.quantize_(model, recipe)
    return model


def check_keys():
    for tp in (1, 2):
        begin(tp=tp)
        plain = build(config(), "megatron")
        want = entries(plain)
        names = [*dict(plain.named_parameters())]
        assert len(want) > 16
        for model in (converted(names="local"), converted()):  # Megatron writes both alike
            assert entries(model) == want
        assert [*dict(converted(names="local").named_parameters())] == names
        plain.load_state_dict(converted(names="local").state_dict())
        converted(names="local").load_state_dict(plain.state_dict())
        short = plain.state_dict()
        short.pop("decoder.layers.0.mlp.linear_fc1.weight")
        with pytest.raises(RuntimeError, match=r'Missing key.*"decoder.layers.0.mlp.linear_fc1'):
            converted(names="local").load_state_dict(short)


def check_round_trip():
    """Local specs, minifloat and back: the bytes stay, at one layout and at another."""
    for saved, loaded, names in ((2, 2, "te"), (2, 1, "local"), (1, 2, "te")):
        begin(tp=saved)
        plain = build(config(), "megatron", seed=3)
        want = tensors(plain)
        first, second = folder_of_all(), folder_of_all()
        save(plain, first)
        begin(tp=loaded)
        model = converted(names=names, seed=4)
        load(model, first)
        loss(model).backward()
        save(model, second)
        begin(tp=saved)
        back = build(config(), "megatron", seed=5)
        load(back, second)
        for name, value in tensors(back).items():
            require_same(value, want[name], f"TP {saved}, {loaded}, {names}: {name}")


def check_extra_state():
    """That of Transformer Engine is dropped with one warning, which Python shows once."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    begin(tp=2)
    bytes_ = torch.arange(9, dtype=torch.uint8)
    source = build(config(), seed=3)
    given = source.state_dict()
    plain = {k: bytes_ if k.endswith(EXTRA) else t for k, t in given.items()}
    assert sum(t is bytes_ for t in plain.values()) == 9
    state, folder = sharded(source), folder_of_all()
    for entry in state.values():
        if isinstance(entry, ShardedObject):
            entry.data = bytes_
    save(state, folder)
    model, other = converted(), converted()
    for of in (model, other, model):
        assert len(warned(of.load_state_dict, plain)) == 1
    for _ in range(2):
        assert len(warned(load, model, folder)) == 1
    for name, value in tensors(model).items():
        require_same(value, given[name], name)
    assert warned(model.load_state_dict, given) == []
    assert warned(model.load_state_dict, other.state_dict()) == []


def warned(function, *args):
    from minifloat.megatron import linear

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        linear.__dict__.pop("__warningregistry__", None)
        function(*args)
    return [w for w in caught if "minifloat: _extra_state" in str(w.message)]


def check_training_state():
    """Beside the checkpoint: equal on the tensor-parallel ranks, for any number of them."""
    begin(tp=2)
    model = converted("*: fp8_delayed; decoder.layers.0.*: nvfp4", "local")
    for step in range(2):
        loss(model, step).backward()
        mf.step(model)
    state = mf.training_state(model)
    assert state["rng"].tolist()[1] == 2
    every = [None, None]
    dist.all_gather_object(every, state)
    for name, value in every[0].items():
        require_same(every[1][name], value, name)
    begin(tp=1)
    whole = converted("*: fp8_delayed; decoder.layers.0.*: nvfp4", "local")
    mf.load_training_state(whole, state)
    for name, value in mf.training_state(whole).items():
        require_same(value, state[name], name)


def check(rank):
    check_keys()
    check_round_trip()
    check_extra_state()
    check_training_state()


def test_checkpoints_are_megatrons():
    run_world(2, check)
