"""What an engine compiles and captures when it starts, and what it refuses to start with."""

from __future__ import annotations

import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from local_ranks import run, tokens_of
from parity_rows import Request, Row
from parity_run import RankProcesses, leading

from cluster.group.context import RankContext
from cluster.rank.leader import Leader
from cluster.rank.runner import ModelRunner
from cluster.wire.messages import Submit
from compile.cache.artifacts import OUTPUT_CODE, unpack
from compile.config import CUDAGraphMode
from compile.counters import counter
from compile.errors import FieldError
from model.kernels import cpu
from model.parallel import communicator_of
from model.quantization import WeightFormat

ROOT = Path(__file__).resolve().parents[3]
ROW = Row("six heads", "run down", level=3, mode=CUDAGraphMode.NONE)


@contextmanager
def started(oracle: Any, row: Row, cache_dir: str, **compilation: Any) -> Iterator[Leader]:
    config = row.config(oracle, cache_dir)
    config = replace(config, compilation=replace(config.compilation, **compilation))
    processes = RankProcesses()
    with closing(processes), leading(config, processes, []) as leader:
        yield leader


@pytest.mark.feature("N09")
def test_each_step_of_pieces_reports_what_it_spends_between_them(
    make_oracle: Callable[[str], Any], cache_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, attend = replace(ROW, mode=CUDAGraphMode.FULL_AND_PIECEWISE), cpu.paged_prefill
    with started(make_oracle("six heads"), row, cache_dir) as leader:
        engine, forward = leader.engine, leader.runner.forward
        assert (forward.num_piecewise_steps, forward.eager_gap_share) == (0, 0.0)

        def prefill(i: int) -> float:
            """Return the share after one more prompt, whose decodes replay full graphs."""
            run(engine, [Request([1, 2, 3], 3).message(i)])
            return forward.eager_gap_share

        frames = dict(torch._dynamo.utils.counters["frames"])
        plain = [prefill(i) for i in range(3)][-1]
        assert forward.num_piecewise_steps == 3
        # Slow between pieces.
        monkeypatch.setattr(cpu, "paged_prefill", lambda *args: (time.sleep(0.1), attend(*args)))
        assert 0 < plain < prefill(3) < 1
        assert forward.eager_gap_share > 0.5
    # Attention holds nothing that compiles while pieces are replayed.
    assert dict(torch._dynamo.utils.counters["frames"]) == frames


@pytest.mark.feature("E05")
def test_passes_rewrite_pieces_that_no_compiler_sees(
    make_oracle: Callable[[str], Any], tmp_path: Path
) -> None:
    """A model of L layers is 2L + 1 pieces, of which 3 differ. Each sum of the residual, of which
    there are two in a layer, is fused with the norm behind it."""
    oracle, prompt = make_oracle("six heads"), [1, 2, 3]
    layers = oracle.model.config.num_hidden_layers
    with (
        counter.expect(
            num_piecewise_graphs_seen=2 * layers + 1,
            num_piecewise_capturable_graphs_seen=layers + 1,
            num_backend_compilations=3,
            # Of three pieces that are compiled, the first ends before any sum; others have two.
            num_pass_matches=4,
            num_eager_compiles=3,
            num_inductor_compiles=0,
        ),
        started(oracle, ROW, str(tmp_path), use_inductor=False) as leader,
    ):
        output = tokens_of(run(leader.engine, [Request(prompt, 6).message(0)])["0"])
    assert len(output) == 6
    oracle.check_greedy(prompt, output)


@pytest.mark.feature("O01", "O02", "O07", "O10")
def test_two_ranks_sum_and_norm_in_one_op_without_a_compiler(
    make_oracle: Callable[[str], Any], tmp_path: Path
) -> None:
    """Each of the fused norms is of a sum over ranks, which none but that norm reads. So fewer ops
    run, and none of them wrapped or on a copy."""
    oracle, prompt = make_oracle("llama3 rope"), [1, 2, 3]
    row = replace(ROW, tp=2)
    with started(oracle, row, str(tmp_path), use_inductor=False) as leader:
        output = tokens_of(run(leader.engine, [Request(prompt, 6).message(0)])["0"])
        # Either rank may have compiled a piece.
        paths = filter(zipfile.is_zipfile, tmp_path.rglob("artifacts/*"))
        sources = "".join(unpack(path.read_bytes())[OUTPUT_CODE].decode() for path in paths)
    oracle.check_greedy(prompt, output)
    # Of three different pieces, the first has the embedding's sum, the others two of a layer each.
    assert sources.count("lockstep.all_reduce_add_rms_norm.default(") == 4
    assert sources.count("lockstep.all_reduce.default(") == 1
    assert "auto_functionalized" not in sources and "clone" not in sources


@pytest.mark.parametrize(
    "held",
    [
        pytest.param("fp8", marks=pytest.mark.feature("O03", "S08")),
        pytest.param("nvfp4", marks=pytest.mark.feature("O04", "S08")),
    ],
)
def test_two_ranks_sum_norm_and_quantize_in_one_op_without_a_compiler(
    held: WeightFormat, make_oracle: Callable[[str], Any], tmp_path: Path
) -> None:
    """Of the norms of sums, all but the last, behind which is the head, feed a product of short
    numbers. Tokens are those of the forward as it is written, where each of the three is an op of
    its own."""
    oracle, prompt = make_oracle("whole blocks of 16").with_integers(held, 2), [1, 2, 3]
    row = replace(ROW, tp=2, held=held)
    # Prompts run the pieces, and decodes replay them.
    fused = replace(row, mode=CUDAGraphMode.FULL_DECODE_ONLY)
    options = {"use_inductor": False, "cudagraph_capture_sizes": (1,)}
    with started(oracle, fused, str(tmp_path), **options) as leader:
        output = tokens_of(run(leader.engine, [Request(prompt, 12).message(0)])["0"])
        paths = filter(zipfile.is_zipfile, tmp_path.rglob("artifacts/*"))
        sources = "".join(unpack(path.read_bytes())[OUTPUT_CODE].decode() for path in paths)
    with started(oracle, replace(row, level=0), str(tmp_path)) as leader:
        written = tokens_of(run(leader.engine, [Request(prompt, 12).message(0)])["0"])
    assert output == written
    oracle.check_greedy(prompt, output)
    # Of three different pieces, the first has the embedding's sum, the middle one both sums of a
    # layer, and so has the last. Ranks that compile at once may leave two artifacts of each.
    sums, plain, quantized = (
        sources.count(f"lockstep.{op}.default(")
        for op in ("all_reduce", "all_reduce_add_rms_norm", f"all_reduce_add_rms_norm_{held}")
    )
    assert (plain, quantized) == (sums, 3 * sums) and sums
    assert "auto_functionalized" not in sources and "clone" not in sources


@pytest.mark.feature("O05")
@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_ranks_add_up_where_their_products_were_written(
    make_oracle: Callable[[str], Any], tmp_path: Path, mode: CUDAGraphMode
) -> None:
    """No sum begins with a copy, and of the two sums of a layer the first leaves each rank with its
    rows of the residual."""
    oracle, prompt = make_oracle("llama3 rope"), [1, 2, 3]
    row = replace(ROW, tp=2, mode=mode)
    options = {"use_inductor": False, "enable_userbuffers": True}
    with started(oracle, row, str(tmp_path), **options) as leader:
        messages = [Request(prompt, 6 + i).message(i) for i in range(3)]
        outputs = run(leader.engine, messages)
        paths = filter(zipfile.is_zipfile, tmp_path.rglob("artifacts/*"))
        sources = "".join(unpack(path.read_bytes())[OUTPUT_CODE].decode() for path in paths)
        near = communicator_of(leader.runner.shard.group_name)
        assert near is not None and near.num_copied_sums == 0
    for i in range(3):
        oracle.check_greedy(prompt, tokens_of(outputs[str(i)]))
    sums, products, finals = (
        sources.count(f"lockstep.{op}.default(")
        for op in (
            "user_buffers_all_reduce_add_rms_norm",
            "packed_linear_to_user_buffers",
            "user_buffers_finalize",
        )
    )
    assert sums == products == 4 * finals > 0
    assert "copy_to_user_buffers" not in sources


WRITTEN = """
import sys
from pathlib import Path
from cluster.config import CacheConfig, EngineConfig, SchedulerConfig
from cluster.group.context import RankContext
from cluster.rank.runner import ModelRunner
from compile.config import CompilationConfig

config = CompilationConfig(level=0, cudagraph_mode="FULL_AND_PIECEWISE")
engine = EngineConfig(
    sys.argv[1], 64, cache=CacheConfig(4, 40), scheduler=SchedulerConfig(4, 32), compilation=config
)
captured = ModelRunner(RankContext(engine)).forward.captured
print(*captured.token_counts, *captured.batch_sizes, "torch._dynamo" in sys.modules)
"""


@pytest.mark.feature("X03")
def test_a_start_that_captures_what_is_written_imports_no_dynamo(
    make_oracle: Callable[[str], Any],
) -> None:
    command = [sys.executable, "-c", WRITTEN, str(make_oracle("llama3 rope").path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    sizes = [*(1, 2, 4, 8, 12, 16, 20, 24, 28, 32), *(1, 2, 4)]
    assert ended.stdout.split() == [*map(str, sizes), "False"], ended.stderr


@pytest.mark.feature("G05")
def test_a_warm_engine_traces_compiles_and_builds_nothing(
    make_oracle: Callable[[str], Any], cache_dir: str, judge: Callable[[Row], None]
) -> None:
    with started(make_oracle("six heads"), ROW, cache_dir):
        pass
    with counter.expect(
        num_graphs_seen=0,
        num_backend_compilations=0,
        num_inductor_compiles=0,
        num_cpp_builds=0,
        num_compiled_artifacts_loaded=3,
    ):
        judge(replace(ROW, mode=CUDAGraphMode.FULL_DECODE_ONLY))


IN_A_FRESH_PROCESS = """
import sys
from cluster.config import CacheConfig, EngineConfig, SchedulerConfig
from cluster.group.context import RankContext
from cluster.rank.runner import ModelRunner
from compile.config import CompilationConfig
from compile.counters import counter
compilation = CompilationConfig(
    level=3, cudagraph_mode="NONE", compiler="inductor", cache_dir=sys.argv[2]
)
ModelRunner(RankContext(EngineConfig(sys.argv[1], max_model_len=64, cache=CacheConfig(4, 40),
    scheduler=SchedulerConfig(4, 32), compilation=compilation)))
print(counter.num_inductor_compiles, counter.num_compiled_artifacts_saved)
"""


@pytest.mark.feature("G05", "H04")
def test_the_first_pieces_of_a_process_are_kept(
    make_oracle: Callable[[str], Any], tmp_path: Path
) -> None:
    """What torch sets up once a process may be missing for the first piece, and for no other."""
    model = str(make_oracle("six heads").path)
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, model, str(tmp_path / "cache")]
    child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split("\n")[-2] == "3 3", child.stderr


@pytest.mark.parametrize(
    ("shape", "needed"), [("mistral window 13 wide heads", 4), ("mistral without window", 64)]
)
def test_a_pool_too_small_for_one_sequence_is_refused_by_name(
    make_oracle: Callable[[str], Any], cache_dir: str, shape: str, needed: int
) -> None:
    config = Row(shape, "one at a time").config(make_oracle(shape), cache_dir)
    few, enough = (
        replace(config, cache=replace(config.cache, num_kv_blocks=n)) for n in (needed - 1, needed)
    )
    wanted = rf"at least {needed} \(one sequence of max_model_len=256\)"
    with pytest.raises(FieldError, match=f"^num_kv_blocks: wanted {wanted}, found {needed - 1}$"):
        ModelRunner(RankContext(few))
    assert ModelRunner(RankContext(enough)).num_blocks == needed


@pytest.mark.feature("S05")
def test_a_prompt_beyond_dynamic_ropes_context_is_refused_by_name(
    make_oracle: Callable[[str], Any], cache_dir: str
) -> None:
    row = Row("qwen3 dynamic rope", "one at a time")
    with leading(row.config(make_oracle(row.shape), cache_dir), RankProcesses(), []) as leader:
        leader.engine.submit(Submit(Request([1] * 91).message(0), None))
        [output] = leader.engine.step()
    wanted = "prompt_token_ids: wanted at most 90 tokens (rope_type dynamic: "
    assert output.finish_reason == "error"
    assert output.error.startswith(wanted) and output.error.endswith("found 91")
