"use strict";
// What is known of runs, recorded or computed by schedule.js: no drawing here. page.py says what
// the data hold, and recorder.py what a frame is. `now` is a moment, as momentOf returns it.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SUMS = ["slots", "useful", "recomputed", "pad_slots", "finished_slots", "padded_keys",
              "score_entries", "useful_scores", "copied_bytes", "ms"];
const RUNS = new Map(DATA.runs.map(run => [run.name, run]));
const recorded = name => prepare(RUNS.get(name));

// Adds what is looked up often: the passes of each step, running totals, requests' events. Once.
function prepare(run) {
  const p = run.passes, {requests} = run;
  if (run.steps) return run;
  p.slots = p.shape.map(shape => shape.reduce((a, b) => a * b));
  p.begin = [];                          // of each pass; p.start is that of its step
  run.steps = [];                        // {step, passes: [...], start, end}, if it has a pass
  for (const [i, step] of p.step.entries()) {
    if (run.steps.at(-1)?.step !== step) run.steps.push({step, passes: [], start: p.start[i]});
    const {passes} = run.steps.at(-1);
    p.begin.push(passes.length ? p.begin[i - 1] + p.ms[i - 1] : p.start[i]);
    passes.push(i);
  }
  run.stepOf = new Map(run.steps.map(step => [step.step, step]));
  for (const request of requests) {      // work, rooms: what it computes, and holds, from a pass on
    const tokens = [...request.prompt, ...request.generated];
    Object.assign(request, {tokens, work: [], rooms: []});
  }
  run.work = p.work.map((works, pass) => groups(works, 3).map(([owner, first, n]) => {
    const work = workOf(run, pass, owner, first, n);
    requests[owner].work.push(work);
    return work;
  }));
  for (const [pass, rooms] of p.room.entries()) {
    for (const [r, room] of Object.entries(rooms)) requests[r].rooms.push({pass, room});
  }
  const lastToken = largest(requests.map(request => request.ms.at(-1) ?? 0));
  run.steps.forEach((step, k) => {
    const next = run.steps[k + 1]?.start ?? Math.max(step.start, lastToken);
    // Between two steps of a computed run, nothing may be there to compute.
    step.end = run.computed ? step.start + inStep(run, "ms", step) : next;
  });
  run.totals = {};                       // name -> its sums over the passes 0..i
  for (const name of SUMS) {
    let total = 0;
    run.totals[name] = p.step.map((_, i) => total += p[name]?.[i] ?? 0);
  }
  // A live run keeps its last steps, from 0 on; its requests may be older.
  run.waits = requests.filter(({steps}) => steps[0] >= 0).map(({ms, arrived}) => ms[0] - arrived);
  run.gaps = requests.flatMap(({ms, steps}) => gapsOf(ms).map((gap, i) => [steps[i + 1], gap]))
    .filter(([step]) => step >= 0);
  run.gaps.sort(([a], [b]) => a - b);    // [step, time between two tokens, sum, maximum so far]
  let sum = 0, most = 0;
  for (const gap of run.gaps) gap.push(sum += gap[1], most = Math.max(most, gap[1]));
  run.mostTokens = largest(run.steps.map(step => tokensIn(run, step)));
  return run;
}

// What a request computes in a pass: tokens `first` to `end`. Those before `reached` had been
// computed before. parts: [[kind, n], ...] of them, in order.
function workOf({requests}, pass, owner, first, n) {
  const {prompt, work} = requests[owner], before = work.at(-1), end = first + n;
  const reached = before ? Math.max(before.reached, before.end) : 0;
  const recomputed = Math.max(0, Math.min(reached, end) - first);
  const prefill = Math.max(0, Math.min(prompt.length, end) - first - recomputed);
  const counts = {recomputed, prefill, decode: n - recomputed - prefill};
  return {pass, owner, first, n, reached, end,
          parts: Object.entries(counts).filter(([, count]) => count)};
}

// --- runs of schedule.js -------------------------------------------------------------------------

const RESERVES = ["max_batch", "token_budget", "max_kv_tokens"];
const POOLS = ["max_batch", "token_budget", "pages", "page_size"];
const LADDER = {   // the stages, and the knobs that they have
  unbatched: [], naive: ["max_batch"], dynamic: ["max_batch"], chunked: RESERVES,
  interleaved: RESERVES, ragged: RESERVES, paged: POOLS, prefix: POOLS};
const limitsMemory = stage => ["max_kv_tokens", "pages"].some(knob => LADDER[stage].includes(knob));

