"""How Lockstep's processes write their logs: as text, or one JSON object a line."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import msgspec

from compile.environment import LOGGERS, log_level

TEXT, JSON = "text", "json"


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON; its attribute `fields` adds more."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            **({"message": "request", **fields} if fields else {"message": record.getMessage()}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def configure_logs(log_format: str) -> None:
    """Write what Lockstep's loggers say to standard error; others stay as they are."""
    handler, level = logging.StreamHandler(), log_level()
    if log_format == JSON:
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


def last_line(error: BaseException) -> str:
    """Return the last line that says something: Ray puts the whole remote traceback before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
