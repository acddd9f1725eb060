"""Another Ray app on the same cluster calls Lockstep through a handle.

Start Lockstep first (`serve run serve.app:deploy`), then `python examples/handle.py`. The calls
are the ones that any deployment, task or driver would make.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
from ray import serve as ray_serve


@ray_serve.deployment(ray_actor_options={"num_cpus": 0.01})
class Summer:
    """An app of its own that asks Lockstep for sums."""

    def __init__(self) -> None:
        # Kept: while a deploy builds Lockstep anew, Serve says for seconds that it does not exist.
        self._lockstep = ray_serve.get_app_handle(os.environ.get("LOCKSTEP_APP", "default"))

    async def add(self, a: int, b: int) -> str:
        """Return the answer in one piece."""
        body = await self._lockstep.chat.remote(_question(a, b))
        return str(body["choices"][0]["message"]["content"])

    async def add_streamed(self, a: int, b: int) -> list[str]:
        """Return the answer's deltas as they came."""
        chunks = self._lockstep.options(stream=True).stream_chat.remote(_question(a, b))
        return [
            choice["delta"].get("content") or ""
            async for chunk in chunks
            for choice in chunk["choices"]
        ]


def _question(a: int, b: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What is {a} + {b}?"}]
    return {"messages": messages, "temperature": 0, "max_tokens": 32}


async def main() -> None:
    """Deploy the app beside Lockstep, ask it twice and take it down."""
    handle = ray_serve.run(Summer.bind(), name="summer", route_prefix=None)
    print("whole:", await handle.add.remote(12, 30))
    print("stream:", await handle.add_streamed.remote(12, 30))
    ray_serve.delete("summer")


if __name__ == "__main__":
    # The cluster of `RAY_ADDRESS`, or else the one that was started last on this machine.
    ray.init(address="auto", logging_level="ERROR")
    print("cluster:", ray.get_runtime_context().gcs_address)
    asyncio.run(main())
