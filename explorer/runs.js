"use strict";
// What is known of the recorded runs: no drawing here. explorer/page.py says what the data hold, and
// explorer/recorder.py what a run of slots is. `now` is a moment, as momentOf returns it.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SUMS = ["slots", "useful", "recomputed", "pad_slots", "finished_slots", "padded_keys",
              "score_entries", "useful_scores", "copied_bytes", "ms"];
const RUNS = new Map(), GPU = new Map();   // as measured; and with the times of a calculated GPU
for (const run of DATA.runs) {
  const {gpu, requests} = run;
  if (gpu) {
    GPU.set(run.name, prepare({...run, place: DATA.clock, passes: {...run.passes, ...gpu.passes},
                               requests: requests.map((request, r) => ({...request, ...gpu.requests[r]}))}));
  }
  RUNS.set(run.name, prepare({...run, gpu: null}));
}

// Adds what is looked up often: the passes of each step, running totals, each request's events.
function prepare(run) {
  const p = run.passes, requests = run.requests;
  p.slots = p.shape.map(shape => shape.reduce((a, b) => a * b));
  p.begin = [];                          // of each pass; p.start is that of its step
  run.steps = [];                        // {step, passes: [...], start, end}: only those with a pass
  for (const i of p.step.keys()) {
    if (run.steps.at(-1)?.step !== p.step[i]) {
      run.steps.push({step: p.step[i], passes: [], start: p.start[i]});
    }
    const {passes} = run.steps.at(-1);
    p.begin.push(passes.length ? p.begin[i - 1] + p.ms[i - 1] : p.start[i]);
    passes.push(i);
  }
  for (const request of requests) {
    if (typeof request.prompt === "number") {
      request.prompt = DATA.texts[request.prompt];
      request.generated = DATA.texts[request.generated];
    }
    request.tokens = [...request.prompt, ...request.generated];
    request.work = [];                   // [pass, first, n, tokens reached before, step]
    request.rooms = [];                  // [pass, capacity, or block table, or null]
    request.resets = [];                 // [pass, tokens in the cache]
  }
  for (const i of p.step.keys()) {
    for (const [r, first, n] of threes(p.work[i])) {
      const work = requests[r].work, [, from, count, reached] = work.at(-1) ?? [0, 0, 0, 0];
      work.push([i, first, n, Math.max(reached, from + count), p.step[i]]);
    }
    for (const [r, room] of Object.entries(p.room[i] ?? {})) requests[r].rooms.push([i, room]);
    for (const [r, n] of Object.entries(p.computed[i] ?? {})) requests[r].resets.push([i, n]);
  }
  run.kept = Object.entries(p.kept).map(([i, pages]) => [Number(i), pages]);
  run.stepOf = new Map(run.steps.map(step => [step.step, step]));
  const lastToken = Math.max(0, ...requests.map(request => request.ms.at(-1) ?? 0));
  run.steps.forEach((step, k) => step.end = run.steps[k + 1]?.start ?? Math.max(step.start, lastToken));
  run.totals = {};                       // name -> its sums over the passes 0..i
  for (const name of SUMS) {
    let total = 0;
    run.totals[name] = p.step.map((_, i) => total += p[name] ? p[name][i] : 0);   // 0: all are 0
  }
  run.gaps = requests.flatMap(({ms, steps}) => steps.slice(1).map((step, i) => [step, ms[i + 1] - ms[i]]));
  run.gaps.sort(([a], [b]) => a - b);    // [step, time between two tokens, their sum and maximum so far]
  let sum = 0, most = 0;
  for (const gap of run.gaps) gap.push(sum += gap[1], most = Math.max(most, gap[1]));
  run.mostTokens = Math.max(...run.steps.map(step => step.passes.reduce(
    (total, i) => total + threes(p.work[i]).reduce((sum, [, , n]) => sum + n, 0), 0)));
  return run;
}

