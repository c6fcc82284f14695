import json
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mics.checkpoint.marks import Identity, Mark, Progress
from mics.errors import RunRefusedError
from mics.init import materialise
from mics.models.convert import cut, export, main
from mics.models.names import config_of, pieces, shape_of_config
from mics.models.transformer import build_transformer
from mics.models.weights import check_weights, load_weights, rows_of
from mics.shapes import PRESETS, ModelShape
from torch import nn
from torch.distributed.checkpoint import state_dict_saver

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

SIZES = {"hidden": 24, "layers": 2, "heads": 6, "vocabulary": 50, "positions": 16, "norm_eps": 1e-4}
SHAPES = {
    "gpt": ModelShape(**SIZES),
    "gpt untied": ModelShape(**SIZES, tied=False, ffn=40),
    "bert": ModelShape(**SIZES, family="bert"),
    "bert untied": ModelShape(**SIZES, family="bert", tied=False),
    "llama": ModelShape(**SIZES, family="llama"),
    "llama untied": ModelShape(**SIZES, family="llama", kv_heads=2, tied=False, rope_theta=500.0, ffn=40),
}
EVERY_SHAPE = pytest.mark.parametrize("name", SHAPES)


def shaken(model):
    """No parameter is 0 or 1 or the same as another."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def with_memory(shape, seed=0):
    model = build_transformer(shape, torch.float32)
    materialise(model, model.fill, seed=seed, device=torch.device("cpu"))
    return model


def checkpoint_of(model, identity, folder):
    """A whole checkpoint as the trainer writes it, by one process."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"optimizer.{name}.exp_avg": torch.ones(3) for name, _ in model.named_parameters()}
    state_dict_saver.save(tensors, checkpoint_id=folder, no_dist=True)
    (folder / "complete.json").write_text(Mark(Progress(), Identity(identity, {}), {}).to_json())
    return str(folder)


def read_by_transformers(folder):
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, report = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return model.eval()


@EVERY_SHAPE
def test_transformers_computes_what_we_do_in_both_directions(tmp_path, name):
    shape, ids = SHAPES[name], torch.randint(50, (3, 16))
    ours = shaken(with_memory(shape))
    export(checkpoint_of(ours, asdict(shape), tmp_path / "step-3"), tmp_path / "out", dtype=torch.float32)
    theirs = read_by_transformers(tmp_path / "out")
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=0, atol=1e-5)

    shaken(theirs).save_pretrained(tmp_path / "back", max_shard_size="30KB")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    read = shape_of_config(json.loads((tmp_path / "back" / "config.json").read_text()))
    assert read == shape
    again = with_memory(read, seed=1)
    check_weights(again, tmp_path / "back")
    load_weights(again, tmp_path / "back")
    torch.testing.assert_close(again(ids), theirs(ids).logits, rtol=0, atol=1e-5)
    assert (again(ids) - ours(ids)).abs().max() > 0.1


@EVERY_SHAPE
def test_the_shape_survives_its_configuration(name):
    assert shape_of_config(json.loads(json.dumps(config_of(SHAPES[name])))) == SHAPES[name]


@pytest.mark.parametrize("name", ["gpt2-20b", "bert-50b", "llama-1b-like", "llama-70b"])
def test_transformers_counts_the_parameters_as_we_do(name):
    shape = PRESETS[name]
    config = transformers.AutoConfig.for_model(**config_of(shape))
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    theirs = sum(p.numel() for p in model.parameters())
    token_types = 2 * shape.hidden if shape.masked else 0
    assert theirs == shape.parameters + token_types


