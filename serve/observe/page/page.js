// Reads `status` once a second while the page can be seen, shows it, and talks to the model.
// Whatever comes from outside becomes text, never markup.
"use strict";

const PERIOD_MS = 1000;
const KEPT = 120; // samples of a sparkline
const SIZES_S = 30; // seconds that agreed sizes are counted over
const MAX_EVENTS = 100;
const MAX_TURNS = 100; // of the conversation, which is sent whole with every message
const MAX_SIZES = 12; // lines that a pool's unused sizes may take
const LOST_AFTER_MS = 5000;
const WORDS = { restarting: "rebuilding" };

const $ = (id) => document.getElementById(id);

// A field of an answer. One that is missing is an error to be seen, not an empty place.
function read(object, name) {
  if (!(name in object)) throw new Error(`status: wanted a field ${name}, found none`);
  return object[name];
}

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Makes what stands in a place equal to `children`, node by node: what stays keeps its focus, its
// scroll position, its selection and its animation.
function fill(place, ...children) {
  const fresh = place.cloneNode(false);
  fresh.append(...children);
  morph(place, fresh);
}

function morph(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return void old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const name of old.getAttributeNames())
    if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) === value) continue;
    if (name === "style") old.style.cssText = value; // as an attribute the policy forbids it
    else old.setAttribute(name, value);
  }
  const children = [...fresh.childNodes];
  while (old.childNodes.length > children.length) old.lastChild.remove();
  children.forEach((child, i) => (i < old.childNodes.length ? morph(old.childNodes[i], child) : old.append(child)));
}

