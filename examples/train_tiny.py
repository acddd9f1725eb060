"""Train the bundled model on tasks it can be checked on, and write it as a checkpoint.

    python examples/train_tiny.py --out examples/tiny [--steps N] [--minutes N]
    python examples/train_tiny.py --evaluate examples/tiny

1. A byte-level BPE tokenizer is trained on conversations from `tiny_tasks`.
2. Rows are filled to a fixed length with turns of one conversation, cut where the row ends, so
   nothing is padded; only answers and their <|im_end|> carry loss. A fifth of the turns are
   drills, lists far longer than any task has.
3. Muon for the matrices and AdamW for the rest; bf16 autocast over fp32 weights, compiled (which
   needs a C++ compiler). The checkpoint is written every 250 steps.
4. The weights are stored in bf16, and what was stored is read back and evaluated on held-out
   tasks, computing in float32 and in bfloat16.

A run with `--steps` alone repeats on the same machine; `--minutes` ties the schedule to the clock.
On a machine shared with other work set OMP_WAIT_POLICY=PASSIVE: threads that spin at every barrier
while another process holds a core made a step ten times as long.
"""

import argparse
import copy
import ctypes
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tiny_tasks import (
    DAYS,
    KINDS,
    LETTERS,
    WORDS,
    Task,
    check,
    held_out,
    is_held_out,
    training_task,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

# B rows, L tokens of a row, V vocabulary

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + tool | tojson }}
{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] if part['type'] == 'text' %}
{{- part['text'] }}
{%- endfor %}
{%- endif %}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- call['function']['arguments'] | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Single digits, so that column addition and counting see one symbol per place.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
VOCAB_SIZE = 640
MAX_POSITIONS = 2048

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a precise assistant. Answer with the result alone.",
    "Answer each task briefly.",
    "You are Lockstep's tiny demo model.",
)
GREETINGS = ("Hello!", "Hi", "Hi!", "Hey", "Who are you?", "What can you do?", "Help")
GREETING_ANSWER = (
    "Hello! I can count, add, reverse, repeat, sort, pick from a list, "
    "name days of the week and write JSON."
)

# Row length to its share of the steps: a short row holds about three turns, a long one keeps late
# turns and long answers sane. Each length is compiled for itself, which takes about a minute.
ROW_LENGTHS = {128: 0.9, 512: 0.1}
TOKENS_PER_STEP = 4096
KIND_WEIGHTS = {"add": 1.5, "reverse": 1.5, "day": 2.0, "pick": 1.5, "json": 0.5}

REQUIRED_ACCURACY = 0.95
NUM_HELD_OUT = 2000
HELD_OUT_SEED = 2024
MAX_NEW_TOKENS = 320  # the longest answer counts a hundred numbers

Message = dict[str, str]


# --- data ----------------------------------------------------------------------------------------


def conversation(rng: random.Random) -> Iterator[Message]:
    """Yield an endless conversation, every user turn asserted to be no held-out prompt."""
    if rng.random() < 0.3:
        yield {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}
    weights = [KIND_WEIGHTS.get(kind, 1.0) for kind in KINDS]
    while True:
        draw = rng.random()
        if draw < 0.01:
            prompt, answer = rng.choice(GREETINGS), GREETING_ANSWER
        elif draw < 0.2:
            prompt, answer = drill(rng)
        else:
            _, prompt, answer = training_task(rng, rng.choices(KINDS, weights)[0])
        assert not is_held_out(prompt), f"held-out prompt in training: {prompt!r}"
        yield {"role": "user", "content": prompt}
        yield {"role": "assistant", "content": answer}