// A run of "Try it", which explorer/build.py has made compact: prepared, but without tensors.
function expanded({requests, arrived, passes: entries, ms}, name) {
  const all = RUNS.get("unbatched").requests, indexOf = new Map(requests.map((r, i) => [r, i]));
  const p = {step: [], start: [], ms, shape: [], work: [], pad_slots: [], finished_slots: [], finished: {},
             recomputed: 0, room: {}, computed: {}, kept: {}, columns: {}, rows: {}};
  const list = requests.map((r, i) => ({...all[r], arrived: arrived[i], steps: [], ms: []}));
  let now = 0;
  for (const [times, from, shape, work, finished = []] of entries) {
    for (let k = 0; k < times; k++) {
      const i = p.step.push(from + k) - 1, same = i && p.step[i - 1] === from + k;
      const parts = threes(work).map(([r, first, n]) => [indexOf.get(r), first + k * n, n]);
      const tokens = parts.reduce((sum, [, , n]) => sum + n, 0);
      p.start.push(same ? p.start[i - 1] : now);
      p.shape.push(shape);
      p.work.push(parts.flat());
      p.finished_slots.push(finished.length);
      p.pad_slots.push(shape.reduce((a, b) => a * b) - tokens - finished.length);
      if (finished.length) p.finished[i] = finished.map(r => indexOf.get(r));
      now += ms[i];
      for (const [r, first, n] of parts) {   // a token, where all known ones are computed
        if (first + n !== list[r].prompt.length + list[r].ms.length) continue;
        list[r].steps.push(from + k);
        list[r].ms.push(now);
      }
    }
  }
  return prepare({name, knobs: {}, place: DATA.clock, requests: list, passes: p, pool: null});
}

function threes(values) {                // [a, b, c, d, e, f] -> [[a, b, c], [d, e, f]]
  return Array.from({length: values.length / 3}, (_, i) => values.slice(3 * i, 3 * i + 3));
}

function atMost(sorted, value, key = x => x) {   // how many of them are <= value
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(sorted[middle]) <= value) low = middle + 1; else high = middle;
  }
  return low;
}

function last(events, pass) {            // the last of [pass, ...] at or before a pass
  return events[atMost(events, pass, event => event[0]) - 1];
}

const inStep = (run, name, step) => step.passes.reduce(
  (total, i) => total + (run.passes[name] ? run.passes[name][i] : 0), 0);

// --- text -----------------------------------------------------------------------------------------

function textOf(tokens) {
  if (!DATA.vocabulary) return `(${tokens.length} tokens)`;
  const bytes = tokens.map(id => DATA.vocabulary[id]).flatMap(   // a character may need several tokens
    piece => typeof piece === "string" ? [...new TextEncoder().encode(piece)] : piece);
  return new TextDecoder().decode(Uint8Array.from(bytes));
}

function word(run, owner, position, what = "token") {   // a token, in a word
  const {name, tokens} = run.requests[owner];
  if (what === "position") return String(position);
  if (!DATA.vocabulary) return name + position;
  const piece = DATA.vocabulary[tokens[position]];
  if (typeof piece !== "string") return piece.map(byte => byte.toString(16)).join(" ");
  return piece.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ /, "␣");
}

// --- a moment -------------------------------------------------------------------------------------

// The state of a run at a value of the clock, "step" or "ms": `passes` run then, `pass` is the last
// one so far, `step` its step, `over` says that nothing follows.
function momentOf(run, clock, value) {
  const byStep = clock === "step";
  const k = byStep ? atMost(run.steps, value, step => step.step) - 1
    : Math.min(atMost(run.steps, value - 1e-6, step => step.end), run.steps.length - 1);
  const step = run.steps[k], busy = step && (byStep ? step.step === value : value <= step.end + 1e-6);
  return {k, step: byStep ? value : step.step, passes: busy ? step.passes : [],
          pass: step ? step.passes.at(-1) : -1, over: !busy && k === run.steps.length - 1};
}

// {kind, words, tokens, computed, holds, active} of a request: tokens generated so far, tokens in its
// cache, and what it holds: a capacity, a block table, or null.
function stateOf(run, request, now) {
  const work = last(request.work, now.pass), reset = last(request.resets, now.pass);
  const holds = last(request.rooms, now.pass)?.[1] ?? null;
  const end = work ? work[1] + work[2] : 0, tokens = atMost(request.steps, now.step);
  const computed = reset && (!work || reset[0] > work[0]) ? reset[1] : end;
  const active = Boolean(work) && now.passes.includes(work[0]), prompt = request.prompt.length;
  const over = request.reason && tokens === request.generated.length && work === request.work.at(-1);
  const [kind, words] = request.arrival > now.step ? ["absent", `– arrives at step ${request.arrival}`]
    : over ? ["done", `■ done (${request.reason})`]
    : !work ? ["waiting", "○ waiting"]
    : run.pool && !active && holds === null ? ["preempted", "↺ preempted"]
    : active && work[1] < work[3] ? ["recomputed", `↻ computed again, ${Math.min(end, work[3])} of ${work[3]}`]
    : work[1] >= prompt ? ["decode", "● decoding"]
    : ["prefill", `◐ prefilling ${Math.min(computed, prompt)}/${prompt}`];
  return {kind, words, tokens, computed, holds, active};
}

// --- slots and what they see ----------------------------------------------------------------------

