"""What every test starts from: no network, one thread a process, a little text on disk."""

import functools
import gc
import math
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import pytest
import torch

# hundreds of programs import the project, and workers the same tests
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

WORDS = (
    "thought",
    "latent",
    "state",
    "token",
    "memory",
    "ponder",
    "fork",
    "reads",
    "writes",
    "and",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One worker more than there are cores: tests of signals and ranks wait for most of their time.

    It is asked where the command says ``--numprocesses auto``.
    """
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects no garbage among modules and tests, which stay: neither now nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny tensors: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """Forty short documents, one a line of a jsonl file."""
    import json
    import random

    rng = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    with path.open("w") as file:
        for _ in range(40):
            text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(20, 120)))
            file.write(json.dumps({"text": text.capitalize() + "."}) + "\n")
    return path


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory, request):
    """A folder that all workers of a session, and no other session, have in common."""
    base = tmp_path_factory.getbasetemp()
    # not from the environment: tests of a worker may start a session of their own, of one process
    return base.parent if hasattr(request.config, "workerinput") else base


@pytest.fixture(scope="session")
def data_cache(session_folder):
    """Folder of the session's tokenised corpora; who prepares one locks its part."""
    return session_folder / "data_cache"


@pytest.fixture(scope="session")
def every_tenth_module():
    """Returns the documents of a part of Python's library, as ``module_documents`` does of all."""
    from datamodules import local_corpora

    files = local_corpora.module_files
    read = local_corpora.module_documents.__wrapped__  # which keeps nothing

    @functools.cache
    def documents(min_length):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_corpora, "module_files", lambda root: files(root)[::10])
            return read(min_length)

    return documents


@pytest.fixture
def little_documentation(every_tenth_module, monkeypatch):
    """Has ``PythonDocs`` read every tenth topic and file, as parsing the library takes seconds."""
    from datamodules import local_corpora

    topics = local_corpora.topics
    monkeypatch.setattr(local_corpora, "topics", lambda: topics()[::10])
    monkeypatch.setattr(local_corpora, "module_documents", every_tenth_module)


@pytest.fixture
def make_data(text_file, data_cache):
    """Builds the real datamodule on that file; keyword arguments change its options."""
    from datamodules import LocalText

    def make(**changes):
        options = {"block_size": 32, "batch_size": 4, "cache_dir": str(data_cache)}
        return LocalText(data_files=str(text_file), **{**options, **changes})

    return make


@pytest.fixture
def make_sentences(make_data):
    """Builds batches of sentences of 29 bytes on that file; keyword arguments change options."""
    from datamodules import Sentences

    def make(**changes):
        options = {"splitter": "spans:29", "max_sentence_tokens": 29, "max_sentences": 5}
        return Sentences(corpus=make_data(), **{"batch_size": 4, **options, **changes})

    return make


@pytest.fixture
def make_marked_windows(make_data):
    """Builds windows over sentences of seven bytes on that file."""
    from datamodules import SentenceWindows

    def make(**changes):
        options = {"splitter": "spans:7", "block_size": 32, "batch_size": 4}
        return SentenceWindows(corpus=make_data(), **{**options, **changes})

    return make


@pytest.fixture
def make_reasoning(data_cache):
    """Builds short questions about variables; keyword arguments change their options."""
    from formats import REASONING

    from datamodules import StateTracking

    def make(**changes):
        options = {**REASONING.options, "cache_dir": str(data_cache)}
        return StateTracking(**{**options, **changes})

    return make


@pytest.fixture
def exact_tables(monkeypatch):
    """Rotary tables in float64, which are float32 otherwise, for comparisons with references."""
    from lightning_models.latent_thought import network as latent_thought
    from lightning_models.layers import Rope
    from lightning_models.layers.blocks import stretched
    from lightning_models.ponderlm.baselines import shared
    from lightning_models.thoughtbubbles import network as thoughtbubbles
    from lightning_models.transformer import network as transformer

    def rope_tables(positions, head_dim, base=10000.0, scaling=None):
        """``layers.rope_tables`` in float64."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        frequencies = base**-exponent
        frequencies = frequencies if scaling is None else stretched(frequencies, *scaling)
        angles = positions.double()[..., None] * frequencies
        angles = torch.cat((angles, angles), dim=-1).reshape(-1, 1, positions.shape[-1], head_dim)
        return Rope(angles.cos(), angles.sin())

    for module in (transformer, thoughtbubbles, latent_thought, shared):
        monkeypatch.setattr(module, "rope_tables", rope_tables)


@pytest.fixture
def in_float64(exact_tables, monkeypatch):
    """Rotary tables, and their RMS norms, in float64: ``transformers`` rounds both to float32."""
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, Qwen2RotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

    def by_wavelength(rope, frequency):
        """A frequency of LLaMA 3.1, as its paper's code has it: three cases of wavelengths."""
        wavelength, old = 2 * math.pi / frequency, rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength > old / low:
            return frequency / rope["factor"]
        if wavelength < old / high:
            return frequency
        smooth = (old / wavelength - low) / (high - low)
        return (1 - smooth) * frequency / rope["factor"] + smooth * frequency

    def forward(self, x, position_ids):
        rope = self.config.rope_parameters
        heads = getattr(self.config, "head_dim", None)
        heads = heads or self.config.hidden_size // self.config.num_attention_heads
        width = int(heads * rope.get("partial_rotary_factor", 1.0))
        frequencies = rope["rope_theta"] ** -(torch.arange(0, width, 2).double() / width)
        if rope["rope_type"] == "llama3":
            frequencies = frequencies.new_tensor(
                [by_wavelength(rope, frequency) for frequency in frequencies.tolist()]
            )
        angles = position_ids[..., None].double() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def norm(self, x):
        return torch.nn.functional.rms_norm(
            x, self.weight.shape, self.weight, self.variance_epsilon
        )

    for kind in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(kind, "forward", norm)
    for kind in (
        GPTNeoXRotaryEmbedding,
        LlamaRotaryEmbedding,
        Qwen2RotaryEmbedding,
        Qwen3RotaryEmbedding,
    ):
        monkeypatch.setattr(kind, "forward", forward)


@pytest.fixture
def exact(exact_tables):
    """Those, and all that is made inside, weights and positions, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
