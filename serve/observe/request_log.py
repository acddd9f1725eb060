"""One line in the log for each request: what it was, how long it took, how it ended. Nothing of
prompts, answers, headers or keys is in it. Lines are written by a thread of their own: a terminal
that does not read must not hold up anybody's tokens."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from serve.requests.records import RequestRecord

log = logging.getLogger("lockstep.request")

MAX_WAITING = 10_000
"""Lines that wait to be written."""
PAUSE_S = 0.05
"""Between two batches of lines: a thread that is woken for each request costs the event loop as
much as the line."""
MAX_ENGINES = 8
"""Engines that a line names."""


class RecordThread:
    """Handles records of ended requests; what is too many is dropped and counted."""

    def __init__(
        self,
        name: str,
        max_waiting: int,
        handle: Callable[[RequestRecord, float, int], None],
        *,
        pause_s: float = 0.0,
        at_close: Callable[[], None] | None = None,
    ) -> None:
        """Start the thread, which pauses between two batches, and calls `at_close` at its end.
        handle: takes a record, when its request ended, and how many were dropped before it."""
        self._waiting: queue.Queue[tuple[RequestRecord, float] | None] = queue.Queue(max_waiting)
        self._num_dropped = 0
        self._handle = handle
        self._pause_s = pause_s
        self._at_close = at_close
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def write(self, record: RequestRecord) -> None:
        try:
            self._waiting.put_nowait((record, time.monotonic()))
        except queue.Full:
            self._num_dropped += 1

    def close(self, timeout_s: float) -> None:
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (ended := self._waiting.get()) is not None:
            dropped, self._num_dropped = self._num_dropped, 0
            self._handle(*ended, dropped)
            if self._waiting.empty():
                time.sleep(self._pause_s)
        if self._at_close is not None:
            self._at_close()


class RequestLog(RecordThread):
    def __init__(self) -> None:
        super().__init__("request-log", MAX_WAITING, _write_line, pause_s=PAUSE_S)


def _write_line(record: RequestRecord, ended_at: float, num_dropped: int) -> None:
    fields = line_of(record, ended_at)
    if num_dropped:
        fields["dropped_lines"] = num_dropped
    text = " ".join(f"{name}={_text(value)}" for name, value in fields.items())
    log.info("request %s", text, extra={"fields": fields})


def line_of(record: RequestRecord, ended_at: float) -> dict[str, Any]:
    sequences = record.sequences
    started = [each for each in sequences if each.first_at]
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "id": record.id,
        "path": record.path,
        "status": record.status,
        "model": record.model,
        "stream": record.is_stream,
        "choices": len(sequences),
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": sum(each.num_cached_tokens for each in sequences if each.is_first_choice),
        "completion_tokens": record.num_tokens,
        "duration_s": round(ended_at - record.arrived_at, 6),
    }
    if started:
        first_at = min(each.first_at for each in started)
        fields["ttft_s"] = round(first_at - record.arrived_at, 6)
        fields["queue_s"] = round(max(each.queued_s for each in started), 6)
        num_gaps = sum(max(each.num_tokens - 1, 0) for each in started)
        if num_gaps:
            decode_s = sum(each.last_at - each.first_at for each in started)
            fields["tpot_s"] = round(decode_s / num_gaps, 6)
    fields["finish_reason"] = ",".join(sorted({each.finish_reason for each in sequences}))
    chosen: dict[str, str] = {}
    for choice in (choice for each in sequences for choice in each.engine_choices):
        chosen.setdefault(choice.engine, str(choice))
    fields["engines"] = ",".join([*chosen][:MAX_ENGINES])
    fields["why"] = ",".join([*chosen.values()][:MAX_ENGINES])
    fields["moves"] = sum(each.num_moves for each in sequences)
    fields["attempts"] = max((each.num_attempts for each in sequences), default=0)
    return fields


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or "-"