// [load, knobs] for a stage that cannot limit its memory, where there is a limit: as many requests
// at once as surely fit, and without those that never do.
function asManyAsFit(stage, load, {max_kv_tokens: memory, ...knobs}) {
  const room = ({prompt, limit}) => prompt + limit - 1;
  const all = load.map(one => room(one) <= memory ? one
    : {...one, refused: `${room(one)} KV tokens, there are ${memory}`});
  const fit = all.filter(({refused}) => !refused);
  const most = stage !== "naive" ? largest(fit.map(room))   // naive: a row of its rectangle
    : largest(fit.map(({prompt}) => prompt)) + largest(fit.map(({limit}) => limit)) - 1;
  const max_batch = Math.max(1, Math.min(knobs.max_batch, Math.floor(memory / most)));
  return [all, {...knobs, max_batch}];
}

// A stage's run of a load, in the form of a recorded run; its tokens have no text.
function computed(stage, load, knobs) {
  const memory = knobs.max_kv_tokens, bounded = Boolean(memory) && !limitsMemory(stage);
  if (bounded) [load, knobs] = asManyAsFit(stage, load, knobs);
  const {requests, passes, pool} = simulate(stage, load, knobs, DATA.gpu), p = {};
  const columns = ["step", "start", "shape", "work", "room", ...Object.keys(passes[0] ?? {})];
  for (const name of columns) p[name] = passes.map(pass => pass[name]);
  const list = requests.map(({prompt, answer, limit, arrival, refused, ...request}, r) => {
    const seen = passes.find(({step, start}) => arrival <= (knobs.in_ms ? start : step));
    return {name: load[r].name ?? nameOf(r), prompt: Array(prompt).fill(0), limit, refused,
            generated: Array(refused ? 0 : answer).fill(0), arrival: seen?.step ?? 0,
            arrived: knobs.in_ms ? arrival : seen?.start ?? 0, reason: refused ? null : "length",
            steps: request.token_steps, ms: request.token_times};
  });
  const has = Object.fromEntries(LADDER[stage].map(name => [name, knobs[name]]));
  if (bounded) has.max_kv_tokens = memory;
  return {name: stage, stage, knobs: has, pool, check: null, requests: list, passes: p,
          computed: true, xray: {left_out: "it is computed, without a model"}};
}

// Recorded requests' lengths, as schedule.js takes them.
function lengthsOf(requests) {
  return requests.map(({name, prompt, generated, limit, arrival, tokens}, r) => (
    {name, prompt: prompt.length, answer: generated.length, arrival: Math.max(arrival, 0),
     limit: Math.max(limit, generated.length),
     equal: requests.slice(0, r).map(other => alike(tokens, other.tokens))}));
}

function alike(a, b) {                   // how many tokens or letters they have in common at first
  const end = Math.min(a.length, b.length);
  for (let i = 0; i < end; i++) if (a[i] !== b[i]) return i;
  return end;
}

function nameOf(r) {                     // A to Z, AA, AB, ...
  const letter = String.fromCharCode(65 + r % 26);
  return r < 26 ? letter : nameOf(Math.floor(r / 26) - 1) + letter;
}

// What the scoreboard says of a run; null if nothing ran. Waits in milliseconds; memory: the most
// tokens that it had room for, and its limit.
const figuresOf = run => run.figures ??= countFigures(run);

function countFigures({passes: p, requests, check, knobs}) {
  const sum = values => values.reduce((a, b) => a + b, 0);
  const ran = requests.filter(({ms}) => ms.length);
  if (!ran.length) return null;
  const tokens = sum(ran.map(({ms}) => ms.length)), end = largest(ran.map(({ms}) => ms.at(-1)));
  return {passes: p.step.length, useful: sum(p.useful) / sum(p.slots), speed: 1e3 * tokens / end,
          first: largest(ran.map(({ms, arrived}) => ms[0] - arrived)),
          next: largest(ran.flatMap(({ms}) => gapsOf(ms))),
          at_once: Math.max(1, largest(p.at_once)), memory: [largest(p.reserved), limitOf(knobs)],
          wrong: Object.keys(check?.wrong ?? {}).length};
}

// Of its memory, in tokens; null if none was set.
function limitOf({pages, page_size, max_kv_tokens}) {
  return pages ? pages * page_size : max_kv_tokens ?? null;
}

function gapsOf(ms) {                    // milliseconds between a request's tokens
  return ms.slice(1).map((time, i) => time - ms[i]);
}

// What every stage would have done with the lengths of a run, in as much memory if it has a limit.
function wouldHave({requests, knobs}) {
  const {max_batch = 8, token_budget = 64, page_size = 16} = knobs, memory = limitOf(knobs);
  const load = lengthsOf(requests.filter(({generated}) => generated.length));
  const limits = {max_batch, token_budget, page_size, max_kv_tokens: memory,
                  pages: memory ? Math.floor(memory / page_size) : null};
  return Object.fromEntries(Object.keys(LADDER).map(
    stage => [stage, figuresOf(computed(stage, load, limits))]));
}

