"""Attack the default application as hostile clients would, and see what other clients notice.

    python examples/bench/hostile.py [--only NAME,...] [--seconds 3] [--calm-s 60] [--out FILE]
                                     [--haproxy] [--bare]

An honest client streams the same long answer over and over, `/health` is asked ten times a second,
and the attacks (`hostile_bodies.py`, `hostile_prompts.py`, `hostile_shapes.py`, `hostile_wire.py`,
`hostile_grammars.py`) run one after the other, each for so many seconds (some many times as long)
and at most for four times as many. The first row, `nothing`, is the same without an attack: what
the machine does by itself. `--bare` attacks an application that only reads and streams
(`bare_app.py`), which shows what Ray Serve does by itself. Printed are, by attack:

    statuses  the answers to it, and how often each came
    loop      the longest that the ingress's event loop did not turn, by `/debug/ingress`; where it
              is not there, the longest that `/health` took
    token     the longest pause between two tokens of the honest stream
    first     the longest that the honest client waited for a first token; behind attacks that ask
              for more than there is room for it may be told to wait
    health    the longest that `/health` took
    noise     the most by which the machine woke the watching process late
    +ingress, +proxy, +ranks, +rest
              MiB by which their memory grew, at the most
    next      seconds from the attack's end to the right answer to an ordinary request
    verdict   which targets were missed

Behind the slash stands the value without an attack. The exit code is 1 if a row fails. A row is a
hint, not a proof: a heap that one attack has filled does not grow with the next.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
from pathlib import Path

import msgspec
from default_app import DEFAULT, DefaultApp
from hostile_attacks import ATTACKS, Attacked
from hostile_target import CUT_AFTER
from hostile_watch import Seen, Watch

ATTACKER = Path(__file__).with_name("hostile_attacks.py")
BARE = "examples.bench.bare_app:deploy"
NOTHING = "nothing"
ATTACKER_FAILED = "attacker failed"
START_S = 120.0
"""How long an attacker's process may take to start on a busy machine."""

MAX_LOOP_GAP_S = 0.1
MAX_TOKEN_GAP_S = 0.5
MAX_GROWTH = 10
"""How many times the bytes that were sent at once."""
FREE_GROWTH_BYTES = 64 << 20
MIB = 1 << 20


class Row(msgspec.Struct, kw_only=True):
    """An attack, what was seen meanwhile, and which targets were missed."""

    name: str
    is_load: bool
    attacked: Attacked
    seen: Seen
    next_s: float | None
    """None: an ordinary request was not answered, or wrong."""
    failures: list[str] = []
    is_calm: bool = True
    """Whether nothing was left of the attack before when this one began."""

    @property
    def loop_gap_s(self) -> float:
        """The gap of the ingress's loop, or the nearest to it that can be seen from outside."""
        gap_s = self.seen.loop_gap_s
        return self.seen.health.latency_s if gap_s is None else gap_s

    @property
    def max_growth_bytes(self) -> int:
        """What the memory of each role may grow by."""
        return max(MAX_GROWTH * self.attacked.most_bytes, FREE_GROWTH_BYTES)


class Report(msgspec.Struct):
    """All rows of a run."""

    machine: str
    arguments: list[str]
    has_haproxy: bool
    seconds: float
    loop_gap_from: str
    """`/debug/ingress` or `/health`."""
    rows: list[Row]


def failures_of(row: Row) -> list[str]:
    """Return the targets that were missed; requests that come during a load may have to wait."""
    honest, health = row.seen.honest, row.seen.health
    waits = {
        "loop": (row.loop_gap_s, MAX_LOOP_GAP_S),
        "token": (honest.token_gap_s, MAX_TOKEN_GAP_S),
        "first": (0.0 if row.is_load else honest.first_token_s, MAX_TOKEN_GAP_S),
    }
    counts = {
        "wrong": honest.wrong,
        "broken": honest.broken,
        "refused": 0 if row.is_load else honest.refused,
        "health": health.failed,
        "500": row.attacked.outcomes.get("500", 0),
        ATTACKER_FAILED: row.attacked.outcomes.get(ATTACKER_FAILED, 0),
        "no Retry-After": sum(
            count for outcome, count in row.attacked.outcomes.items() if "no Retry-After" in outcome
        ),
        "honest": sum(
            count
            for outcome, count in row.attacked.outcomes.items()
            if outcome.startswith("honest") and outcome != "honest 200"
        ),
        "restarted": len(row.seen.restarted),
        "next": int(row.next_s is None),
    }
    return [
        *(f"{name} {found:.2f} s" for name, (found, limit) in waits.items() if found > limit),
        *(
            f"{role} +{found // MIB} MiB"
            for role, found in row.seen.growth_bytes.items()
            if found > row.max_growth_bytes
        ),
        *(f"{name} {count}" for name, count in counts.items() if count),
    ]


# --- the table -----------------------------------------------------------------------------------

COLUMNS = ("attack", "seconds", "loop", "token", "first", "health", "noise")
ROLES = ("ingress", "proxy", "ranks", "rest")
WIDTHS = (24, 7, 13, 13, 13, 13, 13, 8, 8, 8, 8, 6)


def print_row(cells: tuple[str, ...], verdict: str) -> None:
    """Print a line of the table."""
    padded = [cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)]
    print(" ".join([*padded, verdict]), flush=True)


