import json
import subprocess
import sys
import textwrap

import pytest
import torch
from mics.config import TrainConfig
from mics.errors import RunRefusedError
from mics.init import materialise
from mics.models.build import build
from mics.models.transformer import Transformer
from mics.shapes import ModelShape
from torch.nn import functional as F

CPU = torch.device("cpu")

FACTORIES = """
import math
import torch
from torch import nn
from torch.nn import functional as F

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.full((8,), 0.25))

    def forward(self, x):
        return x + self.scale * self.up(self.norm(x))

class Model(nn.Module):
    vocabulary = 30

    def __init__(self, layers=3):
        super().__init__()
        self.tokens = nn.Embedding(30, 8)
        self.register_buffer("angles", torch.arange(8) / 3 + math.pi, persistent=False)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.others = nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8)])
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.tokens.weight
        self.layers[0].up.weight.requires_grad_(False)

    def forward(self, ids):
        x = self.tokens(ids) + self.angles.sin()
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

class WithLogits(Model):
    def forward(self, ids):
        return type("Output", (), {"logits": super(WithLogits, self).forward(ids)})()

class OwnWays(Model):
    @property
    def blocks(self):
        return list(self.layers)[1:]

    def fill(self, name, full, generator):
        full.fill_(0.5)

    def summed_loss(self, inputs, targets):
        return 2 * F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten(), reduction="sum")

class NoVocabulary(Model):
    vocabulary = None

def by_config(train):
    return Model(layers=train.steps)

def on_meta():
    with torch.device("meta"):
        return Model()

def flat():
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 30))
    model.vocabulary = 30
    return model

def no_logits():
    model = Model()
    model.forward = lambda ids: (ids,)
    return model

def turned():
    model = Model()
    model.forward = lambda ids: Model.forward(model, ids).transpose(0, 1)
    return model

def too_few():
    model = Model()
    model.vocabulary = 31
    return model

def one_block_twice():
    model = Model(1)
    model.__dict__["blocks"] = [model.layers[0]] * 2
    return model

def block_in_block():
    model = Model()
    model.__dict__["blocks"] = [*model.layers, model.layers[0].up]
    return model

def blocks_share():
    model = Model()
    model.layers[1].up.weight = model.layers[2].up.weight
    return model

def block_shares_with_the_rest():
    model = Model()
    model.scale = model.layers[1].scale
    return model

def scalar():
    model = Model()
    model.temperature = nn.Parameter(torch.tensor(1.0))
    return model

def integers():
    model = Model()
    model.table = nn.Parameter(torch.ones(2, 2, dtype=torch.int32), requires_grad=False)
    return model

def frozen(): return Model().requires_grad_(False)

def five_blocks():
    model = Model()
    model.__dict__["blocks"] = 5
    return model

def flops_function():
    model = Model()
    model.flops_per_token = lambda: 3.0
    return model

def no_function():
    model = Model()
    model.summed_loss = 3
    return model

def nothing(): pass
def leaves(): raise SystemExit(0)
def breaks(): raise KeyError("two\\nlines")
number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """own(name, **settings): the model that a factory of a module of one's own builds."""
    (tmp_path / "own_models.py").write_text(FACTORIES)
    (tmp_path / "own_broken.py").write_text("import nosuchlibrary\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_models", raising=False)

    def make(name, **settings):
        module = "" if ":" in name else "own_models:"
        return build(TrainConfig(model=f"{module}{name}", sequence=16, **settings), torch.float32)

    return make


def materialised(built, seed=0):
    materialise(built.model, built.fill, seed=seed, device=CPU)
    return dict(built.model.named_parameters())


def test_a_preset_and_a_shape_are_built_with_what_the_trainer_needs():
    shape = ModelShape(hidden=12, layers=2, heads=3, family="bert", vocabulary=99)
    built = build(TrainConfig(model=shape, sequence=16), torch.float64)
    assert isinstance(built.model, Transformer)
    assert (built.vocabulary, built.masked, len(built.blocks)) == (99, True, 2)
    assert built.block_parameters == 2 * shape.block_parameters
    assert built.root_parameters == shape.root_parameters
    assert built.flops_per_token == shape.flops_per_token(16)
    assert built.identity["hidden"] == 12
    assert {(p.dtype, p.device.type) for p in built.model.parameters()} == {(torch.float64, "meta")}
    assert build(TrainConfig(), torch.float32).vocabulary == 256
    ids = torch.randint(99, (2, 8))
    materialised(built)
    chunked = build(TrainConfig(model=shape, sequence=16, loss_chunk=3), torch.float64)
    materialised(chunked)
    whole = built.summed_loss(built.model, ids, ids)
    torch.testing.assert_close(chunked.summed_loss(chunked.model, ids, ids), whole)