// --- looking things up ---------------------------------------------------------------------------

function largest(values) { return values.reduce((a, b) => Math.max(a, b), 0); }

function groups(values, size) {          // [a, b, c, d, e, f], 3 -> [[a, b, c], [d, e, f]]
  return Array.from(
    {length: values.length / size}, (_, i) => values.slice(size * i, size * (i + 1)));
}

function atMost(sorted, value, key = x => x) {   // how many of them are <= value
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(sorted[middle]) <= value) low = middle + 1; else high = middle;
  }
  return low;
}

function last(events, pass) {            // the last of {pass, ...} at or before a pass
  return events[atMost(events, pass, event => event.pass) - 1];
}

const inStep = (run, name, step) => step.passes.reduce(
  (total, i) => total + (run.passes[name]?.[i] ?? 0), 0);
function tokensIn(run, {passes}) {       // of a step
  return passes.flatMap(pass => run.work[pass]).reduce((sum, {n}) => sum + n, 0);
}

// --- text ----------------------------------------------------------------------------------------

function textOf(tokens) {
  const pieces = tokens.map(id => DATA.vocabulary[id]);   // a character may need several tokens
  const bytes = pieces.flatMap(
    piece => typeof piece === "string" ? [...new TextEncoder().encode(piece)] : piece);
  return new TextDecoder().decode(Uint8Array.from(bytes));
}

function word(run, owner, position) {    // a token, in a word
  const piece = DATA.vocabulary[run.requests[owner].tokens[position]];
  if (typeof piece !== "string") return piece.map(byte => byte.toString(16)).join(" ");
  return piece.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ /, "␣");
}

// --- a moment ------------------------------------------------------------------------------------

// The state of a run at a value of the clock, "step" or "ms": `passes` run then, `pass` is the last
// one so far, `step` its step, `over` says that nothing follows.
function momentOf(run, clock, value) {
  const byStep = clock === "step";
  const k = (byStep ? atMost(run.steps, value, step => step.step)
    : atMost(run.steps, value - 1e-6, step => step.start)) - 1;
  const step = run.steps[k];
  const busy = step && (byStep ? step.step === value : value <= step.end + 1e-6);
  return {k, step: byStep ? value : step?.step ?? 0, passes: busy ? step.passes : [],
          pass: step ? step.passes.at(-1) : -1, over: !busy && k === run.steps.length - 1};
}

// {kind, words, tokens, computed, holds, active} of a request: tokens generated so far, tokens in
// its cache, and what it holds: a capacity, a block table, or null.
function stateOf(run, request, now) {
  const work = last(request.work, now.pass), holds = last(request.rooms, now.pass)?.room ?? null;
  const tokens = atMost(request.steps, now.step), computed = work?.end ?? 0;
  const active = Boolean(work) && now.passes.includes(work.pass), prompt = request.prompt.length;
  const over = request.reason && tokens === request.generated.length
    && work === request.work.at(-1);
  const [kind, words] = request.refused ? ["absent", request.refused]
    : request.arrival > now.step ? ["absent", `– arrives at step ${request.arrival}`]
    : over ? ["done", `■ done (${request.reason})`]
    : !work ? ["waiting", "○ waiting"]
    : run.pool && !active && holds === null ? ["preempted", "↺ preempted"]
    : active && work.first < work.reached ? ["recomputed", "↻ computed again, "
      + `${Math.min(work.first + work.n, work.reached)} of ${work.reached}`]
    : work.first >= prompt ? ["decode", "● decoding"]
    : ["prefill", `◐ prefilling ${Math.min(computed, prompt)}/${prompt}`];
  return {kind, words, tokens, computed, holds, active};
}

// --- slots and what they see ---------------------------------------------------------------------

function kindOf(run, pass, owner, position) {
  if (owner < 0) return owner === -1 ? "pad" : "finished";
  const {first, parts} = last(run.requests[owner].work, pass);
  let end = first;
  return parts.find(([, n]) => position < (end += n))?.[0] ?? "decode";
}

// The tensor's rows [{owner, first, n}, ...]: of a request, or of a finished one (n is 0). A stream
// has one for each request, too.
function rowsOf(run, pass) {
  const came = ({owner}) => run.requests[owner].arrived, work = run.work[pass];
  const done = run.passes.finished[pass] ?? [];   // a static batch keeps its rows in order
  if (!done.length) return work;
  return [...work, ...done.map(owner => ({owner, first: 0, n: 0}))].sort(
    (a, b) => came(a) - came(b) || a.owner - b.owner);
}

