// The visitor's own requests: what stands in the address, the controls, and the stages' runs of
// them, which schedule.js computes anew after each change. The one state is `state.own`:
//
//     {requests: [[prompt, answer, arrival in ms, 1 if it begins like the others], ...], knobs}
//
// In an address, "24-40_180-12-50" are two requests; what is 0 at the end, or default, is left out.

const steps = (...parts) => parts.flatMap(
  ([from, to, by]) => Array.from({length: (to - from) / by + 1}, (_, i) => from + i * by));
const LENGTHS = steps([1, 32, 1], [36, 128, 4], [144, 512, 16], [576, 2048, 64]);
const KNOBS = {   // title, values, default, what it means
  max_batch: ["max_batch", steps([1, 16, 1], [20, 40, 4]), 8, "requests that run at once"],
  token_budget: ["token budget", [8, 16, 32, 64, 128, 256, 512, 1024, 2048], 64,
                 "tokens in a step, for the stages from chunked on"],
  memory: ["memory", steps([32, 512, 32], [640, 2048, 128], [2560, 16384, 512]), 2048,
           "tokens whose keys and values fit, for the stages from chunked on"],
  page_size: ["page size", [1, 2, 4, 8, 16, 32, 64], 16, "tokens in a page of paged and prefix"],
  max_new_tokens: ["max_new_tokens", [0, ...LENGTHS], 0,
                   "the limit that each request declares for its answer, or the answer's length if "
                   + "that is longer; chunked, interleaved and ragged reserve as much"],
  common: ["common beginning", [0, ...LENGTHS], 0, "tokens with which prompts marked ≡ begin"]};
const PRESETS = {   // as in an address
  "mixed": "own=24-40_60-24_12-60_120-30-40_36-16-80_200-24-120_16-48-160_48-32-200",
  "a long prompt": "own=16-60_24-60_20-60_32-60_1024-20-100_20-30-150&token_budget=128",
  "one system prompt": "own=220-30-0-1_232-24-0-1_212-36-40-1_240-20-80-1_224-28-120-1"
    + "_60-30-160&common=192&memory=1024&run=prefix&beside=paged",
  "little memory": "own=40-30_60-40_52-36_44-50_60-24_48-44_56-30_40-36&memory=512"
    + "&max_new_tokens=128&run=paged&beside=ragged"};
const MOST = 40;                         // requests

// --- the state -----------------------------------------------------------------------------------

const planned = new Map();               // stage -> its run of state.own
const earlier = [], undone = [];         // for undo and redo: states as JSON
const rows = [], knobs = {};             // controls of each request; of each knob
let mine = null, before = null;          // the last state that was shown; that before a drag
let soon = null;                         // the next frame, if it shall redraw
let chosen = {run: "paged", beside: "", value: 0};   // the stages and the ms that were shown last
let damage = "";                         // what is said of an address, once

const LIMITS = [["a prompt's tokens", 1, 8192], ["an answer's tokens", 1, 2048],
                ["an arrival in ms", 0, 1e5]];
const isLength = (n, least, most) => Number.isInteger(n) && n >= least && n <= most;

function remember() {                    // what is shown, to come back to it
  if (state.own) chosen = {run: state.run, beside: state.beside, value: state.value};
}

function setOwn(own) {
  remember();
  state.own = own;
  mine = own ?? mine;
  planned.clear();
}

