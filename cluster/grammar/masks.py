"""Grammars beside the step thread: one thread compiles them, another fills masks.

Both spend their time in native code without the interpreter's lock. The step thread hands work over
and takes results. Masks of a step are filled from its plan on, while its inputs are built and its
forward runs. A rank without such requests starts no thread.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor

from cluster.grammar.compile import GrammarError, Vocabulary, VocabularyError
from cluster.grammar.matcher import CompiledGrammar, CompileResult, MaskedRow, Masks
from cluster.wire.messages import Grammar

log = logging.getLogger("lockstep.grammars")

MAX_CACHED = 64
"""Compiled grammars that are kept beside those of live requests, the last ones used."""

ROWS_AT_ONCE = 16
"""Sequences of which masks are filled in one call, which nothing can end."""
SLOW_FILL_S = 0.05
"""A call that takes longer has the masks of later rows, and of the next step, filled one by one."""
COSTLY_MASK_S = 0.01
"""Of a processor. What masks take beyond it adds up, by grammar and by step."""
MAX_COSTLY_S = 0.25
"""So much beyond, of one grammar or in one step, and the grammar is of no use any more."""
TOO_COSTLY = "its masks take too long to compute"


class GrammarMasks:
    def __init__(
        self,
        vocabulary: Vocabulary | VocabularyError,
        *,
        num_threads: int,
        wake: Callable[[], None],
    ) -> None:
        """Start nothing yet. `vocabulary` may say why there is none, which is what requests with a
        grammar end with; `wake` is called by the compiling thread when a result is there."""
        self.vocabulary = vocabulary
        self._num_threads = num_threads
        self._wake = wake
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._filling = ThreadPoolExecutor(1, "grammar-masks")
        self._filler: MaskFiller | None = None
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._waiting: dict[str, list[str]] = {}
        """By the text that is being compiled the requests that wait for it."""
        self._done: deque[tuple[str, CompiledGrammar | None, str]] = deque()
        self.filled_step = -1
        """The last step that has masks; -1 before the first."""
        self._filled: Future[Masks]

    # --- for the scheduler ---

    def compile(self, request_id: str, grammar: Grammar) -> CompiledGrammar | None:
        """Return the grammar if it is ready; otherwise a result will come for the request."""
        text = grammar.text
        found = self._cache.get(text)
        if found is not None and not found.is_spent:
            self._cache.move_to_end(text)
            return found
        # Of those who left, an empty list stays until the text is compiled.
        is_new = text not in self._waiting
        self._waiting.setdefault(text, []).append(request_id)
        if is_new and found is not None and found.is_costly:
            self._done.append((text, None, f"grammar: {TOO_COSTLY}"))
            self._wake()
        elif is_new:
            self._compiler.submit(self._compile, text)
        return None

    def take_compiled(self) -> list[CompileResult]:
        results: list[CompileResult] = []
        while self._done:
            text, compiled, error = self._done.popleft()
            if compiled is not None:
                self._cache[text] = compiled
                self._cache.move_to_end(text)
                if len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)
            for request_id in self._waiting.pop(text):
                results.append(CompileResult(request_id, compiled, error))
        return results

    def forget(self, request_id: str) -> None:
        for waiting in self._waiting.values():
            if request_id in waiting:
                waiting.remove(request_id)
                return

    def fill(self, step: int, num_rows: int, rows: list[MaskedRow]) -> None:
        self.filled_step = step
        self._filled = self._filling.submit(self._fill, num_rows, rows)

    # --- for the runner ---

    def take(self) -> Masks:
        return self._filled.result()

    def close(self) -> None:
        for executor in (self._compiler, self._filling):
            executor.shutdown(cancel_futures=True)

    # --- in the threads ---

    def _compile(self, text: str) -> None:
        try:
            if isinstance(self.vocabulary, VocabularyError):
                raise GrammarError(f"tokenizer: {self.vocabulary}")
            self._done.append((text, self.vocabulary.compile(text), ""))
        except Exception as error:  # whatever it is, the requests must not wait for ever
            self._done.append((text, None, f"grammar: {error}"))
        self._wake()

    def _fill(self, num_rows: int, rows: list[MaskedRow]) -> Masks:
        assert isinstance(self.vocabulary, Vocabulary), "a grammar was compiled without one"
        if self._filler is None:
            self._filler = MaskFiller(self.vocabulary, self._num_threads)
        try:
            return self._filler.fill(num_rows, rows)
        except BaseException as error:  # a panic in native code ends these requests, not the rank
            log.exception("masks of %d rows could not be filled", len(rows))
            for row in rows:
                row.matcher.fail(f"{type(error).__name__}: {error}")
            return np.full((num_rows, self.vocabulary.num_words), 0xFFFFFFFF, dtype=np.uint32)


class MaskFiller:
    """Fills masks of many sequences at once, in native threads. Belongs to one thread. A native
    call cannot be ended: rows are filled a few at a time, and once that takes long one by one,
    which tells whose masks are costly."""

    def __init__(self, vocabulary: Vocabulary, num_threads: int) -> None:
        self._vocabulary = vocabulary
        self._executor = LLExecutor(num_threads)
        self._is_slow = False

    def fill(self, num_rows: int, rows: list[MaskedRow]) -> Masks:
        """Return the masks of a step's rows; those without a grammar allow everything."""
        num_words = self._vocabulary.num_words
        masks = np.full((num_rows, num_words), 0xFFFFFFFF, dtype=np.uint32)
        costly_s, left = 0.0, rows
        while left and not self._is_slow:
            some, left = left[:ROWS_AT_ONCE], left[ROWS_AT_ONCE:]
            began = time.perf_counter()
            self._fill_some(masks, some)
            self._is_slow = time.perf_counter() - began > SLOW_FILL_S
        for each in left:
            costly_s += self._fill_one(masks, each, costly_s)
        if left:
            self._is_slow = costly_s > 0
        by_ends: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            row.matcher.note_error()
            by_ends.setdefault(row.matcher.end_token_ids, []).extend(row.indices)
        for end_token_ids, indices in by_ends.items():
            self._vocabulary.move_ends(masks, indices, end_token_ids)
        return masks

    def _fill_some(self, masks: Masks, rows: list[MaskedRow]) -> None:
        # A microsecond each: to do without the interpreter's lock would mean to ask for it again,
        # which takes a busy step thread's switch interval.
        for row in rows:
            row.matcher.feed(row.token_ids)
        num_rows, num_words = masks.shape
        where = (masks.ctypes.data, 4 * num_words, num_rows)
        plain = [(row.matcher.state, row.index) for row in rows if not row.draft]
        drafting = [(row.matcher.state, row.index, row.draft) for row in rows if row.draft]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if drafting:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafting, *where)

    def _fill_one(self, masks: Masks, row: MaskedRow, costly_s: float) -> float:
        """Fill a row and return by how much it took longer than `COSTLY_MASK_S` of a processor;
        those of the step's rows so far were `costly_s` in sum."""
        matcher, grammar = row.matcher, row.matcher.grammar
        if grammar.is_costly:
            matcher.fail(TOO_COSTLY)
            return 0.0
        began = time.thread_time()
        matcher.feed(row.token_ids)
        _fill_row(masks, row)
        beyond_s = time.thread_time() - began - COSTLY_MASK_S * len(row.indices)
        grammar.costly_s = max(0.0, grammar.costly_s + beyond_s)
        if beyond_s > 0 and max(grammar.costly_s, costly_s + beyond_s) > MAX_COSTLY_S:
            grammar.is_costly = True
            matcher.fail(TOO_COSTLY)
        return max(0.0, beyond_s)


def _fill_row(masks: Masks, row: MaskedRow) -> None:
    """Fill the masks of a matcher's next token and of those behind its draft, as far as that may
    be, and leave the matcher where it was."""
    state, num_drafted = row.matcher.state, 0
    for index, token in zip(row.indices, [*row.draft, None], strict=True):
        state.unsafe_compute_mask_ptr(masks[index].ctypes.data, 4 * masks.shape[1])
        if token is None or not state.try_consume_tokens([token]):
            break
        num_drafted += 1
    if num_drafted:
        state.rollback(num_drafted)