def test_a_factory_takes_no_memory_and_keeps_its_constants(own):
    built = own("Model")
    assert all(p.is_meta for p in built.model.parameters())
    assert len(built.blocks) == 3
    assert built.blocks[0] is built.model.layers[0]
    assert (built.vocabulary, built.masked) == (30, False)
    assert built.flops_per_token == 2 * (3 * 64 + 64 + 30 * 8)  # the tied embedding multiplies as the head
    parameters = materialised(built)
    torch.testing.assert_close(built.model.angles, torch.arange(8) / 3 + torch.pi)
    assert built.model.head.weight is built.model.tokens.weight
    assert parameters["layers.1.scale"].tolist() == [0.25] * 8
    assert parameters["layers.1.norm.weight"].tolist() == [1.0] * 8
    assert 0.01 < parameters["tokens.weight"].std() < 0.03
    assert not parameters["layers.0.up.weight"].requires_grad
    assert parameters["layers.1.up.weight"].requires_grad
    ids = torch.randint(30, (2, 5))
    expected = F.cross_entropy(built.model(ids).flatten(0, 1), ids.flatten(), reduction="sum")
    assert built.summed_loss(built.model, ids, ids).item() == pytest.approx(expected.item())


def test_weights_depend_on_the_seed_alone(own):
    first = materialised(own("Model", seed=1), seed=1)
    torch.manual_seed(1234)
    again, other = materialised(own("Model", seed=1), seed=1), materialised(own("Model", seed=2), seed=2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name in ("tokens.weight", "layers.0.up.bias"):
        assert not torch.equal(first[name], other[name])


def test_a_factory_may_say_more(own):
    built = own("OwnWays", loss_chunk=4)
    assert len(built.blocks) == 2
    assert set(torch.cat([p.flatten() for p in materialised(built).values()]).tolist()) == {0.5}
    ids, plain = torch.randint(30, (2, 5)), own("Model")
    built.model.load_state_dict(dict(materialised(plain)) | {"head.weight": plain.model.head.weight})
    expected = 2 * plain.summed_loss(plain.model, ids, ids)
    assert built.summed_loss(built.model, ids, ids).item() == pytest.approx(expected.item())
    assert len(own("by_config", steps=5).blocks) == 5
    assert built.identity != own("by_config", steps=5).identity
    with_logits = own("WithLogits")
    materialised(with_logits)
    assert with_logits.summed_loss(with_logits.model, ids, ids).isfinite()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("nosuchmodule:make", {}, "cannot be imported: ModuleNotFoundError: No module named 'nosuchmodule'"),
        ("own_broken:make", {}, "cannot be imported: ModuleNotFoundError: No module named 'nosuchlibrary'"),
        ("nosuch", {}, "cannot be imported: AttributeError: module 'own_models' has no attribute 'nosuch'"),
        ("number", {}, "is a int, not a function that makes a model"),
        ("breaks", {}, "raised KeyError"),
        ("nothing", {}, "returned a NoneType, not a torch.nn.Module"),
        ("flat", {}, "no blocks found"),
        ("NoVocabulary", {}, "the number of its token ids is unknown"),
        ("on_meta", {}, "its buffer angles is on the meta device"),
        ("Model", {"loss_chunk": 4}, "train.loss_chunk needs a bundled model"),
        ("leaves", {}, "raised SystemExit: 0"),
        ("one_block_twice", {}, "one of its blocks is there twice, or is part of another"),
        ("block_in_block", {}, "one of its blocks is there twice, or is part of another"),
        ("five_blocks", {}, "no blocks found"),
        ("blocks_share", {}, "a block shares a parameter with what is outside of it"),
        ("block_shares_with_the_rest", {}, "a block shares a parameter with what is outside of it"),
        ("scalar", {}, "its parameter temperature is float32 []"),
        ("integers", {}, "its parameter table is int32 [2, 2]"),
        ("frozen", {}, "it has no parameter that trains"),
        ("flops_function", {}, "its flops_per_token is a function, not a number"),
        ("no_function", {}, "its summed_loss is a int, not a function"),
    ],
)
def test_a_factory_that_cannot_be_used_is_refused_in_one_line(own, name, settings, message):
    with pytest.raises(RunRefusedError) as refused:
        own(name, **settings)
    assert message in str(refused.value)
    assert str(refused.value).startswith("train.model ")
    assert "\n" not in str(refused.value)


def test_a_forward_without_logits_is_refused_when_it_runs(own):
    built = own("no_logits")
    materialised(built)
    with pytest.raises(RunRefusedError, match="returned a tuple; it must return logits"):
        built.summed_loss(built.model, torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "message"),
    [("turned", r"\[3, 2, 30\]; .* must be \[2, 3, 30\]"), ("too_few", r"\[2, 3, 30\]; .* must be \[2, 3, 31\]")],
)
def test_logits_of_another_shape_are_refused_and_not_trained_on(own, name, message):
    built = own(name)
    materialised(built)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(RunRefusedError, match=message):
        built.summed_loss(built.model, ids, ids)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40}