// The tokens of a request in a pass: [[kind, how many], ...].
function partsOf({prompt}, [, first, n, reached]) {
  const again = Math.max(0, Math.min(reached, first + n) - first);
  const prefill = Math.max(0, Math.min(prompt.length, first + n) - first - again);
  return [["recomputed", again], ["prefill", prefill], ["decode", n - again - prefill]];
}

function kindOf(run, pass, owner, position) {
  if (owner < 0) return owner === -1 ? "pad" : "finished";
  if (position < last(run.requests[owner].work, pass)[3]) return "recomputed";
  return position < run.requests[owner].prompt.length ? "prefill" : "decode";
}

// {owner, position, ranges, pads, blanks, shift, kind} of a slot, or null. ranges: the keys that it
// sees, [[request, from, to], ...]; null if that was not measured.
function slotAt(run, pass, row, column) {
  let start = 0;
  for (const slots of run.passes.rows[pass]?.[row] ?? []) {
    const [owner, first, n, sees = null, grows = 1, pads = 0, blanks = 0, shift = 0] = slots;
    const k = column - start, position = owner < 0 ? 0 : first + k;
    if (k >= 0 && k < n) {
      const ranges = sees && threes(sees);
      if (ranges?.length) ranges.at(-1)[2] += grows * k;
      return {owner, position, ranges, pads, blanks, shift, kind: kindOf(run, pass, owner, position)};
    }
    start += n;
  }
  return null;
}

function ownersOf(row) {                 // the requests whose slots, finished or not, are in a row
  return [...new Set(row.map(([owner]) => owner < -1 ? -2 - owner : owner))].filter(owner => owner >= 0);
}

function pageOf(run, pass, {owner, position}) {   // that holds a key in stage 7; elsewhere null
  const table = last(run.requests[owner]?.rooms ?? [], pass)?.[1];
  return Array.isArray(table) ? table[Math.floor(position / run.pool.page_size)] ?? null : null;
}

// The keys of a slot's row in their order, [{owner, position, column, past}, ...]; owner < 0: a pad.
function keysOf(run, pass, row, slot) {
  const p = run.passes, slots = p.rows[pass][row], flat = p.shape[pass].length === 1;
  const past = (flat ? [slot.owner] : ownersOf(slots)).flatMap(owner => {
    const [i, first, n] = last(run.requests[owner].work, pass);
    const length = i === pass ? first : first + n;
    return Array.from({length}, (_, position) => ({owner, position, past: true}));
  });
  const pads = Math.max(0, p.past[pass] - past.length), keys = [];
  for (let i = 0; i < pads; i++) keys.push({owner: -1, past: true});
  keys.push(...past);
  let column = 0;
  for (const [owner, first, n] of slots) {
    for (let k = 0; k < n; k++, column++) {
      if (!flat || owner === slot.owner) keys.push({owner, position: first + k, column, past: false});
    }
  }
  return keys;
}

// The same keys, each with a mark: "past" or "new" if it is seen, "pad", "unseen", or, if that is not
// as it should be, "wrong" (seen) or "missing" (not seen).
function markedKeys(run, pass, row, slot) {
  const keys = keysOf(run, pass, row, slot), inRow = new Set();
  const sees = key => slot.ranges.some(
    ([owner, from, to]) => owner === key.owner && from <= key.position && key.position < to);
  for (const key of keys) {
    const mine = key.owner === slot.owner && key.position <= slot.position;
    if (key.owner < 0) key.mark = "pad";
    else if (sees(key)) key.mark = slot.owner >= 0 && !mine ? "wrong" : key.past ? "past" : "new";
    else key.mark = slot.owner >= 0 && mine ? "missing" : "unseen";
    inRow.add(key.owner + "." + key.position);
  }
  for (const [owner, from, to] of slot.ranges) {     // seen, although not in its row at all
    for (let position = from; position < to; position++) {
      if (!inRow.has(owner + "." + position)) keys.push({owner, position, past: true, mark: "wrong"});
    }
  }
  // Pads look alike to the X-ray, which counts them. The last ones of each part are marked.
  const pads = past => keys.filter(key => key.owner < 0 && key.past === past);
  const fresh = Math.min(slot.pads, pads(false).length), old = slot.pads - fresh + slot.blanks;
  for (const [seen, part] of [[fresh, pads(false)], [old, pads(true)]]) {
    const right = slot.owner < 0;         // nothing depends on what such a slot sees
    for (const key of part.slice(Math.max(0, part.length - seen))) {
      key.mark = !right ? "wrong" : key.past ? "past" : "new";
    }
  }
  return keys;
}