def print_head() -> None:
    """Print the names of the columns."""
    print_row((*COLUMNS, *(f"+{role}" for role in ROLES), "next"), "verdict: statuses")


def waits_of(row: Row) -> tuple[float, ...]:
    """Return the waits that are printed, in the order of their columns."""
    seen = row.seen
    honest, health = seen.honest, seen.health
    waits = (row.loop_gap_s, honest.token_gap_s, honest.first_token_s, health.latency_s)
    return (*waits, seen.noise_s)


def print_result(row: Row, idle: Row) -> None:
    """Print a row beside what was measured without an attack."""
    waits = [f"{a:.3f}/{b:.3f}" for a, b in zip(waits_of(row), waits_of(idle), strict=True)]
    grown = [f"{row.seen.growth_bytes[role] / MIB:.0f}" for role in ROLES]
    next_s = "none" if row.next_s is None else f"{row.next_s:.2f}"
    counts = sorted(row.attacked.outcomes.items(), key=lambda each: -each[1])
    outcomes = ", ".join(f"{count} x {outcome}" for outcome, count in counts)
    verdict = f"FAIL {'; '.join(row.failures)}" if row.failures else "PASS"
    cells = (row.name, f"{row.attacked.seconds:.1f}", *waits, *grown, next_s)
    print_row(cells, f"{verdict}: {outcomes}{'' if row.is_calm else ' (not calm before)'}")


# --- the run -------------------------------------------------------------------------------------


async def attack(name: str, address: tuple[str, int], seconds: float) -> Attacked:
    """Run an attack in a process of its own."""
    host, port = address
    limit_s = CUT_AFTER * ATTACKS[name].times * seconds + START_S
    command = [sys.executable, str(ATTACKER), name, host, str(port), str(seconds)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        output = b""
    if not output:
        return Attacked(limit_s, {ATTACKER_FAILED: 1}, 0, 0)
    return msgspec.json.decode(output, type=Attacked)


async def rest(seconds: float) -> Attacked:
    """Do nothing for a while."""
    await asyncio.sleep(seconds)
    return Attacked(seconds, {}, 0, 0)


async def measure(watch: Watch, app: DefaultApp, name: str, seconds: float) -> Row:
    """Run an attack, or none, and return what was seen until the server was itself again."""
    await watch.begin()
    if name == NOTHING:
        attacked = await rest(3 * seconds)
    else:
        attacked = await attack(name, app.address, seconds)
    next_s = await watch.recovery_s()
    row = Row(
        name=name,
        is_load=name != NOTHING and ATTACKS[name].is_load,
        attacked=attacked,
        seen=await watch.seen(),
        next_s=next_s,
    )
    row.failures = failures_of(row)
    return row


async def run_until_sick(
    app: DefaultApp, names: list[str], seconds: float, calm_s: float, rows: list[Row]
) -> None:
    """Run attacks in order, up to one behind which nothing is answered any more; add their rows."""
    async with Watch(app) as watch:
        await watch.settle()
        for name in names:
            is_calm = await watch.calm(calm_s)
            rows.append(await measure(watch, app, name, seconds))
            rows[-1].is_calm = is_calm
            print_result(rows[-1], rows[0])
            if rows[-1].next_s is None:
                return


def run(
    names: list[str],
    seconds: float,
    calm_s: float,
    arguments: tuple[str, ...],
    has_haproxy: bool,
    import_path: str = DEFAULT,
) -> Report:
    """Run attacks; one that the application does not survive is followed by a new application."""
    rows: list[Row] = []
    left = [NOTHING, *names]
    while left:
        with DefaultApp(arguments, has_haproxy=has_haproxy, import_path=import_path) as app:
            asyncio.run(run_until_sick(app, left, seconds, calm_s, rows))
        left = [NOTHING, *names][len(rows) :]
    is_told = rows[0].seen.loop_gap_s is not None
    return Report(
        machine=f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        arguments=list(arguments),
        has_haproxy=has_haproxy,
        seconds=seconds,
        loop_gap_from="/debug/ingress" if is_told else "/health",
        rows=rows,
    )


def chosen(only: str | None) -> list[str]:
    """Return the names of attacks in a list with commas, or all of them."""
    names = only.split(",") if only else list(ATTACKS)
    if unknown := set(names) - set(ATTACKS):
        raise SystemExit(f"--only: wanted some of {', '.join(ATTACKS)}, found {sorted(unknown)}")
    return names


def main() -> None:
    """Run the attacks that were asked for; exit with 1 if one of them did harm."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="names of attacks, with commas between")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each attack")
    parser.add_argument(
        "--calm-s", type=float, default=60.0, help="for what is left of the attack before"
    )
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    parser.add_argument(
        "--haproxy", action="store_true", help="behind HAProxy, not Ray's own proxy"
    )
    parser.add_argument(
        "--bare", action="store_true", help="an application that only reads and streams"
    )
    parser.add_argument("arguments", nargs="*", help="arguments of deploy")
    options = parser.parse_args()
    names = chosen(options.only)
    if options.bare:
        arguments, import_path = tuple(options.arguments), BARE
    else:
        arguments, import_path = ("debug=true", *options.arguments), DEFAULT
    print_head()
    report = run(names, options.seconds, options.calm_s, arguments, options.haproxy, import_path)
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    failed = [row.name for row in report.rows if row.failures]
    print(f"loop gap from {report.loop_gap_from}; {len(failed)} of {len(report.rows)} rows failed")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