// Owner and position of each slot of a pass, row by row. Without a record they follow from its
// work: a stream has its tokens one after another, a rectangle its pads on the left.
function slotsOf(run, pass) {
  const {owner, position, shape} = run.passes, [, T] = shape[pass] ?? [];
  if (owner) return {owner: owner[pass] ?? [], position: position[pass]};
  const parts = rowsOf(run, pass).map(({owner, first, n}) => {
    const pads = T ? T - n : 0, filler = n ? -1 : -2 - owner;
    return {owner: [...Array(pads).fill(filler), ...Array(n).fill(owner)],
            position: [...Array(pads).fill(0), ...Array.from({length: n}, (_, k) => first + k)]};
  });
  const rows = name => T ? parts.map(part => part[name]) : [parts.flatMap(part => part[name])];
  return {owner: rows("owner"), position: rows("position")};
}

// {owner, position, seen, pads, blanks, shift, kind} of a slot, or null. seen: names of the keys
// that it sees, "request.position"; undefined: its request's, up to itself, as it should be.
function slotAt(run, pass, row, column) {
  const slots = slotsOf(run, pass), owner = slots.owner[row]?.[column];
  if (owner === undefined) return null;
  const position = slots.position[row][column], {sees = {}, shift = {}} = run.passes;
  const name = row * slots.owner[0].length + column;
  const [keys, pads = 0, blanks = 0] = sees[pass]?.[name] ?? [];
  return {owner, position, pads, blanks, shift: shift[pass]?.[name] ?? 0,
          seen: keys && new Set(groups(keys, 2).map(key => key.join("."))),
          kind: kindOf(run, pass, owner, position)};
}

function ownersOf(row) {                 // the requests whose slots, finished or not, are in a row
  const owners = row.map(owner => owner < -1 ? -2 - owner : owner);
  return [...new Set(owners)].filter(owner => owner >= 0);
}

function pageOf(run, pass, {owner, position}) {   // that holds a key; null without pages
  const table = last(run.requests[owner]?.rooms ?? [], pass)?.room;
  return Array.isArray(table) ? table[Math.floor(position / run.pool.page_size)] ?? null : null;
}

// The keys of a slot's row in order, [{owner, position, column, past}, ...]; owner < 0: a pad.
function keysOf(run, pass, row, slot) {
  const p = run.passes, {owner: owners, position} = slotsOf(run, pass);
  const flat = p.shape[pass].length === 1;
  const past = (flat ? [slot.owner] : ownersOf(owners[row])).flatMap(owner => {
    const work = last(run.requests[owner].work, pass);
    const length = work.pass === pass ? work.first : work.end;
    return Array.from({length}, (_, position) => ({owner, position, past: true}));
  });
  const pads = Math.max(0, p.past[pass] - past.length), keys = [];
  for (let i = 0; i < pads; i++) keys.push({owner: -1, past: true});
  keys.push(...past);
  owners[row].forEach((owner, column) => {
    if (flat && owner !== slot.owner) return;
    keys.push({owner, position: position[row][column], column, past: false});
  });
  return keys;
}

// The same keys, each with a mark: "past" or "new" if it is seen, "pad", "unseen", or, if that is
// not as it should be, "wrong" (seen) or "missing" (not seen).
function markedKeys(run, pass, row, slot) {
  const keys = keysOf(run, pass, row, slot), inRow = new Set();
  for (const key of keys) {
    const mine = key.owner === slot.owner && key.position <= slot.position;
    const name = key.owner + "." + key.position;
    if (key.owner < 0) key.mark = "pad";
    else if (slot.seen?.has(name) ?? mine) key.mark = !mine ? "wrong" : key.past ? "past" : "new";
    else key.mark = mine ? "missing" : "unseen";
    inRow.add(name);
  }
  for (const name of slot.seen ?? []) {         // although it is not in its row at all
    const [owner, position] = name.split(".").map(Number);
    if (!inRow.has(name)) keys.push({owner, position, past: true, mark: "wrong"});
  }
  // Pads look alike to the X-ray, which counts them. The last ones of each part are marked.
  const pads = past => keys.filter(key => key.owner < 0 && key.past === past);
  const fresh = Math.min(slot.pads, pads(false).length), old = slot.pads - fresh + slot.blanks;
  for (const [seen, part] of [[fresh, pads(false)], [old, pads(true)]]) {
    for (const key of part.slice(Math.max(0, part.length - seen))) key.mark = "wrong";
  }
  return keys;
}
