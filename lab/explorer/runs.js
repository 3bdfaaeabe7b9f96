"use strict";
// What is known of runs, recorded or computed by schedule.js: no drawing here. page.py says what
// the data hold, and recorder.py what a frame is. `now` is a moment, as momentOf returns it.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SUMS = ["slots", "useful", "recomputed", "pad_slots", "finished_slots", "padded_keys",
              "score_entries", "useful_scores", "copied_bytes", "ms"];
const RUNS = new Map(DATA.runs.map(run => [run.name, run]));
const recorded = name => prepare(RUNS.get(name));

// --- what is looked up often ---------------------------------------------------------------------

// Adds it to a run, once.
function prepare(run) {
  if (run.steps) return run;
  const {passes, requests} = run;
  passes.slots = passes.shape.map(shape => shape.reduce((a, b) => a * b));
  addSteps(run);
  addWork(run);
  addRooms(run);
  addEnds(run);
  addTotals(run);
  // A live run keeps its last steps, from 0 on; its requests may be older.
  const firstTokens = requests.filter(({steps}) => steps[0] >= 0);
  run.waits = firstTokens.map(({ms, arrived}) => ms[0] - arrived);
  addGaps(run);
  run.mostTokens = largest(run.steps.map(step => tokensIn(run, step)));
  return run;
}

// run.steps: [{step, passes: [...], start}, ...], those that have a pass.
// passes.begin: when each pass begins; passes.start is when its step does.
function addSteps(run) {
  const {step: steps, start, ms} = run.passes;
  run.steps = [];
  run.passes.begin = [];
  for (const [pass, step] of steps.entries()) {
    const isNewStep = run.steps.at(-1)?.step !== step;
    if (isNewStep) {
      run.steps.push({step, passes: [pass], start: start[pass]});
      run.passes.begin.push(start[pass]);
    } else {
      run.steps.at(-1).passes.push(pass);
      run.passes.begin.push(run.passes.begin.at(-1) + ms[pass - 1]);
    }
  }
  run.stepOf = new Map(run.steps.map(step => [step.step, step]));
}

// run.work: of each pass, what it computes of each request; request.work: of each request.
function addWork(run) {
  for (const request of run.requests) {
    request.tokens = [...request.prompt, ...request.generated];
    request.work = [];
  }
  run.work = [];
  for (const [pass, numbers] of run.passes.work.entries()) {
    run.work.push([]);
    for (const [owner, first, n] of groups(numbers, 3)) {
      const work = workOf(run.requests[owner], pass, owner, first, n);
      run.requests[owner].work.push(work);
      run.work[pass].push(work);
    }
  }
}

// What a request computes in a pass: tokens `first` to `end`. Those before `reached` had been
// computed before. parts: [[kind, n], ...] of them, in order.
function workOf(request, pass, owner, first, n) {
  const end = first + n, before = request.work.at(-1);
  const reached = before ? Math.max(before.reached, before.end) : 0;
  const recomputed = Math.max(0, Math.min(reached, end) - first);
  const promptEnd = Math.min(request.prompt.length, end);
  const prefill = Math.max(0, promptEnd - first - recomputed);
  const decode = n - recomputed - prefill;
  const parts = Object.entries({recomputed, prefill, decode}).filter(([, count]) => count);
  return {pass, owner, first, n, reached, end, parts};
}

// request.rooms: [{pass, room}, ...], what it holds from a pass on.
function addRooms({passes, requests}) {
  for (const request of requests) request.rooms = [];
  for (const [pass, rooms] of passes.room.entries()) {
    for (const [owner, room] of Object.entries(rooms)) requests[owner].rooms.push({pass, room});
  }
}

// When each step ends: in a recorded run, when the next one starts. Between two steps of a computed
// run, nothing may be there to compute.
function addEnds(run) {
  const lastToken = largest(run.requests.map(({ms}) => ms.at(-1) ?? 0));
  for (const [k, step] of run.steps.entries()) {
    if (run.computed) step.end = step.start + inStep(run, "ms", step);
    else step.end = run.steps[k + 1]?.start ?? Math.max(step.start, lastToken);
  }
}