function ownFrom(parts) {                // of an address; null if it has none; one, if none is right
  if (!parts.has("own")) return null;
  const texts = parts.get("own").split("_"), lost = [], left = [];
  const own = {requests: texts.map((text, r) => {
    const [prompt, answer, arrival = 0, shares = 0] = text.split("-").map(Number);
    const one = [prompt, answer, arrival, shares ? 1 : 0];
    const right = r < MOST && LIMITS.every(([, ...limits], k) => isLength(one[k], ...limits));
    if (!right) left.push(`“${text}”`);
    return right && one;
  }).filter(Boolean)};
  if (left.length) lost.push(`${plural(left.length, "request")} (${left.slice(0, 3).join(", ")})`);
  for (const name of ["run", "beside"]) {
    if (parts.get(name) && !LADDER[parts.get(name)]) lost.push(`${name}=${parts.get(name)}`);
  }
  const known = ["own", "run", "beside", "ms", "step", "theme", "cells", ...Object.keys(KNOBS)];
  lost.push(...[...parts.keys()].filter(name => !known.includes(name)));
  for (const [name, [title, values, usual]] of Object.entries(KNOBS)) {
    const value = Number(parts.get(name) ?? usual);
    own[name] = isLength(value, values[0], values.at(-1)) ? value : usual;
    if (own[name] !== value) lost.push(`${title}=${parts.get(name)} (now ${usual})`);
  }
  damage = lost.length ? `In this link, ${lost.join(", ")} could not be read.` : "";
  return own.requests.length ? own : {...own, requests: [[24, 40, 0, 0]]};
}

function ownParts() {                    // for an address
  const {requests, ...others} = state.own;
  const list = requests.map(request => request.join("-").replace(/(-0)+$/, "")).join("_");
  return {own: list, ...Object.fromEntries(
    Object.entries(others).filter(([name, value]) => value !== KNOBS[name][2]))};
}

function openOwn(own = mine) {           // a state, or what an address says; else the first preset
  remember();
  const parts = new URLSearchParams(typeof own === "string" ? own : Object.values(PRESETS)[0]);
  const was = state.own && JSON.stringify(state.own), back = own === mine;
  const runs = typeof own === "string"
    ? {run: parts.get("run") ?? "paged", beside: parts.get("beside") ?? ""}
    : back || !LADDER[state.run] ? chosen : {};   // a recorded run's stage stays
  if (!was) leave();
  setOwn(own?.requests ? own : ownFrom(parts));
  if (was) keep(was, null);
  Object.assign(state, runs, {clock: "ms", slot: null, tab: 0});
  if (!LADDER[state.beside]) state.beside = "";
  setTicks(back ? chosen.value : 0);
  build();
}

function ownOf(run) {                    // a recorded run's lengths; arrivals on the GPU's clock
  const {max_batch = 8, token_budget = 64, page_size = 16} = run.knobs, {requests} = run;
  const when = computed("ragged", lengthsOf(requests), {max_batch, token_budget}).requests;
  const prompts = requests.map(({prompt}) => prompt), shared = prompts.map(
    prompt => largest(prompts.map(other => other === prompt ? 0 : alike(prompt, other))));
  const common = largest(shared) > page_size ? largest(shared) : 0;
  const memory = run.pool ? run.pool.pages * page_size : run.knobs.max_kv_tokens;
  const list = requests.map(({prompt, generated}, r) => [
    prompt.length, generated.length, Math.round(when[r].arrived),
    common && shared[r] === common ? 1 : 0]);
  return {...ownFrom(new URLSearchParams("own=1-1")), max_batch, token_budget, page_size, common,
          ...memory ? {memory} : {}, requests: list.slice(0, MOST)};
}

function ownRun(stage) {
  if (!planned.has(stage)) {
    const {requests, memory, max_new_tokens, common, ...limits} = state.own;
    const load = requests.map(([prompt, answer, arrival, shares], r) => ({
      prompt, answer, arrival, limit: Math.max(answer, max_new_tokens),
      equal: requests.slice(0, r).map(
        other => shares && other[3] ? Math.min(common, prompt, other[0]) : 0)}));
    const pages = Math.floor(memory / limits.page_size);
    planned.set(stage, computed(
      stage, load, {...limits, in_ms: true, max_kv_tokens: memory, pages}));
  }
  return planned.get(stage);
}

// --- changes -------------------------------------------------------------------------------------

let by = null;                           // the bar on which keys were pressed last

function keep(was, from) {               // keys pressed on one bar are one change
  if (was !== JSON.stringify(state.own)) {
    if (!from || from !== by) earlier.push(was);
    undone.length = 0;
  }
  by = from;
}

function edit(what, settled = true) {    // not settled: more will come from the same drag
  before ??= JSON.stringify(state.own);
  damage = "";
  what(state.own);
  soon ??= requestAnimationFrame(redraw);
  if (settled) settle();
}