CONFIGS = {
    "llama": {"model_type": "llama", **SMALL, "tie_word_embeddings": True, "rope_theta": 500.0},
    "gemma": {"model_type": "gemma", **SMALL, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0},
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "bos_token_id": 0},
    "bert": {"model_type": "bert", **SMALL},
    "decoder": {"model_type": "bert", **SMALL, "is_decoder": True},
}


def hf(folder, config, **settings):
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1, **config}))
    return build(TrainConfig(model=f"hf:{folder}", sequence=16, **settings), torch.float32)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_transformers_gives_the_model_that_transformers_builds(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    built = hf(tmp_path, CONFIGS[name])
    assert all(p.is_meta for p in built.model.parameters())
    assert (built.vocabulary, built.masked, len(built.blocks)) == (40, name == "bert", 2)
    parameters = materialised(built)
    theirs = type(built.model)(transformers.AutoConfig.from_pretrained(tmp_path))
    buffers = dict(built.model.named_buffers())
    assert all(torch.equal(value, buffers[key]) for key, value in theirs.named_buffers())
    for key, value in theirs.named_parameters():  # norms and biases as the library starts them, Gemma's with 0
        if value.dim() < 2:
            assert torch.equal(value, parameters[key]), key
    theirs.load_state_dict(built.model.state_dict())
    ids = torch.randint(40, (2, 16))
    torch.testing.assert_close(built.model.eval()(ids).logits, theirs.eval()(ids).logits)
    assert built.summed_loss(built.model, ids, ids).isfinite()
    assert built.model.config.use_cache is False


def test_a_llama_of_transformers_counts_as_ours_does(tmp_path):
    built = hf(tmp_path, CONFIGS["llama"] | {"num_key_value_heads": 1, "max_position_embeddings": 64})
    ours = ModelShape(16, 2, 2, 40, 32, family="llama", kv_heads=1)
    assert built.block_parameters + built.root_parameters == ours.parameters
    assert built.flops_per_token == ours.flops_per_token(16)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mixtral", **SMALL, "num_local_experts": 8}, "mixture of 8 experts, which needs expert parall"),
        ({"model_type": "qwen3_moe", **SMALL, "num_experts": 4}, "Megatron-LM and torchtitan have it"),
        ({"model_type": "t5", "vocab_size": 40}, "has an encoder and a decoder"),
        ({"model_type": "nosuch"}, "transformers cannot read its configuration"),
        ({"model_type": "llama", **SMALL, "max_position_embeddings": 8}, "sequence 16 is longer than the model's 8"),
        ({"model_type": "vit", "hidden_size": 16}, "raised ValueError: Unrecognized configuration class"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused_in_one_line(tmp_path, config, message):
    pytest.importorskip("transformers")
    with pytest.raises(RunRefusedError) as refused:
        hf(tmp_path, config)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_config_or_library_is_said(tmp_path, monkeypatch):
    with pytest.raises(RunRefusedError, match="there is no such file or folder on this node"):
        build(TrainConfig(model=f"hf:{tmp_path}/nosuch"), torch.float32)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RunRefusedError, match=r"transformers is not installed: .* -m pip install 'transformers"):
        build(TrainConfig(model=f"hf:{tmp_path}"), torch.float32)


LARGE = """
import json, resource, sys, time, torch
import transformers
from mics.config import TrainConfig
from mics.models.build import build
build(TrainConfig(model="gpt-3m"), torch.float32)
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in sys.argv[1:]:
    before, started = used(), time.process_time()
    built = build(TrainConfig(model=name), torch.float32)
    parameters = built.block_parameters + built.root_parameters
    print(json.dumps([parameters, time.process_time() - started, 1024 * (used() - before)]))
"""


def test_twenty_billion_parameters_build_in_seconds_without_their_memory(tmp_path):
    config = {"model_type": "llama", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40}
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 20480, "vocab_size": 50000}))
    factory = """
        import torch
        from torch import nn
        def make():
            model = nn.Module()
            model.layers = nn.ModuleList(nn.Linear(16384, 16384) for _ in range(75))
            model.vocabulary = 10
            return model
        """
    (tmp_path / "large.py").write_text(textwrap.dedent(factory))
    command = [sys.executable, "-c", LARGE, "bert-20b", f"hf:{tmp_path}", "large:make"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, cwd=tmp_path)
    for line in done.stdout.splitlines():
        parameters, seconds, grown_bytes = json.loads(line)
        assert parameters > 20e9
        assert seconds < 20
        assert grown_bytes < 300e6