// run.totals: {count: its sums over the passes 0 to i}.
function addTotals(run) {
  run.totals = {};
  for (const name of SUMS) {
    let total = 0;
    run.totals[name] = run.passes.step.map((_, pass) => {
      total += run.passes[name]?.[pass] ?? 0;
      return total;
    });
  }
}

// run.gaps: [[step, time between two tokens, sum so far, maximum so far], ...], in order of steps.
function addGaps(run) {
  run.gaps = [];
  for (const {ms, steps} of run.requests) {
    for (const [i, gap] of gapsOf(ms).entries()) {
      const step = steps[i + 1];
      if (step >= 0) run.gaps.push([step, gap]);
    }
  }
  run.gaps.sort(([a], [b]) => a - b);
  let sum = 0, longest = 0;
  for (const entry of run.gaps) {
    const [, gap] = entry;
    sum += gap;
    longest = Math.max(longest, gap);
    entry.push(sum, longest);
  }
}

// --- runs of schedule.js -------------------------------------------------------------------------

const RESERVES = ["max_batch", "token_budget", "max_kv_tokens"];
const POOLS = ["max_batch", "token_budget", "pages", "page_size"];
const STAGE_KNOBS = {   // the knobs of each stage
  unbatched: [], naive: ["max_batch"], dynamic: ["max_batch"], chunked: RESERVES,
  interleaved: RESERVES, ragged: RESERVES, paged: POOLS, prefix: POOLS};

function limitsMemory(stage) {
  return STAGE_KNOBS[stage].includes("max_kv_tokens") || STAGE_KNOBS[stage].includes("pages");
}

// [load, knobs] for a stage that cannot limit its memory, where there is a limit: as many requests
// at once as surely fit, and without those that never do.
function asManyAsFit(stage, load, {max_kv_tokens: memory, ...knobs}) {
  const room = ({prompt, limit}) => prompt + limit - 1;
  const marked = load.map(lengths => {
    if (room(lengths) <= memory) return lengths;
    return {...lengths, refused: `${room(lengths)} KV tokens, there are ${memory}`};
  });
  const fitting = marked.filter(({refused}) => !refused);
  let largestRoom = largest(fitting.map(room));
  if (stage === "naive") {               // a row of its rectangle
    const longestPrompt = largest(fitting.map(({prompt}) => prompt));
    largestRoom = longestPrompt + largest(fitting.map(({limit}) => limit)) - 1;
  }
  const fitAtOnce = Math.floor(memory / largestRoom);
  return [marked, {...knobs, max_batch: Math.max(1, Math.min(knobs.max_batch, fitAtOnce))}];
}

// A stage's run of a load, in the form of a recorded run; its tokens have no text.
function computed(stage, load, knobs) {
  const memory = knobs.max_kv_tokens;
  const mustFit = Boolean(memory) && !limitsMemory(stage);
  if (mustFit) [load, knobs] = asManyAsFit(stage, load, knobs);
  const {requests, passes, pool} = simulate(stage, load, knobs, DATA.gpu);
  const shownKnobs = {};
  for (const name of STAGE_KNOBS[stage]) shownKnobs[name] = knobs[name];
  if (mustFit) shownKnobs.max_kv_tokens = memory;
  return {
    name: stage, stage, knobs: shownKnobs, pool, check: null, passes: inColumns(passes),
    requests: requests.map((request, r) => computedRequest(
      request, load[r].name ?? nameOf(r), passes, knobs.in_ms)),
    computed: true, xray: {left_out: "it is computed, without a model"}};
}

function inColumns(passes) {             // [{column: value}, ...] as {column: [value, ...]}
  const columns = {};
  const names = ["step", "start", "shape", "work", "room", ...Object.keys(passes[0] ?? {})];
  for (const name of names) columns[name] = passes.map(pass => pass[name]);
  return columns;
}