function settle(from = null) {
  if (before !== null) keep(before, from);
  before = state.held = null;
  soon ??= requestAnimationFrame(redraw);
}

function redraw() {                      // at most once in a frame
  soon = null;
  if (!state.own) return;
  planned.clear();
  setTicks(state.value);
  fill();
}

const undo = () => restore(earlier, undone), redo = () => restore(undone, earlier);

function restore(from, to) {
  if (!from.length) return;
  by = null;
  to.push(JSON.stringify(state.own));
  setOwn(JSON.parse(from.pop()));
  redraw();
}

// --- controls ------------------------------------------------------------------------------------

// Digits that are pressed on a range input are a number of their own; keys in quick succession are
// one change, and each drag is one.
function typing(input, [least, most], set) {
  let typed = "", when = 0;              // the digits so far; ms
  input.onchange = () => settle(input);
  input.onpointerdown = () => { by = null; };
  input.onkeydown = ({key, timeStamp}) => {
    const digit = /^\d$/.test(key), late = timeStamp - when > 1500;
    if (late || (digit && !typed)) by = null;
    when = timeStamp;
    typed = digit ? (late ? "" : typed) + key : key === "Backspace" ? typed.slice(0, -1) : "";
    if (!typed) return;
    const fits = isLength(Number(typed), least, most), [who] = input.ariaLabel.split(":");
    edit(() => fits && set(Number(typed)), false);
    if (!fits) damage = `${who}: ${number(least)} to ${number(most)}, not ${typed}.`;
    settle(input);
  };
}

// A native range input: its positions are indices of a table of values, its face is a bar.
function bar(name, kind, values, set, most = values.at(-1)) {
  const input = element("input", {type: "range", min: 0, max: values.length - 1, ariaLabel: name});
  const output = element("output");
  input.oninput = () => edit(() => set(values[input.value]), false);
  typing(input, [values[0], most], set);
  return {node: element("label", {className: "length " + kind}, input, output), show(value) {
    input.value = Math.max(0, atMost(values, value) - 1);
    input.ariaValueText = output.textContent = value ? number(value) : "–";
    input.style.setProperty("--share", input.value / (values.length - 1));
  }};
}

function row(r) {                        // a request's controls; r: its number
  const name = nameOf(r), set = (i, value) => { state.own.requests[r][i] = value; };
  const prompt = bar(`${name}: prompt`, "prefill", LENGTHS, n => set(0, n), LIMITS[0][2]);
  const answer = bar(`${name}: answer`, "decode", LENGTHS, n => set(1, n));
  const shares = element("button", {
    title: "begins with the common beginning", ariaLabel: `${name}: begins like the others`,
    onclick: () => edit(own => {
      own.requests[r][3] ^= 1;
      own.common ||= 64;
    })}, "≡");
  const out = element("button", {
    className: "out", ariaLabel: `remove ${name}`, title: `remove ${name}`, onclick: () => {
      edit(own => own.requests.splice(r, 1));
      if (!state.own.requests[r]) $("rows").querySelectorAll(".out")[r - 1].focus();
    }}, "×");
  const input = element("input", {type: "range", min: 0, ariaLabel: `${name}: arrival, ms`});
  input.oninput = () => {
    state.held ??= views[0].end;         // while it is dragged, the axis stays
    edit(() => set(2, Number(input.value)), false);
  };
  typing(input, LIMITS[2].slice(1), n => set(2, n));
  const output = element("output");
  const arrival = element("label", {className: "arrival"}, input, output);
  const node = element("div", {className: "row", ariaLabel: `request ${name}`}, bold(name),
                       prompt.node, answer.node, shares, out, arrival);
  node.setAttribute("role", "group");
  return {node, show([tokens, longest, at, common], end) {
    prompt.show(tokens);
    answer.show(longest);
    input.max = Math.max(end, at);
    input.value = at;
    input.ariaValueText = output.textContent = `${number(at)} ms`;
    input.disabled = state.clock === "step";
    shares.ariaPressed = String(Boolean(common));
    out.disabled = state.own.requests.length === 1;
  }};
}

