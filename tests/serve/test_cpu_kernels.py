"""Where nothing is compiled, an engine on a CPU computes its layers in C++, and greedy tokens are
those of transformers."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from model.kernels.cpu import native
from serve.llm import LLM, SamplingParams

TINY = Path(__file__).parents[2] / "examples" / "tiny"
SHAPE: dict[str, Any] = {
    "vocab_size": 640,
    "hidden_size": 96,
    "intermediate_size": 152,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    # So wide that outputs of different prompts differ.
    "initializer_range": 0.2,
}
LENGTHS = (3, 150, 70, 1)
NUM_TOKENS = 12
ELEMENTWISE = {"rms_norm", "fused_add_rms_norm", "silu_and_mul"}
ATTENTION = {"rope_and_write_kv", "paged_prefill", "paged_decode"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the calls of C++ kernels by name, those of replays included."""
    if native.native_function("rms_norm", torch.float32) is None:
        pytest.skip("needs the C++ kernels, found none")
    counts: Counter[str] = Counter()
    find = native.native_function

    def counted(name: str, dtype: torch.dtype, part: native.Part) -> Callable[..., bool]:
        kernel = find(name, dtype, part)

        def call(*args: Any) -> bool:
            is_served: bool = kernel(*args)
            counts[name if part == "kernels" else f"{name} of {part}"] += is_served
            return is_served

        return call

    monkeypatch.setattr(native, "native_function", counted)
    native._prepared.cache_clear()
    yield counts
    native._prepared.cache_clear()


def checkpoint(directory: Path, family: str, **particular: Any) -> Any:
    """Write a random checkpoint with the bundled tokenizer; return transformers' model."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | particular))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(directory)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, directory)
    return model


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Return the tokens that transformers generates, each from a forward of everything before."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def generated(
    path: Path, prompts: list[list[int]], calls: Counter[str], **options: Any
) -> list[list[int]]:
    """Return what an engine generates, and count the calls of that alone."""
    llm = LLM(path, dtype="float32", max_num_seqs=4, kv_memory="32MiB", **options)
    calls.clear()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize(
    ("family", "particular"),
    [
        ("Llama", {"attention_bias": True}),
        ("Qwen3", {"head_dim": 20}),
        ("Mistral", {"sliding_window": 40}),
    ],
)
@pytest.mark.parametrize("graphs", ["NONE", "FULL_DECODE_ONLY"])
def test_an_eager_engine_answers_as_transformers_with_kernels_in_use(
    tmp_path: Path, calls: Counter[str], family: str, particular: dict[str, Any], graphs: str
) -> None:
    reference = checkpoint(tmp_path, family, **particular)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 640, (n,), generator=generator).tolist() for n in LENGTHS]
    config = {"level": 0, "cudagraph_mode": graphs}
    options = {"max_num_batched_tokens": 64, "compilation_config": config}
    found = generated(tmp_path, prompts, calls, **options)
    assert found == [greedy(reference, prompt) for prompt in prompts]
    assert set(calls) == ELEMENTWISE | ATTENTION
    # Every layer of every step: one gate, one write of KV, and one norm with an addition.
    layers = SHAPE["num_hidden_layers"]
    assert calls["silu_and_mul"] == calls["fused_add_rms_norm"] > NUM_TOKENS * layers
    assert calls["silu_and_mul"] == calls["rope_and_write_kv"]
    assert calls["silu_and_mul"] % layers == 0
    per_step = layers + 1 + (2 * layers if family == "Qwen3" else 0)
    assert calls["rms_norm"] == calls["silu_and_mul"] // layers * per_step


@pytest.mark.feature("S04")
@pytest.mark.parametrize("graphs", ["NONE", "FULL_DECODE_ONLY"])
def test_an_eager_engine_attends_to_latents_in_a_kernel(
    tmp_path: Path, calls: Counter[str], graphs: str
) -> None:
    reference = checkpoint(
        tmp_path,
        "DeepseekV3",
        num_key_value_heads=6,
        q_lora_rank=24,
        kv_lora_rank=40,
        qk_nope_head_dim=12,
        qk_rope_head_dim=6,
        v_head_dim=10,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=3,
        topk_group=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
    )
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 640, (n,), generator=generator).tolist() for n in LENGTHS]
    config = {"level": 0, "cudagraph_mode": graphs}
    options = {"max_num_batched_tokens": 64, "compilation_config": config}
    found = generated(tmp_path, prompts, calls, **options)
    assert found == [greedy(reference, prompt) for prompt in prompts]
    # Every layer of every step with a decode, which all but the first are.
    layers = SHAPE["num_hidden_layers"]
    assert calls["latent_decode"] % layers == 0
    assert calls["latent_decode"] >= (NUM_TOKENS - 1) * layers
    assert not set(calls) & ATTENTION


@pytest.mark.feature("S09")
def test_a_cache_of_fp8_has_kernels_of_its_own(tmp_path: Path, calls: Counter[str]) -> None:
    checkpoint(tmp_path, "Llama")
    options = {"kv_cache_dtype": "fp8", "compilation_config": {"level": 0}}
    generated(tmp_path, [list(range(3, 60))], calls, **options)
    assert set(calls) == ELEMENTWISE | {f"{name} of fp8_caches" for name in ATTENTION}


def test_traced_pieces_hold_torch_functions(tmp_path: Path, calls: Counter[str]) -> None:
    """Inductor fuses them, and could not look into an op."""
    reference = checkpoint(tmp_path, "Llama")
    config = {"level": 3, "cudagraph_mode": "NONE", "use_inductor": False, "passes": ()}
    config["cache_dir"] = str(tmp_path / "cache")
    prompt = list(range(3, 60))
    found = generated(tmp_path, [prompt], calls, compilation_config=config)
    assert found == [greedy(reference, prompt)]
    assert set(calls) == ATTENTION