// A request of schedule.js as a recorded one. passes: of schedule.js
function computedRequest({prompt, answer, limit, arrival, refused, ...times}, name, passes, inMs) {
  const firstPass = passes.find(({step, start}) => arrival <= (inMs ? start : step));
  return {
    name, limit, refused,
    prompt: Array(prompt).fill(0),
    generated: Array(refused ? 0 : answer).fill(0),
    arrival: firstPass?.step ?? 0,
    arrived: inMs ? arrival : firstPass?.start ?? 0,
    reason: refused ? null : "length",
    steps: times.token_steps, ms: times.token_times};
}

// Recorded requests' lengths, as schedule.js takes them.
function lengthsOf(requests) {
  return requests.map(({name, prompt, generated, limit, arrival, tokens}, r) => {
    const before = requests.slice(0, r);
    return {
      name, prompt: prompt.length, answer: generated.length,
      arrival: Math.max(arrival, 0),
      limit: Math.max(limit, generated.length),
      equal: before.map(other => alike(tokens, other.tokens))};
  });
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

// --- the scoreboard's figures --------------------------------------------------------------------

// What the scoreboard says of a run; null if nothing ran. Waits in milliseconds; memory: the most
// tokens that it had room for, and its limit.
function figuresOf(run) {
  if (run.figures === undefined) run.figures = countFigures(run);
  return run.figures;
}

function countFigures({passes, requests, check, knobs}) {
  const answered = requests.filter(({ms}) => ms.length);
  if (!answered.length) return null;
  const tokens = sumOf(answered.map(({ms}) => ms.length));
  const end = largest(answered.map(({ms}) => ms.at(-1)));
  return {
    passes: passes.step.length,
    useful: sumOf(passes.useful) / sumOf(passes.slots),
    speed: 1e3 * tokens / end,
    first: largest(answered.map(({ms, arrived}) => ms[0] - arrived)),
    next: largest(answered.flatMap(({ms}) => gapsOf(ms))),
    at_once: Math.max(1, largest(passes.at_once)),
    memory: [largest(passes.reserved), limitOf(knobs)],
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
  const pages = memory ? Math.floor(memory / page_size) : null;
  const limits = {max_batch, token_budget, page_size, max_kv_tokens: memory, pages};
  const figures = {};
  for (const stage of Object.keys(STAGE_KNOBS)) {
    figures[stage] = figuresOf(computed(stage, load, limits));
  }
  return figures;
}

// --- looking things up ---------------------------------------------------------------------------

function sumOf(values) { return values.reduce((a, b) => a + b, 0); }
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

function inStep(run, name, step) {       // a count's sum over the passes of a step
  return sumOf(step.passes.map(pass => run.passes[name]?.[pass] ?? 0));
}

function tokensIn(run, {passes}) {       // of a step
  return sumOf(passes.flatMap(pass => run.work[pass]).map(({n}) => n));
}

// --- text ----------------------------------------------------------------------------------------

function textOf(tokens) {                // a character may need several tokens
  const encoder = new TextEncoder();
  const bytes = tokens.flatMap(id => {
    const piece = DATA.vocabulary[id];
    return typeof piece === "string" ? [...encoder.encode(piece)] : piece;
  });
  return new TextDecoder().decode(Uint8Array.from(bytes));
}

function word(run, owner, position) {    // a token, in a word
  const piece = DATA.vocabulary[run.requests[owner].tokens[position]];
  if (typeof piece !== "string") return piece.map(byte => byte.toString(16)).join(" ");
  return piece.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ /, "␣");
}

// --- a moment ------------------------------------------------------------------------------------

// The state of a run at a value of the clock, "step" or "ms": `passes` run then, `pass` is the last
// one so far, `k` counts the steps before its step, `over` says that nothing follows.
function momentOf(run, clock, value) {
  const byStep = clock === "step";
  const started = byStep ? atMost(run.steps, value, step => step.step)
    : atMost(run.steps, value - 1e-6, step => step.start);
  const k = started - 1;
  const step = run.steps[k];
  if (!step) return {k, step: byStep ? value : 0, passes: [], pass: -1, over: !run.steps.length};
  const busy = byStep ? step.step === value : value <= step.end + 1e-6;
  return {
    k,
    step: byStep ? value : step.step,
    passes: busy ? step.passes : [],
    pass: step.passes.at(-1),
    over: !busy && started === run.steps.length};
}

// {kind, words, tokens, computed, holds, active} of a request: tokens generated so far, tokens in
// its cache, and what it holds: a capacity, a block table, or null.
function stateOf(run, request, now) {
  const work = last(request.work, now.pass);   // undefined: nothing is computed yet
  const state = {
    tokens: atMost(request.steps, now.step),
    computed: work?.end ?? 0,
    holds: last(request.rooms, now.pass)?.room ?? null,
    active: Boolean(work) && now.passes.includes(work.pass)};
  const [kind, words] = kindAndWords(run, request, now, work, state);
  return {kind, words, ...state};
}

function kindAndWords(run, request, now, work, {tokens, computed, holds, active}) {
  if (request.refused) return ["absent", request.refused];
  if (request.arrival > now.step) return ["absent", `– arrives at step ${request.arrival}`];
  const hasAllTokens = tokens === request.generated.length && work === request.work.at(-1);
  if (request.reason && hasAllTokens) return ["done", `■ done (${request.reason})`];
  if (!work) return ["waiting", "○ waiting"];
  if (run.pool && !active && holds === null) return ["preempted", "↺ preempted"];
  if (active && work.first < work.reached) {
    const end = Math.min(work.end, work.reached);
    return ["recomputed", `↻ computed again, ${end} of ${work.reached}`];
  }
  const prompt = request.prompt.length;
  if (work.first >= prompt) return ["decode", "● decoding"];
  return ["prefill", `◐ prefilling ${Math.min(computed, prompt)}/${prompt}`];
}

// --- slots ---------------------------------------------------------------------------------------

function kindOf(run, pass, owner, position) {
  if (owner === -1) return "pad";
  if (owner < 0) return "finished";
  const {first, parts} = last(run.requests[owner].work, pass);
  let end = first;
  for (const [kind, n] of parts) {
    end += n;
    if (position < end) return kind;
  }
  return "decode";
}

// The tensor's rows [{owner, first, n}, ...]: of a request, or of a finished one (n is 0). A stream
// has one for each request, too.
function rowsOf(run, pass) {
  const finished = run.passes.finished[pass] ?? [];
  if (!finished.length) return run.work[pass];
  const rows = [...run.work[pass], ...finished.map(owner => ({owner, first: 0, n: 0}))];
  const arrived = ({owner}) => run.requests[owner].arrived;
  // A static batch keeps its rows in order.
  return rows.sort((a, b) => arrived(a) - arrived(b) || a.owner - b.owner);
}

// Owner and position of each slot of a pass, row by row. Without a record they follow from its
// work: a stream has its tokens one after another, a rectangle its pads on the left.
function slotsOf(run, pass) {
  const {owner: recordedOwners, position: recordedPositions, shape} = run.passes;
  if (recordedOwners) {
    return {owner: recordedOwners[pass] ?? [], position: recordedPositions[pass]};
  }
  const [, T] = shape[pass] ?? [];
  const owner = [], position = [];
  for (const row of rowsOf(run, pass)) {
    const pads = T ? T - row.n : 0, filler = row.n ? -1 : -2 - row.owner;
    const positions = Array.from({length: row.n}, (_, k) => row.first + k);
    owner.push([...Array(pads).fill(filler), ...Array(row.n).fill(row.owner)]);
    position.push([...Array(pads).fill(0), ...positions]);
  }
  if (T) return {owner, position};
  return {owner: [owner.flat()], position: [position.flat()]};
}

// {owner, position, seen, pads, blanks, shift, kind} of a slot, or null. seen: names of the keys
// that it sees, "request.position"; undefined: its request's, up to itself, as it should be.
function slotAt(run, pass, row, column) {
  const slots = slotsOf(run, pass), owner = slots.owner[row]?.[column];
  if (owner === undefined) return null;
  const position = slots.position[row][column];
  const number = row * slots.owner[0].length + column;   // in the tensor
  const [keys, pads = 0, blanks = 0] = run.passes.sees?.[pass]?.[number] ?? [];
  return {
    owner, position, pads, blanks,
    seen: keys && new Set(groups(keys, 2).map(key => key.join("."))),
    shift: run.passes.shift?.[pass]?.[number] ?? 0,
    kind: kindOf(run, pass, owner, position)};
}

function ownersOf(row) {                 // the requests whose slots, finished or not, are in a row
  const owners = row.map(owner => owner < -1 ? -2 - owner : owner);
  return [...new Set(owners)].filter(owner => owner >= 0);
}

function pageOf(run, pass, {owner, position}) {   // that holds a key; null without pages
  const table = last(run.requests[owner]?.rooms ?? [], pass)?.room;
  if (!Array.isArray(table)) return null;
  return table[Math.floor(position / run.pool.page_size)] ?? null;
}

// --- what a slot sees ----------------------------------------------------------------------------

// The keys of a slot's row in order, [{owner, position, column, past}, ...]; owner < 0: a pad.
function keysOf(run, pass, row, slot) {
  const isStream = run.passes.shape[pass].length === 1;
  const {owner: owners, position: positions} = slotsOf(run, pass);
  const past = [];
  for (const owner of isStream ? [slot.owner] : ownersOf(owners[row])) {
    const work = last(run.requests[owner].work, pass);
    const length = work.pass === pass ? work.first : work.end;
    for (let position = 0; position < length; position++) past.push({owner, position, past: true});
  }
  const pads = Math.max(0, run.passes.past[pass] - past.length);
  const keys = [...Array.from({length: pads}, () => ({owner: -1, past: true})), ...past];
  for (const [column, owner] of owners[row].entries()) {
    if (isStream && owner !== slot.owner) continue;
    keys.push({owner, position: positions[row][column], column, past: false});
  }
  return keys;
}

// The same keys, each with a mark: "past" or "new" if it is seen, "pad", "unseen", or, if that is
// not as it should be, "wrong" (seen) or "missing" (not seen).
function markedKeys(run, pass, row, slot) {
  const keys = keysOf(run, pass, row, slot);
  for (const key of keys) key.mark = markOf(key, slot);
  keys.push(...keysOutside(keys, slot));
  // Pads look alike to the X-ray, which counts them. The last ones of each part are marked.
  const pads = keys.filter(({owner}) => owner < 0);
  const newPads = pads.filter(({past}) => !past), oldPads = pads.filter(({past}) => past);
  const newSeen = Math.min(slot.pads, newPads.length);
  markLast(newPads, newSeen);
  markLast(oldPads, slot.pads - newSeen + slot.blanks);
  return keys;
}

const nameOfKey = ({owner, position}) => `${owner}.${position}`;

function markOf(key, slot) {
  if (key.owner < 0) return "pad";
  const isOwn = key.owner === slot.owner && key.position <= slot.position;
  const isSeen = slot.seen ? slot.seen.has(nameOfKey(key)) : isOwn;
  if (!isSeen) return isOwn ? "missing" : "unseen";
  if (!isOwn) return "wrong";
  return key.past ? "past" : "new";
}

function keysOutside(keys, slot) {       // those that it sees although they are not in its row
  const inRow = new Set(keys.map(nameOfKey));
  const outside = [...slot.seen ?? []].filter(name => !inRow.has(name));
  return outside.map(name => {
    const [owner, position] = name.split(".").map(Number);
    return {owner, position, past: true, mark: "wrong"};
  });
}

function markLast(pads, number) {
  for (const key of pads.slice(Math.max(0, pads.length - number))) key.mark = "wrong";
}