def test_large_models_are_written_file_by_file(tmp_path, monkeypatch):
    shape, ids = SHAPES["bert"], torch.randint(50, (1, 16))
    ours = shaken(with_memory(shape))
    monkeypatch.setattr("mics.models.convert.SHARD_BYTES", 10_000)
    checkpoint = checkpoint_of(ours, asdict(shape), tmp_path / "step-3")
    files = export(checkpoint, tmp_path / "out", dtype=torch.bfloat16)
    assert len(files) > 2
    assert all(file.stat().st_size < 10_000 + 50 * 200 for file in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    theirs = read_by_transformers(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    torch.testing.assert_close(theirs.float()(ids).logits, ours(ids), rtol=0, atol=0.05)


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.register_buffer("counts", torch.arange(4))


def test_a_model_that_is_not_bundled_keeps_its_names(tmp_path):
    model = Other()
    checkpoint = checkpoint_of(model, {"class": "Other"}, tmp_path / "step-1")
    with pytest.raises(RunRefusedError, match=r"give its config\.json with --config"):
        export(checkpoint, tmp_path / "out", dtype=torch.float32)
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    (file,) = export(checkpoint, tmp_path / "out", dtype=torch.float32, config=tmp_path / "config.json")
    read = safetensors_torch.load_file(file)
    assert set(read) == set(model.state_dict())
    assert torch.equal(read["counts"], torch.arange(4))
    other = Other()
    load_weights(other, tmp_path / "out")
    assert torch.equal(other.layer.weight, model.layer.weight)


def test_the_commands_speak_in_one_line(tmp_path, capsys):
    shape = SHAPES["llama untied"]
    checkpoint = checkpoint_of(with_memory(shape), asdict(shape), tmp_path / "step-3")
    assert main(["export", "--checkpoint", checkpoint, "--to", str(tmp_path / "out"), "--dtype", "float16"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/out/model.safetensors\n"
    assert main(["import", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"  initial: {tmp_path}/out\n" in said
    assert 'family: "llama", kv_heads: 2, tied: false, rope_theta: 500.0' in said
    for arguments, message in (
        (["export", "--checkpoint", str(tmp_path / "nosuch"), "--to", "x"], "is no whole checkpoint"),
        (["import", str(tmp_path)], "config.json"),
    ):
        assert main(arguments) == 2
        refused = capsys.readouterr().err
        assert message in refused
        assert refused.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, "model_type 'qwen3' is none of gpt2, megatron-bert, llama; train it as hf:FOLDER"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "its rotary angles are stretched"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "its rotary angles are stretched"),
        ({"head_dim": 128}, "its head_dim is 128"),
        ({"attention_bias": True}, "its attention_bias is True, ours is False"),
        ({"hidden_act": "gelu"}, "its hidden_act is 'gelu', ours is 'silu'"),
        ({"num_hidden_layers": None}, "config.json says nothing of layers"),
    ],
)
def test_a_configuration_that_is_not_exactly_ours_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shape_of_config({**config_of(SHAPES["llama"]), **changes})


def test_weights_that_do_not_fit_are_refused(tmp_path):
    shape = SHAPES["gpt"]
    ours = with_memory(shape)
    with pytest.raises(RunRefusedError, match=r"holds no \.safetensors file"):
        check_weights(ours, tmp_path)
    export(checkpoint_of(ours, asdict(shape), tmp_path / "step-3"), tmp_path / "out", dtype=torch.float32)
    wide = build_transformer(ModelShape(**{**SIZES, "vocabulary": 51}), torch.float32)
    with pytest.raises(RunRefusedError, match=r"tokens.weight has the shape \(50, 24\), the model needs \(51, 24\)"):
        check_weights(wide, tmp_path / "out")
    deep = build_transformer(ModelShape(**{**SIZES, "layers": 3}), torch.float32)
    with pytest.raises(RunRefusedError, match=r"no tensor transformer\.h\.2\.ln_1\.weight in its files"):
        check_weights(deep, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(RunRefusedError, match="cannot be read as safetensors"):
        check_weights(ours, tmp_path / "out")


def test_weights_without_the_prefix_of_the_body_are_found(tmp_path):
    """As the original GPT-2 lies on the hub."""
    ours = shaken(with_memory(SHAPES["gpt"]))
    theirs = {}
    for name, tensor in ours.state_dict().items():
        (piece,) = pieces(SHAPES["gpt"], name)
        theirs[piece.name.removeprefix("transformer.")] = (tensor.T if piece.transposed else tensor).contiguous()
    safetensors_torch.save_file(theirs, tmp_path / "model.safetensors")
    again = with_memory(SHAPES["gpt"], seed=1)
    load_weights(again, tmp_path)
    assert all(torch.equal(mine, tensor) for mine, tensor in zip(again.parameters(), ours.parameters(), strict=True))


@given(size=st.integers(1, 200), parts=st.integers(1, 20))
def test_rows_are_cut_as_torch_does(size, parts):
    chunks = [len(chunk) for chunk in torch.arange(size).chunk(parts)]
    ours = [rows_of(size, parts, index) for index in range(parts)]
    assert [rows.stop - rows.start for rows in ours] == chunks + [0] * (parts - len(chunks))
    assert [i for rows in ours for i in range(size)[rows]] == list(range(size))


@given(sizes=st.lists(st.integers(0, 50), max_size=20), limit=st.integers(1, 60))
def test_files_are_filled_in_order_up_to_the_limit(sizes, limit):
    named = {str(i): size for i, size in enumerate(sizes)}
    groups = cut(named, limit)
    assert [name for group in groups for name in group] == list(named)
    assert all(len(group) == 1 or sum(named[name] for name in group) <= limit for group in groups)