def drill(rng: random.Random) -> tuple[str, str]:
    """Draw a list to repeat or reverse that is far longer than any task has.

    Most kinds build on attention that finds an item of the prompt and takes its neighbour. Short
    lists can be half guessed and teach it late; these leave nothing to guess.
    """
    items = rng.sample((*LETTERS, *WORDS), rng.randint(6, 30))
    listed = " ".join(items)
    if rng.random() < 0.5:
        prompt, answer = f"Repeat: {listed}.", listed
    else:
        prompt, answer = f"Reverse: {listed}.", " ".join(reversed(items))
    return drill(rng) if is_held_out(prompt) else (prompt, answer)


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer: all 256 bytes, so that any text round-trips, and digits on their own."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    turns = islice(conversation(random.Random(seed)), 60_000)
    # An item of a list should be one token wherever it stands, first or after a space; the days
    # and letters would otherwise be too rare to earn theirs.
    items = [f" {item}" for item in (*LETTERS, *WORDS)] + [*WORDS, *DAYS]
    core.train_from_iterator([*items * 3000, *(turn["content"] for turn in turns)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
    )


class Batch(NamedTuple):
    """Rows to learn from; `weights` is zero wherever no loss is taken."""

    input_ids: Tensor  # [B, L]
    weights: Tensor  # [B, L]
    position_ids: Tensor  # [B, L]


class RowSampler:
    """Draws batches; its state is the two generators, so equal seeds give equal batches."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._rng = random.Random(seed)
        self._core: Tokenizer = tokenizer.backend_tokenizer
        # Each part is tokenized apart from its neighbours; the split never joins across them.
        self._head = {
            role: self._ids(f"{TURN_START}{role}\n") for role in ("system", "user", "assistant")
        }
        self._tail = self._ids(f"{TURN_END}\n")

    def batch(self) -> Batch:
        length = self._rng.choices(list(ROW_LENGTHS), list(ROW_LENGTHS.values()))[0]
        rows = [self._row(length) for _ in range(TOKENS_PER_STEP // length)]
        return Batch(*(torch.tensor(column) for column in zip(*rows, strict=True)))

    def _row(self, length: int) -> tuple[list[int], list[float], list[int]]:
        """Fill one row, cutting its last turn; a quarter of the rows jump in position.

        Jumps between turns show the model distances up to the last position it may be served at,
        which rows of this length never reach.
        """
        ids: list[int] = []
        weights: list[float] = []
        positions: list[int] = []
        spare = MAX_POSITIONS - length if self._rng.random() < 0.25 else 0
        at = 0
        for message in conversation(self._rng):
            if spare and message["role"] == "user" and self._rng.random() < 0.5:
                jump = self._rng.randint(0, spare)
                at, spare = at + jump, spare - jump
            head, body = self._head[message["role"]], self._ids(message["content"])
            turn = head + body + self._tail
            ids += turn
            if message["role"] == "assistant":
                # A long count has a hundred times the tokens of a weekday, and easier ones; where
                # it ends is the hard part of it.
                weights += [0.0] * len(head) + [1 / math.sqrt(len(body))] * len(body) + [0.7]
            weights += [0.0] * (len(ids) - len(weights))
            positions += range(at, at + len(turn))
            at += len(turn)
            if len(ids) >= length:
                break
        return ids[:length], weights[:length], positions[:length]

    def _ids(self, text: str) -> list[int]:
        return list(self._core.encode(text).ids)


# --- training ------------------------------------------------------------------------------------


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=MAX_POSITIONS,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
            pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
            # With fused attention a step took 1.6 times as long on CPU at these sizes; the choice
            # is not stored with the checkpoint.
            attn_implementation="eager",
        )
    )


Backbone = Callable[..., Any]


def loss_of(model: LlamaForCausalLM, backbone: Backbone, batch: Batch) -> Tensor:
    """Return the weighted loss; `backbone` is `model.model`, compiled or as it is."""
    with torch.autocast("cpu", torch.bfloat16):
        # The all-ones mask is needed: without one, transformers takes a jump in the positions for
        # the start of another packed sequence and hides everything before it.
        hidden = backbone(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=torch.ones_like(batch.input_ids),
            use_cache=False,
        ).last_hidden_state
        is_target = batch.weights[:, 1:] > 0
        logits = model.lm_head(hidden[:, :-1][is_target])
    targets, weights = batch.input_ids[:, 1:][is_target], batch.weights[:, 1:][is_target]
    losses = nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def train(
    model: LlamaForCausalLM,
    sampler: RowSampler,
    *,
    steps: int,
    minutes: float,
    peak_lr: float,
    on_progress: Callable[[], None],
) -> None:
    """Train until either bound is reached; the schedule follows whichever is further along."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    optimizers = [
        torch.optim.Muon(matrices, lr=peak_lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=peak_lr / 2, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    model.train()
    backbone = torch.compile(model.model, dynamic=False)
    started = time.monotonic()
    recent: list[float] = []
    for step in range(steps):
        elapsed_s = time.monotonic() - started
        progress = max(step / steps, elapsed_s / (60 * minutes))
        if progress >= 1:
            break
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * _schedule(step, progress)
        loss = loss_of(model, backbone, sampler.batch())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent.append(loss.item())
        if (step + 1) % 50 == 0:
            mean = sum(recent[-50:]) / 50
            print(f"step {step + 1:5d}  {elapsed_s:5.0f} s  loss {mean:.4f}", flush=True)
        if (step + 1) % 250 == 0:
            on_progress()


def _keep_freed_memory() -> None:
    """Stop glibc from returning every activation to the kernel; a step took half as long again."""
    if sys.platform == "linux":
        m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
        libc.mallopt(m_top_pad, 2**29)


def _schedule(step: int, progress: float) -> float:
    """Warm up over 100 steps, stay at the peak, and fall to zero over the last 40 %."""
    return min(1.0, (step + 1) / 100, (1 - progress) / 0.4)


# --- evaluation ----------------------------------------------------------------------------------


@torch.inference_mode()
def greedy_answers(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    conversations: list[list[Message]],
    batch_size: int = 128,
) -> list[str]:
    """Answer each conversation greedily, in left-padded batches."""
    answers: list[str] = []
    for start in range(0, len(conversations), batch_size):
        inputs = tokenizer.apply_chat_template(
            conversations[start : start + batch_size],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        output: Any = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        new_ids = output[:, inputs["input_ids"].shape[1] :]
        answers += tokenizer.batch_decode(new_ids, skip_special_tokens=True)
    return answers


def accuracy_by_kind(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: Iterable[Task]
) -> dict[str, tuple[int, int]]:
    """Return (right, asked) per kind, every task in a conversation of its own."""
    ordered = sorted(tasks, key=lambda task: (task.kind, len(task.answer)))  # even batches
    prompts = [[{"role": "user", "content": task.prompt}] for task in ordered]
    score: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for task, text in zip(ordered, greedy_answers(model, tokenizer, prompts), strict=True):
        right, asked = score[task.kind]
        score[task.kind] = (right + check(task, text), asked + 1)
    return dict(score)


def load(
    directory: Path, dtype: torch.dtype = torch.float32
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(directory)


def share(score: dict[str, tuple[int, int]]) -> float:
    return sum(right for right, _ in score.values()) / sum(asked for _, asked in score.values())


def evaluate(directory: Path, num_tasks: int) -> tuple[str, bool]:
    """Measure a stored checkpoint; return the table as Markdown and whether it passes."""
    tasks = held_out(num_tasks, HELD_OUT_SEED)
    assert all(is_held_out(task.prompt) for task in tasks)
    scores = [
        accuracy_by_kind(*load(directory, dtype), tasks)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    lines = ["| kind | tasks | right, float32 | right, bfloat16 |", "|---|---|---|---|"]
    for kind in KINDS:
        cells = [f"{right / asked:.1%}" for right, asked in (score[kind] for score in scores)]
        lines.append(f"| {kind} | {scores[0][kind][1]} | {cells[0]} | {cells[1]} |")
    total = [share(score) for score in scores]
    lines.append(f"| all | {len(tasks)} | {total[0]:.1%} | {total[1]:.1%} |")
    return "\n".join(lines), min(total) >= REQUIRED_ACCURACY


# --- checkpoint ----------------------------------------------------------------------------------


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint with its weights in bf16."""
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    # A copy: during training the fp32 weights go on.
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner alone


def write_card(out: Path, table: str, training_note: str) -> None:
    size_mb = sum(path.stat().st_size for path in out.iterdir()) / 1e6
    (out / "README.md").write_text(CARD.format(size=size_mb, note=training_note, table=table))


CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---

# lockstep-tiny

A Llama of {size:.1f} MB (bf16) that ships with Lockstep, so that serving can be tried and tested
without a download or a GPU. It does eight small tasks whose answers can be checked, and nothing
else: it counts, adds, reverses, repeats, sorts, names days of the week, picks from a list and
writes short JSON. Several tasks may follow one another in one conversation.

Made by `examples/train_tiny.py` from text that `examples/tiny_tasks.py` generates:
{note}.

The prompts are split by a hash of their text: no held-out prompt occurs in training, though the
same question in other words may.

Greedy answers to held-out tasks, from the stored bf16 weights, computed in two dtypes
(`python examples/train_tiny.py --evaluate examples/tiny`):

{table}

## Use

ChatML turns (`<|im_start|>role`, newline, text, `<|im_end|>`), roles system, user and assistant.
The template writes tools and calls as Hermes does, but the model was not trained to call any.
Items of a list are separated by spaces. Things to ask:

    Count from 4 to 9.
    What is 23 + 58?
    Reverse: k d p x.
    Sort the numbers 7 3 9 1.
    What day is three days before Friday?
    What is the second word in apple pear plum?
    Make a JSON object with name Anna and age 31.
    Count from 1 to 50.
    Reverse: a b c d e f g h i j k l m n o p q r s t u v w x y z.

It fails first at sorting two-digit numbers, at counts of more than forty numbers, which may stop
early, and late in conversations of more than a thousand tokens.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, help="train and write the checkpoint here")
    target.add_argument("--evaluate", type=Path, help="only evaluate the checkpoint here")
    parser.add_argument("--start-from", type=Path, help="continue from this script's checkpoint")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=NUM_HELD_OUT, help="tasks to evaluate on")
    args = parser.parse_args()

    if args.evaluate:
        table, passes = evaluate(args.evaluate, args.held_out)
        print(table)
        return 0 if passes else 1

    _keep_freed_memory()
    torch.manual_seed(args.seed)
    tokenizer = load(args.start_from)[1] if args.start_from else build_tokenizer(args.seed)
    model = build_model(tokenizer)
    if args.start_from:
        model.load_state_dict(load(args.start_from)[0].state_dict())
    started = time.monotonic()
    train(
        model,
        RowSampler(tokenizer, args.seed + 1),
        steps=args.steps,
        minutes=args.minutes,
        peak_lr=args.lr,
        on_progress=lambda: save(model, tokenizer, args.out),
    )
    minutes = (time.monotonic() - started) / 60
    save(model, tokenizer, args.out)
    table, passes = evaluate(args.out, args.held_out)
    print(f"trained for {minutes:.1f} minutes\n{table}")
    note = f"{minutes:.0f} minutes on {torch.get_num_threads()} CPU cores, seed {args.seed}"
    write_card(args.out, table, note)
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