function beginOwn() {
  const preset = name => element("button", {onclick: () => openOwn(PRESETS[name])}, name);
  const box = element("textarea", {rows: 5, ariaLabel: "requests", placeholder: [
    "500 60", "40 120 25", '{"prompt": 300, "answer": 80}', "or a text"].join("\n")});
  const said = element("span", {className: "soft", role: "status"});
  const note = element("span", {id: "note", className: "bad", role: "status"});
  const paste = element("details", {className: "paste"}, element("summary", {}, "paste requests"),
    soft("A line for each request: “prompt answer arrival”, in tokens and ms, a line of .csv with "
         + "a header, of .jsonl, or a text. Four characters of a text count as a token; no answer: "
         + "64. The knobs stay as they are."), box,
    element("button", {onclick: () => {
      try {
        const {requests, common} = parsed(box.value);
        edit(own => Object.assign(own, {requests, common: common || own.common}));
        said.textContent = `${plural(requests.length, "request")}: ` + requests.slice(0, 3).map(
          ([prompt, answer, at]) => `${prompt} and ${answer} tokens at ${at} ms`).join("; ")
          + (requests[3] ? "; …" : ".");
      } catch (error) {
        said.textContent = error.message;
      }
    }}, "use these"), said);
  const copy = element("button", {id: "copy", onclick: async () => {
    const link = location.href.split("#")[0] + address();
    await navigator.clipboard?.writeText(link).catch(() => {});
    copy.textContent = "copied";
    setTimeout(() => { copy.textContent = "copy link"; }, 1500);
  }}, "copy link");
  $("presets").append(element("span", {}, "Begin with:"), ...Object.keys(PRESETS).map(preset),
                      element("button", {id: "undo", onclick: undo}, "undo"),
                      element("button", {id: "redo", onclick: redo}, "redo"), copy);
  $("pasting").append(paste, note);
  for (const [name, [title, values, , meaning]] of Object.entries(KNOBS)) {
    const knob = bar(`${title}: ${meaning}`, "knob", values, n => { state.own[name] = n; });
    knob.node.prepend(element("span", {title: meaning}, title));
    knobs[name] = knob;
    $("knobs").append(knob.node);
  }
  $("more").onclick = () => edit(({requests}) => requests.push([...requests.at(-1)]));
}

const COLUMNS = {   // of pasted lines: the names that they may have, here and in public traces
  prompt: ["prompt", "prompt_tokens", "input_tokens", "contexttokens", "input_length"],
  answer: ["answer", "max_new_tokens", "max_tokens", "completion_tokens", "output_tokens",
           "generatedtokens", "output_length"],
  arrival: ["arrival", "arrival_ms"], shared: ["shared"], timestamp: ["timestamp", "seconds"]};
const numbers = line => /^[-\d\s,;.]+$/.test(line) && line.split(/[\s,;]+/).map(Number);
const cells = line => line.split(/[,;]/).map(cell => cell.trim());

// What a line says: {prompt, answer, ...}. heads: the names of its columns, if the first line has.
function entryOf(line, heads) {
  let given = {prompt: line};
  if (line.startsWith("{")) given = JSON.parse(line);
  else if (heads) given = Object.fromEntries(cells(line).map((cell, k) => [heads[k], cell]));
  else if (numbers(line)) {
    given = Object.fromEntries(numbers(line).map((n, k) => [Object.keys(COLUMNS)[k], n]));
  }
  return Object.fromEntries(Object.entries(COLUMNS).map(
    ([column, names]) => [column, names.map(name => given[name]).find(it => it != null)]));
}