const count = (n) => Math.round(n).toLocaleString("en").replaceAll(",", "\u202f");
const rate = (n) => (n === null ? "\u2013" : n >= 100 ? count(n) : n.toFixed(1));
const clock = (date) => date.toLocaleTimeString("en-GB");
const percent = (share) => (share === null ? "\u2013" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}\u202f%`);
const seconds = (s) => (s < 100 ? `${Math.floor(s)} s` : `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`);
const ratio = (part, all) => (all > 0 ? part / all : null);

/* What was seen */

const history = []; // of figures: totals at a moment
const traces = new Map(); // of a sparkline: its last values
const lastRanks = new Map(); // by replica: its ranks before they ended
const lastStates = new Map(); // by replica
const lastWanted = new Map(); // by pool, of those that are scaled
let lastStatus = "";

function trace(name, value) {
  const values = traces.get(name) || [];
  values.push(value === null ? 0 : value);
  if (values.length > KEPT) values.shift();
  traces.set(name, values);
  return values;
}

function spark(values, top) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", `0 0 ${KEPT - 1} 28`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const first = KEPT - values.length;
  const points = values.map((value, i) => `${first + i},${(27 - (25 * value) / top).toFixed(2)}`);
  const area = document.createElementNS(space, "polygon");
  area.setAttribute("points", `${first},28 ${points.join(" ")} ${KEPT - 1},28`);
  const line = document.createElementNS(space, "polyline");
  line.setAttribute("points", points.join(" "));
  svg.append(area, line);
  return svg;
}

// Ray's reasons are long: the first sentence, and all that follows it.
function parted(text) {
  const words = text.replace(/dp=(\d+) tp=(\d+) epoch=(\d+)/g, "dp $1 tp $2 of epoch $3");
  const end = words.search(/\. (?=[A-Z(])/) + 1;
  return end ? [words.slice(0, end), words.slice(end + 1)] : [words, ""];
}

function note(text, isBad) {
  const line = make("span", isBad ? { class: "bad" } : {}, text);
  $("events").prepend(make("li", {}, make("time", {}, clock(new Date())), line));
  while ($("events").children.length > MAX_EVENTS) $("events").lastChild.remove();
}

/* Figures: what grew between two looks */

function total(figures, name) {
  let sum = 0;
  for (const engine of read(figures, "engines")) sum += read(engine, name);
  return sum;
}

// The totals of one engine, by names that are compared with an earlier moment's.
const nameOf = (engine) => `${read(engine, "pool")} ${read(engine, "replica")} ${read(engine, "dp_rank")}`;

function grown(now, then, choose) {
  const earlier = new Map(read(then, "engines").map((engine) => [nameOf(engine), engine]));
  let sum = 0;
  for (const engine of read(now, "engines")) {
    const before = earlier.get(nameOf(engine));
    // An engine that was not there yet would seem to have done all at once.
    if (before) sum += Math.max(0, choose(engine) - choose(before));
  }
  return sum;
}

function remember(figures) {
  const last = history[history.length - 1];
  // Another board; the next ingress's figures may only be a little older.
  if (last && read(figures, "at") < read(last, "at") - 10) history.length = 0;
  if (!history.length || read(figures, "at") > read(last, "at")) history.push(figures);
  while (history.length > KEPT) history.shift();
}

// The latest figures that are at least so many seconds old, or the oldest there are.
function before(figures, s) {
  const at = read(figures, "at") - s;
  let found = history[0];
  for (const each of history) if (read(each, "at") <= at) found = each;
  return found;
}

function allRanks(body) {
  const ranks = [];
  for (const pool of Object.values(read(body, "pools")))
    for (const replica of read(pool, "replicas")) ranks.push(...read(replica, "ranks"));
  return ranks;
}

function showFigures(body) {
  const leaders = allRanks(body).filter((rank) => read(rank, "tp_rank") === 0);
  const sum = (name) => leaders.reduce((all, rank) => all + read(rank, name), 0);
  const blocks = sum("num_blocks");
  const used = ratio(blocks - sum("num_free_blocks"), blocks);
  const figures = read(body, "figures");
  let tokens = null, prompt = null, steps = null, hits = null, padding = null, cached = null, drafts = null, restarts = 0, late = 0;
  if (figures) {
    remember(figures);
    const then = before(figures, 3);
    const passed = read(figures, "at") - read(then, "at");
    const ingress = read(figures, "ingress"), earlier = read(then, "ingress");
    const per = (n) => (passed > 0 ? Math.max(0, n) / passed : 0);
    tokens = per(read(ingress, "generation_tokens_total") - read(earlier, "generation_tokens_total"));
    prompt = per(read(ingress, "prompt_tokens_total") - read(earlier, "prompt_tokens_total"));
    const start = before(figures, SIZES_S);
    const allSteps = (engine) => Object.values(read(engine, "steps")).reduce((a, b) => a + b, 0);
    const eager = (engine) => read(engine, "steps").none || 0;
    steps = per(grown(figures, then, allSteps));
    const ran = grown(figures, start, allSteps);
    hits = ran ? 1 - grown(figures, start, eager) / ran : null;
    const padded = grown(figures, start, (engine) => read(engine, "padding_tokens_total"));
    const real = grown(figures, start, (engine) => read(engine, "scheduled_tokens_total"));
    padding = ratio(padded, padded + real);
    cached = ratio(total(figures, "prefix_cache_hits_total"), total(figures, "prefix_cache_queries_total"));
    drafts = ratio(total(figures, "spec_decode_num_accepted_tokens_total"), total(figures, "spec_decode_num_draft_tokens_total"));
    restarts = total(figures, "rank_restarts_total");
    late = total(figures, "late_compilations_total");
  }
  const running = sum("num_running"), waiting = sum("num_waiting");
  // Name, value, note, and of the curve: its value and what its full height stands for.
  const tiles = [
    ["Tokens per second", rate(tokens), `${rate(prompt)} of prompts`, tokens],
    ["Steps per second", rate(steps), drafts === null ? "of all engines" : `${percent(drafts)} of draft tokens right`, steps],
    ["Running", count(running), `${count(read(body, "num_live"))} of ${count(read(body, "max_live"))} places taken`, running],
    ["Waiting", count(waiting), `${count(sum("num_waiting_for_kv"))} for KV`, waiting],
    ["Graph hits", percent(hits), "of steps, last 30 s", hits, 1],
    ["Padding", percent(padding), "of tokens, last 30 s", padding, 1],
    ["KV in use", percent(used), cached === null ? `of ${count(blocks)} blocks` : `${percent(cached)} prefix hits`, used, 1],
    ["Group restarts", count(restarts), `${count(late)} late compilations`, restarts],
  ];
  fill($("figures"), ...tiles.map(([name, value, about, sample, top]) => {
    const values = trace(name, sample);
    return make("div", {}, make("dt", {}, name), make("dd", { class: "value" }, value),
      make("dd", { class: "note" }, about), make("dd", {}, spark(values, top || Math.max(...values, 1e-9))));
  }));
}

function showSizes(body) {
  const figures = read(body, "figures");
  if (!figures) return;
  const start = before(figures, SIZES_S);
  const pools = Object.keys(read(body, "pools"));
  fill($("sizes"), ...pools.map((pool) => {
    const own = (all) => ({ engines: read(all, "engines").filter((engine) => read(engine, "pool") === pool) });
    const now = own(figures), then = own(start);
    const sizes = new Set();
    for (const engine of read(now, "engines")) for (const size of Object.keys(read(engine, "replays"))) sizes.add(size);
    const rows = [...sizes].sort((a, b) => a - b).map((size) => {
      const [times, padding] = ["replays", "replay_padding"].map((name) =>
        grown(now, then, (engine) => read(engine, name)[size] || 0));
      return [size, times, times && `${percent(ratio(padding, times * size))} pad`];
    });
    rows.push(["eager", grown(now, then, (engine) => read(engine, "steps").none || 0), 0]);
    const all = rows.reduce((sum, [, n]) => sum + n, 0);
    // A size that was used once keeps its line, so that lines do not jump.
    const shown = rows.filter(([, n]) => n > 0 || rows.length <= MAX_SIZES).map(([size, n, padded]) =>
      make("div", { class: n ? "size" : "size unused" },
        make("span", {}, size), bar(all ? n / all : 0), make("span", {}, percent(ratio(n, all))),
        make("span", {}, padded || "")));
    return make("div", { class: "sheet" }, make("h3", {}, pool), ...shown);
  }));
}

function bar(share, kind = "bar") {
  const inner = make("i");
  inner.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return make("span", { class: kind, "aria-hidden": "true" }, inner);
}

/* What is there */

function progress(tag, what, entry) {
  const total = read(entry, "total"), done = read(entry, "done"), left = read(entry, "remaining_s");
  const isUnknown = total <= 1 && done < total;
  const counts = total > 1 ? ` ${done} of ${total}` : "";
  const time = seconds(read(entry, "elapsed_s")) + (left >= 1 ? `, about ${seconds(left)} to go` : "");
  return make(tag, { class: "progress" }, make("span", { class: "what" }, what + counts),
    bar(isUnknown ? 0.3 : done / Math.max(1, total), isUnknown ? "bar unknown" : "bar"),
    make("span", { class: "time" }, time));
}

// What a replica loads stands in its place; here is what belongs to none.
function showLoading(body) {
  const entries = read(body, "loading").filter((entry) => read(entry, "replica") === null);
  $("loading").hidden = !entries.length;
  fill($("loading"), ...entries.map((entry) => progress("li", read(entry, "what"), entry)));
}

const COLUMNS = ["rank", "state", "step", "running", "waiting", "KV", "handoffs", "epoch", "pid"];
const columnOf = (i) => COLUMNS[i].toLowerCase();
const narrow = matchMedia("(max-width: 36rem)"); // the style sheet leaves out the last three columns

function rankRow(rank, gone = "") {
  const blocks = read(rank, "num_blocks");
  const isLeader = read(rank, "tp_rank") === 0;
  const used = blocks ? 1 - read(rank, "num_free_blocks") / blocks : 0;
  const leads = (value) => (isLeader && !gone ? value : "\u2013");
  const cells = [
    `dp ${read(rank, "dp_rank")} tp ${read(rank, "tp_rank")}`,
    make("span", { class: "state", "data-state": gone || read(rank, "state") }, gone || read(rank, "state")),
    count(read(rank, "step")),
    leads(count(read(rank, "num_running"))),
    leads(count(read(rank, "num_waiting"))),
    blocks && isLeader && !gone ? [bar(used, "meter"), percent(used)] : "\u2013",
    leads(count(read(rank, "num_handoffs"))),
    String(read(rank, "epoch")),
    String(read(rank, "pid")),
  ];
  return make("tr", gone ? { class: "gone" } : {}, ...cells.map((cell, i) =>
    make("td", { class: columnOf(i) }, ...(Array.isArray(cell) ? cell : [cell]))));
}

// A rank's line, and below it what the rank loads, compiles or captures.
function rankRows(rank, loading) {
  const rows = [rankRow(rank)];
  for (const entry of loading) {
    if (read(entry, "dp_rank") !== read(rank, "dp_rank") || read(entry, "tp_rank") !== read(rank, "tp_rank")) continue;
    const cell = make("td", { colspan: COLUMNS.length - (narrow.matches ? 3 : 0) }, progress("div", doingOf(entry), entry));
    rows.push(make("tr", { class: "doing" }, cell));
  }
  return rows;
}

const doingOf = (entry) => read(entry, "what").replace(`${read(entry, "pool")}: `, "");
const placeOf = (rank) => `dp ${read(rank, "dp_rank")} tp ${read(rank, "tp_rank")}`;

function failure(first, rest) {
  return rest ? make("details", { class: "error" }, make("summary", {}, first), rest) : make("p", { class: "error" }, first);
}

function showReplica(pool, replica, loading) {
  const id = read(replica, "id"), state = read(replica, "state"), ranks = read(replica, "ranks");
  const known = lastRanks.get(id) || [];
  const there = new Set(ranks.map(placeOf));
  const gone = state === "ready" ? [] : known.filter((rank) => !there.has(placeOf(rank)));
  if (state === "ready") lastRanks.set(id, ranks);
  const word = WORDS[state] || state;
  let [reason, more] = parted(replica.error || "");
  const dead = known.find((rank) => reason.includes(`${placeOf(rank)} of epoch ${read(rank, "epoch")} `));
  if (dead) reason = reason.replace(" ended", ` (pid ${read(dead, "pid")}) ended`);
  const before = lastStates.get(id);
  if (before && before.state !== state) {
    const isBack = state === "ready";
    const took = isBack && before.state !== "loading" ? ` again after ${seconds(before.for_s)}` : "";
    note(`${pool} ${word}${took}${reason && `: ${reason}`}`, !isBack);
  }
  lastStates.set(id, { state, for_s: read(replica, "in_state_s") });
  const since = state === "ready" ? "" : ` for ${seconds(read(replica, "in_state_s"))}`;
  const box = make("div", { class: "sheet replica" }, make("h3", {}, pool,
    make("span", { class: "state", "data-state": state }, word + since), make("span", { class: "id" }, `replica ${id}`)));
  if (reason) box.append(failure(reason, more));
  const rows = [
    ...gone.map((rank) => rankRow(rank, rank === dead ? "gone" : "ended with it")),
    ...ranks.flatMap((rank) => rankRows(rank, loading)),
  ];
  for (const rank of ranks)
    if (read(rank, "compile_error")) box.append(failure(...parted(`${placeOf(rank)}: ${read(rank, "compile_error")}`)));
  if (rows.length) box.append(make("div", { class: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, ...COLUMNS.map((name, i) => make("th", { class: columnOf(i), scope: "col" }, name)))),
    make("tbody", {}, ...rows))));
  const ofAll = loading.filter((entry) => read(entry, "dp_rank") === null);
  box.append(...ofAll.map((entry) => progress("div", doingOf(entry), entry)));
  return box;
}

function showScaling(pool, scaling) {
  const wanted = read(scaling, "wanted"), before = lastWanted.get(pool);
  if (before !== undefined && before !== wanted)
    note(`${pool}: ${before} to ${wanted} replicas (${read(scaling, "why")})`, false);
  lastWanted.set(pool, wanted);
  const why = Object.entries({ ...read(scaling, "load"), ...read(scaling, "signals") });
  const bounds = `${read(scaling, "least")} to ${read(scaling, "most")}`;
  return make("details", { class: "sheet replica" },
    make("summary", {}, `${pool}: scaled to ${wanted} of ${bounds} replicas`),
    make("p", {}, why.map(([name, value]) => `${name} ${+value.toPrecision(3)}`).join(", ")));
}

// Why engines of a pool were chosen for the sequences that have ended.
function showChoices(pool, reasons) {
  const why = Object.entries(reasons).sort((a, b) => b[1] - a[1]).map(([reason, n]) => `${reason} ${count(n)}`);
  return make("p", { class: "choices" }, `${pool}, chosen for: ${why.join(", ")}`);
}

function showPools(body) {
  const boxes = [], ids = new Set();
  for (const [pool, found] of Object.entries(read(body, "pools"))) {
    for (const replica of read(found, "replicas")) {
      const id = read(replica, "id");
      const own = read(body, "loading").filter((entry) => read(entry, "replica") === id);
      boxes.push(showReplica(pool, replica, own));
      ids.add(id);
    }
    if (found.scaling) boxes.push(showScaling(pool, found.scaling));
    const reasons = body.figures && read(body.figures, "choices")[pool];
    if (reasons) boxes.push(showChoices(pool, reasons));
    if (!read(found, "replicas").length)
      boxes.push(make("div", { class: "sheet replica" }, make("h3", {}, pool), make("p", { class: "none" }, "no replica yet")));
  }
  if (!boxes.length) boxes.push(make("p", { class: "none" }, "none yet"));
  for (const id of [...lastStates.keys()]) {
    if (ids.has(id)) continue;
    note(`replica ${id} is gone`, true);
    lastStates.delete(id);
    lastRanks.delete(id);
  }
  fill($("pools"), ...boxes);
}

// The state in a word or two, which the tab shows as well.
function showState(state, text = state) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").dataset.state = state;
  document.title = `${text} \u00b7 Lockstep`;
}

function stateOf(body) {
  const status = read(body, "status");
  if (status === "ready") return [status, read(body, "compiling") ? "ready, compiling" : status];
  for (const [pool, found] of Object.entries(read(body, "pools")))
    for (const replica of read(found, "replicas")) {
      const state = read(replica, "state");
      if (state !== "ready" && state !== "loading") return [state, `${pool} ${WORDS[state] || state}`];
    }
  return [status, status];
}

let model = "";

function show(body) {
  model = read(body, "model");
  $("model").textContent = model;
  showState(...stateOf(body));
  const status = read(body, "status");
  if (status !== lastStatus) note(`application is ${status}`, false);
  lastStatus = status;
  if (read(body, "needs_key")) $("key-row").hidden = false;
  showLoading(body);
  showFigures(body);
  showPools(body);
  showSizes(body);
}

let answeredAt = Date.now(), isLost = false;

// What is shown is old: it is dimmed, and said since when.
function lose(why) {
  const silent_s = (Date.now() - answeredAt) / 1000;
  showState("unreachable", `${why} for ${seconds(silent_s)}`);
  if (isLost) return;
  isLost = true;
  note(`${why}: what is shown is of ${clock(new Date(answeredAt))}`, true);
  $("main").classList.add("old");
}

function find() {
  answeredAt = Date.now();
  if (!isLost) return;
  isLost = false;
  note("answers again", false);
  $("main").classList.remove("old");
}

async function look() {
  let body;
  try {
    const answer = await fetch("status", { cache: "no-store", headers: authorization() });
    if (answer.status === 401) {
      $("key-row").hidden = false;
      showState("degraded", "needs a key");
      return;
    }
    if (!answer.ok) return lose(`status ${answer.status}`);
    body = await answer.json();
  } catch {
    if (Date.now() - answeredAt > LOST_AFTER_MS) lose("no answer");
    return;
  }
  find();
  try {
    show(body);
  } catch (error) {
    showState("unreachable", String(error.message));
  }
}

// One look after another: a slow server is not asked again before it has answered.
let timer = 0, isLooking = false;

async function follow() {
  clearTimeout(timer);
  if (document.hidden || isLooking) return;
  isLooking = true;
  await look();
  isLooking = false;
  if (!document.hidden) timer = setTimeout(follow, PERIOD_MS);
}

document.addEventListener("visibilitychange", follow);

/* Chat */

const turns = [];
let running = null; // the AbortController of the answer that comes

function authorization() {
  const key = $("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function say(who, text, kind = "") {
  const words = make("span", {}, text);
  $("talk").append(make("p", kind ? { class: kind } : {}, make("span", { class: "who" }, who), words));
  $("talk").scrollTop = $("talk").scrollHeight;
  return words;
}

// Yields the data of server-sent events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

async function ask(question) {
  turns.push({ role: "user", content: question });
  while (turns.length > MAX_TURNS) turns.shift();
  say("You", question);
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("talk").setAttribute("aria-busy", "true");
  const began = performance.now();
  let words = null, text = "", tokens = 0, first = 0;
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...authorization() },
      body: JSON.stringify({ model, messages: turns, stream: true, stream_options: { include_usage: true } }),
      signal: running.signal,
    });
    if (!answer.ok) throw new Error(await refusal(answer));
    words = say(model, "");
    for await (const data of events(answer.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const piece = chunk.choices[0]?.delta?.content || "";
      if (piece && !first) first = performance.now();
      const isAtEnd = $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 40;
      words.append(piece);
      text += piece;
      if (isAtEnd) $("talk").scrollTop = $("talk").scrollHeight;
      if (chunk.usage) tokens = chunk.usage.completion_tokens;
    }
    const took = (performance.now() - (first || began)) / 1000;
    const pace = tokens > 1 && took > 0 ? `, ${rate((tokens - 1) / took)} a second` : "";
    $("pace").textContent = `first token ${((first || began) - began).toFixed(0)} ms, ${tokens} tokens${pace}`;
  } catch (error) {
    if (error.name === "AbortError") $("pace").textContent = "stopped";
    else say("Refused", String(error.message), "refused");
  }
  if (text) turns.push({ role: "assistant", content: text });
  else turns.pop();
  running = null;
  $("send").disabled = false;
  $("stop").disabled = true;
  $("talk").removeAttribute("aria-busy");
  $("question").focus();
}

async function refusal(answer) {
  if (answer.status === 401) {
    $("key-row").hidden = false;
    $("key").focus();
  }
  try {
    return (await answer.json()).error.message;
  } catch {
    return `wanted an answer, found status ${answer.status}`;
  }
}

$("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || running) return;
  $("question").value = "";
  ask(question);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("chat").requestSubmit();
});
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", () => {
  if (running) running.abort();
  turns.length = 0;
  $("talk").replaceChildren();
  $("pace").textContent = "";
});

follow();
