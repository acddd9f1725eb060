"""The metrics of a served application: what Prometheus reads is what happened, and never falls."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_metrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from cluster.observe.metrics import METRICS, PREFIX

pytestmark = [pytest.mark.ray, pytest.mark.feature("R15")]

ROOT = Path(__file__).resolve().parents[3]

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def families(app: Any) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(app.metrics()[0])}


def total(series: Series, name: str, **labels: str) -> float:
    """Return the sum of a name's series with these labels."""
    return sum(
        value
        for (found, own), value in series.items()
        if found == PREFIX + name and set(labels.items()) <= set(own)
    )


def growth(before: Series, after: Series) -> Callable[..., float]:
    """Return by how much each name's series with some labels have grown."""
    return lambda name, **labels: total(after, name, **labels) - total(before, name, **labels)


def assert_no_fall(before: Series, after: Series) -> None:
    fallen = {
        key: (value, after.get(key)) for key, value in before.items() if after.get(key, -1) < value
    }
    assert not fallen


def ask(client: openai.OpenAI, question: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    return client.chat.completions.create(model="lockstep-tiny", messages=messages, **fields)


def test_sums_of_histograms_are_what_the_client_saw(server: Any, client: openai.OpenAI) -> None:
    before = server.totals()
    began = time.monotonic()
    answers = [
        ask(client, f"Count from {i} to 20.", max_tokens=24 + i, n=1 + i % 2, temperature=0)
        for i in range(4)
    ]
    stream = ask(client, "What is 12 + 30?", stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    took_s = time.monotonic() - began
    usages = [*(answer.usage for answer in answers), chunks[-1].usage]
    reasons = [choice.finish_reason for answer in answers for choice in answer.choices]
    reasons += [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    after = server.totals()
    assert_no_fall(before, after)
    grown = growth(before, after)
    completion = sum(usage.completion_tokens for usage in usages)
    prompt = sum(usage.prompt_tokens for usage in usages)
    cached = sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert grown("generation_tokens_total") == completion
    assert grown("request_generation_tokens_sum") == completion
    assert grown("request_generation_tokens_count") == len(reasons) == 7
    assert grown("prompt_tokens_total") == grown("request_prompt_tokens_sum") == prompt
    assert grown("prompt_tokens_cached_total") == cached
    assert grown("request_prompt_tokens_count") == len(usages)
    assert grown("request_params_n_sum") == 1 + 2 + 1 + 2 + 1
    assert grown("request_params_max_tokens_sum") == sum(24 + i for i in range(4))
    for reason in ("stop", "length", "abort", "error"):
        found = grown("request_success_total", finished_reason=reason)
        assert found == reasons.count(reason), reason
    assert grown("time_to_first_token_seconds_count") == len(reasons)
    gaps = completion - len(reasons)
    assert grown("inter_token_latency_seconds_count") == gaps
    assert grown("time_per_output_token_seconds_count") == gaps
    assert 0 < grown("e2e_request_latency_seconds_sum") < 2 * took_s
    parts = [grown(f"request_{part}_time_seconds_sum") for part in ("prefill", "decode")]
    assert grown("request_inference_time_seconds_sum") == pytest.approx(sum(parts))
    queued_s = grown("request_queue_time_seconds_sum")
    assert 0 < queued_s + sum(parts) < grown("e2e_request_latency_seconds_sum")
    assert grown("request_kv_wait_time_seconds_count") > 0
    assert grown("http_responses_total", path="/v1/chat/completions", code="200") == 5


def test_what_ranks_count_is_what_they_did(server: Any, client: openai.OpenAI) -> None:
    before = settled(server)
    answer = ask(client, "Count from 3 to 19.", max_tokens=40, temperature=0)
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens
    decoded: int = usage.completion_tokens - 1
    computed: int = usage.prompt_tokens - cached

    def have_told(now: Series) -> bool:
        grown = growth(before, now)
        is_prefilled = grown("prompt_tokens_computed_total") >= computed
        return is_prefilled and grown("steps_total", engine="decode-0-0") >= decoded

    grown = growth(before, settled(server, have_told))
    assert grown("prompt_tokens_computed_total", engine="prefill-0-0") == computed
    assert grown("prompt_tokens_computed_total") == computed  # none by a decode rank
    assert grown("steps_total", engine="decode-0-0", kind="decode") >= decoded
    assert grown("scheduled_tokens_total", engine="decode-0-0") >= decoded
    # The decode pool of the bundled model replays a graph for each of its steps.
    assert grown("graph_replays_total", engine="decode-0-0", mode="full") >= decoded
    assert grown("steps_total", engine="decode-0-0", mode="full") == grown(
        "graph_replays_total", engine="decode-0-0", mode="full"
    )
    assert grown("graph_padding_tokens_total", engine="decode-0-0", mode="full") == grown(
        "padding_tokens_total", engine="decode-0-0"
    )
    assert grown("iteration_tokens_total_sum", engine="decode-0-0") == grown(
        "scheduled_tokens_total", engine="decode-0-0"
    )
    sent = grown("kv_transfer_sent_bytes_total", engine="prefill-0-0")
    assert sent == grown("kv_transfer_received_bytes_total", engine="decode-0-0") > 0
    assert grown("kv_transfers_total") == 1 and grown("kv_transfer_seconds_total") > 0
    assert grown("kv_transfer_failures_total") == 0
    assert grown("prefix_cache_queries_total", engine="prefill-0-0") >= usage.prompt_tokens - 16


def settled(server: Any, have_told: Callable[[Series], bool] = lambda series: True) -> Series:
    """Return the series once nothing runs and two reports in a row have told the same steps.

    Reports are late where the machine is busy: `have_told` says that what is waited for is there.
    """
    last: Series = {}

    def settled_totals() -> Series | None:
        nonlocal last
        before, last = last, server.totals()
        running = families(server)["lockstep:num_requests_running"].samples
        is_idle = before and not any(sample.value for sample in running)
        is_same = total(before, "steps_total") == total(last, "steps_total")
        return last if is_idle and is_same and have_told(last) else None

    # Ranks are asked four times a second.
    found: Series = server.wait_until(settled_totals, lambda: "ranks count on", 60, 1.5)
    return found


def test_scrapes_while_requests_run_are_well_formed_in_both_formats(
    server: Any, client: openai.OpenAI
) -> None:
    is_seen = threading.Event()
    deadline = time.monotonic() + 600

    def work() -> None:
        i = 0
        while i < 3 or not (is_seen.is_set() or time.monotonic() > deadline):
            ask(client, f"Count from {i % 20} to 30.", max_tokens=100, temperature=0)
            i += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    seen: Series = {}
    running = 0.0
    while any(thread.is_alive() for thread in threads):
        plain, kind = server.metrics()
        assert kind.startswith("text/plain; version=0.0.4")
        found = {f.name: f for f in text_string_to_metric_families(plain)}
        running = max(running, *(s.value for s in found["lockstep:num_requests_running"].samples))
        if running:
            is_seen.set()
        text, kind = server.metrics(OPEN_METRICS)
        assert kind.startswith("application/openmetrics-text; version=1.0.0")
        assert {f.name for f in open_metrics_families(text)} == set(found)
        now = server.totals()
        assert_no_fall(seen, now)
        seen = now
    for thread in threads:
        thread.join()
    assert running > 0
    named = {
        (PREFIX + metric.name).removesuffix("_total")
        for metric in METRICS
        if metric.kind == "counter"
    }
    named |= {PREFIX + metric.name for metric in METRICS if metric.kind != "counter"}
    assert set(families(server)) == named
    for family in families(server).values():
        for sample in family.samples:
            assert sample.labels["model_name"] == "lockstep-tiny" and sample.labels["engine"]
    info = families(server)["lockstep:cache_config_info"].samples
    assert {s.labels["engine"] for s in info} == {"prefill-0-0", "decode-0-0"}
    assert all(s.labels["block_size"] == "16" and int(s.labels["num_gpu_blocks"]) for s in info)


@pytest.mark.slow
def test_no_total_falls_when_a_rank_is_killed_or_the_ingress_is_replaced(
    start_app: Callable[..., Any],
) -> None:
    import ray

    options = ["pools=mixed", "dtype=float32", "O=0", "max_num_seqs=8", "kv_memory=64MiB"]
    app = start_app("totals", *options)
    with app.client() as api:
        usage = ask(api, "Count from 3 to 19.", max_tokens=40, temperature=0).usage
        before = settled(app, lambda now: total(now, "steps_total") >= usage.completion_tokens)
        assert total(before, "generation_tokens_total") == usage.completion_tokens
        steps = total(before, "steps_total")
        assert steps >= usage.completion_tokens

        [rank] = app.ranks("mixed")
        os.kill(rank["pid"], signal.SIGKILL)
        app.wait_until(lambda: [r["epoch"] for r in app.ranks("mixed")] == [1])
        app.wait_until_ready()
        after = settled(app)
        assert_no_fall(before, after)
        assert total(after, "rank_restarts_total", rank="dp=0 tp=0") == 1
        ask(api, "Count from 3 to 19.", max_tokens=40, temperature=0)
        again = settled(app, lambda now: total(now, "steps_total") >= 2 * steps - 1)
        # The new process counts from zero; its steps are added to those of the dead one.
        assert total(again, "steps_total") >= 2 * steps - 1

        [ingress] = [
            each
            for each in ray.util.list_named_actors(all_namespaces=True)
            if each["namespace"] == "serve" and "totals#Ingress" in each["name"]
        ]
        ray.kill(ray.get_actor(ingress["name"], namespace="serve"))
        app.wait_until(lambda: is_gone(ingress["name"]) and app.get("/ready")[0] == 200)
        app.wait_until_ready()
        app.wait_until(lambda: total(app.totals(), "steps_total") > 0)
        last = app.totals()
        assert_no_fall(again, last)
        ask(api, "Count from 3 to 19.", max_tokens=40, temperature=0)
        grown = total(app.totals(), "generation_tokens_total")
        assert grown == total(again, "generation_tokens_total") + usage.completion_tokens


UNTIL_IT_HAPPENS = {
    *("rank_restarts_total", "compile_cache_misses_total"),
    *("replicas_wanted", "scale_decisions_total"),
}
"""Metrics without a series until what they count has happened."""


def test_every_query_of_the_dashboard_selects_series_after_traffic(
    server: Any, client: openai.OpenAI
) -> None:
    """Each selector of each query finds a series, and what it is summed by is a label of it."""
    for _ in range(2):  # the second one finds the first one's prefix
        ask(client, "What is 1 + 2?", max_tokens=4)
    series = settled(server) | {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families(server).values()
        for sample in family.samples
    }
    dashboard = json.loads((ROOT / "examples" / "dashboards" / "lockstep.json").read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    queries += [
        each["query"]["query"]
        for each in dashboard["templating"]["list"]
        if each["type"] == "query"
    ]
    assert len(queries) > 30
    missing: set[str] = set()
    for query in queries:
        query = query.replace("$model_name", "lockstep-tiny")
        selectors = re.findall(r"([a-zA-Z_]\w*:\w+)(?:\{([^}]*)\})?", query)
        assert selectors, query
        for name, matchers in selectors:
            wanted = set(re.findall(r'(\w+)="([^"]*)"', matchers))
            assert len(wanted) == matchers.count("="), query  # no other kinds of matchers
            found = [dict(own) for each, own in series if each == name and wanted <= set(own)]
            missing |= set() if found else {name}
            for by in re.findall(r"by \(([^)]*)\)", query):
                labels = {label.strip() for label in by.split(",")}
                assert all(labels <= each.keys() for each in found), (query, by)
    assert missing <= {PREFIX + name for name in UNTIL_IT_HAPPENS}


def test_ray_exports_the_same_figures(server: Any, client: openai.OpenAI, ray_cluster: Any) -> None:
    ask(client, "What is 1 + 2?", max_tokens=4)
    import ray

    [node] = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    def told() -> bool:
        with urllib.request.urlopen(url, timeout=120) as answer:
            text = answer.read().decode()
        series = {
            (s.name, s.labels.get("le")): s.value
            for f in text_string_to_metric_families(text)
            for s in f.samples
            if s.labels.get("model_name") == "lockstep-tiny" and s.labels.get("engine") == "ingress"
        }
        prefix = "ray_lockstep_"
        generated = series.get((f"{prefix}generation_tokens_total", None), 0)
        count = series.get((f"{prefix}request_generation_tokens_count", None), 0)
        bucket = series.get((f"{prefix}request_generation_tokens_bucket", "+Inf"), -1)
        return generated > 0 and count == bucket

    server.wait_until(told)


def is_gone(name: str) -> bool:
    import ray

    actors = ray.util.list_named_actors(all_namespaces=True)
    return name not in [each["name"] for each in actors]