// Requests in a text. Error with a line that says what is wrong.
function parsed(text) {
  const lines = text.split("\n").map(line => line.trim()).filter(Boolean);
  const head = cells((lines[0] ?? "").toLowerCase());
  const heads = head.some(name => COLUMNS.prompt.includes(name)) && head.length > 1 ? head : null;
  if (heads) lines.shift();
  else if (head.length > 1 && !/[{\d]/.test(lines[0]) && numbers(lines[1] ?? "")) {
    throw Error(`line 1: no column of prompts; it may be called ${COLUMNS.prompt.join(", ")}`);
  }
  if (!lines.length || lines.length > MOST) {
    throw Error(`1 to ${MOST} requests, please; there are ${lines.length} lines`);
  }
  const entries = lines.map((line, i) => {
    try {
      return entryOf(line, heads);
    } catch {
      throw Error(`line ${i + 1} is not JSON`);
    }
  });
  const without = entries.findIndex(({prompt}) => prompt === undefined);
  if (without >= 0) {
    throw Error(`line ${without + 1 + Boolean(heads)}: no prompt; it may be called `
                + COLUMNS.prompt.join(", "));
  }
  const texts = entries.map(({prompt}) => !heads && typeof prompt === "string" ? prompt : "");
  const shared = entries.map((entry, i) => entry.shared ?? Math.floor(largest(
    texts.map((text, k) => k === i ? 0 : alike(texts[i], text))) / 4));
  const ms = time => time == null ? 0 : isNaN(time) ? Date.parse(time) : 1e3 * time;
  const requests = entries.map(({prompt, answer = 64, arrival, timestamp}, i) => {
    arrival ??= ms(timestamp) - ms(entries[0].timestamp);
    const one = [texts[i] ? Math.ceil(prompt.length / 4) : heads ? Number(prompt) : prompt,
                 Number(answer), Math.round(arrival), shared[i] >= 16 ? 1 : 0];
    for (const [k, [what, least, most]] of LIMITS.entries()) {
      if (isLength(one[k], least, most)) continue;
      throw Error(`line ${i + 1 + Boolean(heads)}: ${what} must be a whole number from ${least} to `
                  + `${number(most)}, not ${[prompt, answer, arrival][k]}`);
    }
    return one;
  });
  const sharing = shared.filter(n => n >= 16);
  return {requests, common: sharing.length ? Math.min(...sharing) : 0};
}

// --- drawing -------------------------------------------------------------------------------------

function rowHigh() {                     // of the timeline, in pixels: as the controls' rows
  const rows = state.own.requests.length;
  return innerWidth <= 760 ? Math.max(4, Math.min(14, Math.floor(130 / rows))) : 30;
}

function drawOwn({run, wide}) {          // the controls show the state
  const {requests} = state.own;
  $("note").textContent = damage;
  while (rows.length < requests.length) rows.push(row(rows.length));
  const there = $("rows").children;      // the others stay where they are: one may have the focus
  while (there.length > requests.length) there[there.length - 1].remove();
  while (there.length < requests.length) $("rows").append(rows[there.length].node);
  $("own").style.setProperty("--wide", wide - 2 + "px");
  $("title").textContent = `${run.name}, ms ${DATA.clock}`;
  const end = state.held ?? largest(shown().map(endOf));
  requests.forEach((request, r) => rows[r].show(request, end));
  for (const name of Object.keys(KNOBS)) knobs[name].show(state.own[name]);
  const speeds = stages => stages.map(
    ([stage, score]) => `${stage} ${score ? rounded(score.speed) : "–"}`).join(" · ");
  const scores = Object.entries(ownScores());
  $("brief").textContent = `tokens/s, without a limit of memory: ${speeds(scores.slice(0, 3))}; `
    + `in ${number(state.own.memory)} tokens: ${speeds(scores.slice(3))}`;
  $("undo").disabled = !earlier.length;
  $("redo").disabled = !undone.length;
  $("more").disabled = requests.length === MOST;
}

function ownScores() {                   // {stage: its figures}
  return Object.fromEntries(Object.keys(LADDER).map(stage => [stage, figuresOf(ownRun(stage))]));
}

function ownScoreboard() {
  const marks = {[state.beside]: "beside it", [state.run]: "shown"};
  return scoreboard(ownScores(), run => {
    change(run === state.beside ? {run, beside: state.run} : {run});   // or twice the same
    $("views").querySelector(".scores [aria-pressed=true]").focus();   // as it was
  }, marks);
}

function sayOwn(view) {                  // the plan, and what waits for what
  const {run, now, states, number} = view;
  const queue = run.requests.map((request, r) => ({...request, kind: states[r].kind})).filter(
    ({kind}) => ["waiting", "preempted"].includes(kind)).sort((a, b) => a.arrived - b.arrived);
  const names = queue.map(({name, kind}) => name + (kind === "preempted" ? " (preempted)" : ""));
  if (names.length > 8) names.splice(8, Infinity, `and ${names.length - 8} more`);
  const wait = !names.length || !now.passes.length ? ""
    : ` ${names.join(" ")} wait${names.length > 1 ? "" : "s"} for ${waitsFor(run, now, queue[0])}.`;
  const never = run.requests.filter(({refused}) => refused);
  const others = never.slice(1).map(({name}) => name).join(" ");
  const misfits = never.length ? ` ${never[0].name} can never run: ${never[0].refused}`
    + `${others && `; nor can ${others}`}.` : "";
  const plan = never.length === run.requests.length ? "nothing runs."
    : sayPlan(view, partsNow(view)) + eventsSay(view) + pagesSay(run, now);
  const who = state.beside ? `${run.name}, step` : "Step";
  const text = `${who} ${now.step}: ${plan}${wait}${misfits}`;
  const node = number ? $("other").firstElementChild : $("said");
  if (node.textContent !== text) node.textContent = text;
}

const EVENTS = {waiting: ["arrives", "arrive"], prefill: ["begins", "begin"],
                recomputed: ["begins again", "begin again"], done: ["ends", "end"]};

function eventsSay({run, states}) {      // who has another state than a tick ago
  const was = kindsAt(run, state.tick - 1);
  const said = Object.entries(EVENTS).flatMap(([kind, [one, many]]) => {
    const names = run.requests.filter((_, r) => states[r].kind === kind && was[r] !== kind);
    return names.length ? `${names.map(({name}) => name).join(" ")} ${names[1] ? many : one}` : [];
  });
  return said.length ? ` ${said.join(", ")}.` : "";
}

// Who found its first tokens in pages, and who lost its pages in this step.
function pagesSay(run, now) {
  const here = ({pass}) => now.passes.includes(pass);
  const changes = (run.pool ? run.requests : []).flatMap(({name, rooms, work, ...request}) => {
    const at = rooms.findIndex(here), [before, after] = [rooms[at - 1]?.room, rooms[at]?.room];
    const over = atMost(request.steps, now.step) === request.generated.length;
    return at < 0 ? [] : [{name, before, after, over, found: work.find(here)?.first}];
  });
  const grown = changes.filter(({before, after}) => before && after?.length > before.length);
  const takers = grown.map(({name}) => name).join(" and ");
  const taken = grown.reduce((sum, {before, after}) => sum + after.length - before.length, 0);
  return changes.flatMap(({name, before, after, over, found}) => {
    if (!before && after && found) return ` ${found} tokens of ${name} were found in the cache.`;
    if (!before || after || over) return [];
    return takers ? ` Pages ran out: ${name}, the last to come, gave back ${before.length}; `
        + `${takers} took ${taken}.`
      : ` ${name} needed a page, and none was free: it gave back ${before.length}.`;
  }).join("");
}

const FIRST = {unbatched: "a turn", naive: "the batch", dynamic: "a place"};

function waitsFor(run, now, {name, prompt, limit, steps}) {   // the first in the queue
  const {knobs, passes, pool} = run, [first] = now.passes, reserved = passes.reserved[first];
  if (FIRST[run.name]) return FIRST[run.name];
  if (passes.at_once[first] === knobs.max_batch) return "a place";
  if (tokensIn(run, now) === knobs.token_budget) return "the token budget";
  const known = prompt.length + atMost(steps, now.step);   // when it is admitted, and preempted
  const [need, free, unit] = pool
    ? [Math.ceil(known / pool.page_size), pool.pages - reserved / pool.page_size, "page"]
    : [prompt.length + limit - 1, knobs.max_kv_tokens - reserved, "token"];
  const does = run.name === "prefix" ? "needs at most" : pool ? "needs" : "would reserve";
  const less = pool ? "" : " (the last one of its answer needs none)";
  return `memory: ${name} ${does} ${plural(need, unit)}${less}, ${number(free)} free`;
}
