"use strict";
// Replays recorded runs. Top to bottom: the runs, the state and its address, the panels, the
// controls. Whatever comes from a prompt enters the page as textContent, never as HTML.

// --- the runs -----------------------------------------------------------------------------------

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = new Map(DATA.runs.map(run => [run.name, prepare(run)]));
const COUNTS = ["slots", "useful", "recomputed", "pad_slots", "finished_slots", "padded_keys",
                "score_entries", "useful_scores", "copied_bytes", "ms"];

// Adds what is looked up often: passes of each step, running totals, and each request's events.
function prepare(run) {
  const p = run.passes, n = p.step.length;
  p.slots = p.shape.map(shape => shape.reduce((a, b) => a * b));
  run.steps = [];                        // {step, passes: [...], start, end}, only those with a pass
  for (let i = 0; i < n; i++) {
    const last = run.steps.at(-1);
    if (last && last.step === p.step[i]) last.passes.push(i);
    else run.steps.push({step: p.step[i], passes: [i], start: p.start[i]});
  }
  for (const request of run.requests) {
    request.prompt = DATA.prompts[request.prompt];
    request.tokens = [...request.prompt, ...request.generated];
    request.work = [];                   // [pass, first, n, reached before]
    request.rooms = [];                  // [pass, capacity, block table or null]
    request.resets = [];                 // [pass, tokens in the cache]
  }
  for (let i = 0; i < n; i++) {
    for (let j = 0; j < p.work[i].length; j += 3) {
      const [r, first, count] = p.work[i].slice(j, j + 3), work = run.requests[r].work;
      const before = work.at(-1);
      work.push([i, first, count, before ? Math.max(before[3], before[1] + before[2]) : 0]);
    }
    for (const [r, room] of Object.entries(p.room[i] ?? {})) run.requests[r].rooms.push([i, room]);
    for (const [r, c] of Object.entries(p.computed[i] ?? {})) run.requests[r].resets.push([i, c]);
  }
  run.kept = Object.entries(p.kept).map(([i, pages]) => [Number(i), pages]);
  const tokenTimes = run.requests.flatMap(request => request.ms);
  run.steps.forEach((step, k) => {
    const last = step.passes.at(-1);
    step.end = run.steps[k + 1]?.start ?? tokenTimes.reduce((a, b) => Math.max(a, b),
                                                            step.start + p.ms[last]);
  });
  run.totals = {};                       // name -> sums over the passes 0..i
  for (const name of ["slots", "useful", "recomputed", "pad_slots", "finished_slots", "padded_keys",
                      "score_entries", "useful_scores", "copied_bytes", "ms"]) {
    let sum = 0;
    run.totals[name] = p[name].map(value => sum += value);
  }
  run.mostTokens = Math.max(...run.steps.map(step => tokensOf(run, step)));
  return run;
}

function tokensOf(run, step) {           // computed for running requests in a step
  let sum = 0;
  for (const i of step.passes) {
    for (let j = 2; j < run.passes.work[i].length; j += 3) sum += run.passes.work[i][j];
  }
  return sum;
}

// The last of `events`, sorted by their first entry, at or before `key`.
function last(events, key) {
  let low = 0, high = events.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (events[middle][0] <= key) low = middle + 1; else high = middle;
  }
  return events[low - 1];
}

function countUpTo(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1; else high = middle;
  }
  return low;
}

const decoder = new TextDecoder(), encoder = new TextEncoder();

function textOf(tokens) {
  if (!DATA.vocabulary) return tokens.length + " tokens";
  const pieces = tokens.map(id => DATA.vocabulary[id]);
  if (pieces.every(piece => typeof piece === "string")) return pieces.join("");
  // a character may be spread over several tokens
  return decoder.decode(Uint8Array.from(pieces.flatMap(
    piece => typeof piece === "string" ? [...encoder.encode(piece)] : piece)));
}

function word(run, owner, position) {    // a token, short
  const request = run.requests[owner];
  if (state.cells === "position" || !DATA.vocabulary) {
    return state.cells === "position" ? String(position) : request.name + position;
  }
  const piece = DATA.vocabulary[request.tokens[position]];
  if (typeof piece !== "string") return piece.map(byte => byte.toString(16)).join(" ");
  return piece.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ /, "␣");
}

// What is known of a run at a step: the pass that ends it, and whether a pass runs at all.
function momentOf(run) {
  const value = ticks[state.tick], byStep = state.clock === "step";
  let k = 0;
  if (byStep) k = countUpTo(run.steps.map(step => step.step), value) - 1;
  else k = Math.min(countUpTo(run.steps.map(step => step.end), value - 1e-9), run.steps.length - 1);
  const step = run.steps[k];
  const busy = step && (byStep ? step.step === value : value <= step.end + 1e-9);
  return {k, step: byStep ? value : step.step, passes: busy ? step.passes : [],
          pass: step ? step.passes.at(-1) : -1, over: k === run.steps.length - 1 && !busy};
}

function stateOf(run, request, now) {
  const tokens = countUpTo(request.steps, now.step);
  const work = last(request.work, now.pass), end = work ? work[1] + work[2] : 0;
  const reset = last(request.resets, now.pass), holds = last(request.rooms, now.pass)?.[1] ?? null;
  const computed = reset && (!work || reset[0] > work[0]) ? reset[1] : end;
  const all = tokens === request.generated.length && work === request.work.at(-1);
  const active = Boolean(work) && now.passes.includes(work[0]);
  const result = {tokens, computed, holds, active, kind: "waiting", words: "○ waiting"};
  const prompt = request.prompt.length;
  if (request.arrival > now.step) {
    Object.assign(result, {kind: "absent", words: `– arrives at ${request.arrival}`});
  } else if (all && request.reason && (tokens || now.step >= request.arrival)) {
    Object.assign(result, {kind: "done", words: `■ done (${request.reason})`});
  } else if (active || (work && (holds !== null || !run.pool))) {
    const again = active && end <= work[3];
    const far = Math.min(computed, prompt);
    const kind = again ? "recomputed" : tokens && computed >= prompt && work[1] >= prompt ? "decode" : "prefill";
    const words = {recomputed: `↻ computed again, ${end} of ${work?.[3]}`, decode: "● decoding",
                   prefill: `◐ prefilling ${far}/${prompt}`}[kind];
    Object.assign(result, {kind, words});
  } else if (work) {
    Object.assign(result, {kind: "preempted", words: "↺ preempted"});
  }
  return result;
}

// --- the state, and the address that says it ------------------------------------------------------

const names = [...RUNS.keys()];
const state = {run: names[0], beside: "", clock: "step", tick: 0, slot: null, stop: null,
               cells: "token"};
let ticks = [];                          // of the clock: steps, or milliseconds at which a step ends
let pointed = null;                      // slot under the mouse or the keyboard: "view.pass.row.column"
const inFrame = location.protocol === "about:";   // a notebook's frame has no address of its own

const shown = () => [state.run, state.beside].filter(Boolean).map(name => RUNS.get(name));

function setTicks(value) {
  const steps = shown().flatMap(run => run.steps);
  ticks = [...new Set(steps.map(step => state.clock === "step" ? step.step : step.end))];
  ticks.sort((a, b) => a - b);
  state.tick = Math.max(0, countUpTo(ticks, value + 1e-9) - 1);
}

function address() {
  const parts = new URLSearchParams({run: state.run});
  if (state.beside) parts.set("beside", state.beside);
  parts.set(state.clock, ticks[state.tick]);
  if (state.slot) parts.set("slot", state.slot);
  if (state.stop !== null) parts.set("stop", state.stop + 1);
  if (state.cells !== "token") parts.set("cells", state.cells);
  if (document.documentElement.dataset.theme) parts.set("theme", document.documentElement.dataset.theme);
  return "#" + parts;
}

function readAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const known = (name, otherwise) => RUNS.has(parts.get(name)) ? parts.get(name) : otherwise;
  state.run = known("run", names[0]);
  state.beside = known("beside", parts.has("run") ? "" : names.length > 1 ? firstPair()[1] : "");
  if (!parts.has("run")) state.run = firstPair()[0];
  state.clock = parts.has("ms") ? "ms" : "step";
  state.cells = parts.get("cells") === "position" ? "position" : "token";
  setTheme(["dark", "light"].includes(parts.get("theme")) ? parts.get("theme") : "");
  setTicks(Number(parts.get(state.clock)) || 0);
  state.slot = slotNamed(parts.get("slot")) ? parts.get("slot") : null;
  const stop = Number(parts.get("stop")) - 1;
  state.stop = DATA.walk[stop] ? stop : null;
  build();
}

// Two stages that differ, to begin with: the first stop's, or else the first run alone.
function firstPair() {
  const show = DATA.walk[0]?.show;
  return show ? [show.run, show.beside ?? ""] : [names[0], names[1] ?? ""];
}

function go(tick) {                      // to another moment
  tick = Math.max(0, Math.min(ticks.length - 1, tick));
  if (tick === state.tick) return;
  Object.assign(state, {tick, slot: null, stop: null});
  pointed = null;
  render();
}

function show(change) {                  // other runs, or another clock, at the same moment
  const value = ticks[state.tick];
  const step = momentOf(RUNS.get(state.run)).step;
  const sameClock = !change.clock || change.clock === state.clock;
  Object.assign(state, change, {slot: null, stop: null});
  const run = RUNS.get(state.run), k = Math.max(0, countUpTo(run.steps.map(s => s.step), step) - 1);
  setTicks(sameClock ? value : state.clock === "ms" ? run.steps[k].end : step);
  build();
}

// --- small helpers for the DOM --------------------------------------------------------------------

function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "style") node.style.cssText = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const number = n => n.toLocaleString("en-US");
const ms = x => x.toLocaleString("en-US", {minimumFractionDigits: 1, maximumFractionDigits: 1}) + " ms";
const plural = (n, what) => `${number(n)} ${what}${n === 1 ? "" : what.endsWith("s") ? "es" : "s"}`;

// --- the panels -----------------------------------------------------------------------------------

const PANELS = {run: drawRun, timeline: drawTimeline, plan: drawPlan, bill: drawBill,
                tensor: drawTensor, sees: drawSees, requests: drawRequests, memory: drawMemory};
const TITLES = {run: "The run", timeline: "Timeline", plan: "Plan of this step", bill: "Bill so far",
                tensor: "Tensor", sees: "Who sees whom", requests: "Requests", memory: "Memory"};
let views = [];                          // one for each run: {run, number, panels: {name: element}}

function build() {                       // the panels of the shown runs, then everything in them
  const main = document.getElementById("views");
  main.className = shown().length === 2 ? "two" : "one";
  views = shown().map((run, i) => ({run, number: i, panels: {}}));
  main.replaceChildren();
  for (const name of Object.keys(PANELS)) {
    for (const view of views) {
      const heading = element("h2", {}, TITLES[name]);
      if (views.length === 2) heading.append(element("small", {}, " · " + view.run.name));
      const body = element("div", {className: "body"});
      const panel = element("section", {className: "panel " + name, style: `--area: ${name}`}, heading, body);
      panel.setAttribute("aria-label", `${TITLES[name]}, ${view.run.name}`);
      view.panels[name] = body;
      main.append(panel);
    }
  }
  for (const view of views) {
    drawRun(view);
    drawTimeline(view);
  }
  render();
}

function render() {                      // what depends on the moment
  for (const view of views) {
    const now = view.now = momentOf(view.run);
    moveCursor(view);
    view.states = view.run.requests.map(request => stateOf(view.run, request, now));
    drawPlan(view);
    drawTensor(view);
    drawRequests(view);
    drawMemory(view);
    drawBill(view);
  }
  drawPointed();
  drawControls();
  if (!inFrame) history.replaceState(null, "", address());
}

function drawRun({run, panels}) {
  const knobs = Object.entries(run.knobs).filter(([, value]) => value !== null)
    .map(([name, value]) => `${name} ${value}`).join(", ");
  const check = element("p", {className: run.check.wrong && Object.keys(run.check.wrong).length ? "bad" : ""},
    element("b", {}, "Check: "), run.check.summary);
  for (const [name, detail] of Object.entries(run.check.wrong ?? {})) {
    check.append(element("br"), `WRONG: ${name}: ${detail}`);
  }
  const {left_out, wrong, sentences} = run.xray;
  const xray = element("p", {className: wrong ? "bad" : ""}, element("b", {}, "X-ray: "),
    left_out ? `left out, since ${left_out}`
    : wrong ? `${plural(wrong, "token")} saw what no token may see: ${sentences.join("; ")}; …`
    : "every token saw its own request up to itself, and nothing else");
  panels.run.replaceChildren(element("p", {}, run.idea),
    element("p", {className: "soft"}, [knobs, run.place].filter(Boolean).join(" · ")), check, xray);
}

// The timeline: a row for each request, a column for each step, as in the repository's pictures.

const ROOM = {band: 40, axis: 16};
const inkOf = name => {                  // a colour as the theme resolves it
  const probe = element("span", {style: `color: var(--${name})`});
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
};

function hatching(context, color, angles) {
  const tile = element("canvas", {width: 6, height: 6}), pen = tile.getContext("2d");
  pen.strokeStyle = color;
  for (const up of angles) {
    for (const shift of [-6, 0, 6]) {
      pen.moveTo(shift, up ? 6 : 0);
      pen.lineTo(shift + 6, up ? 0 : 6);
    }
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

const axisEnd = () => Math.max(...shown().map(run => {
  const step = run.steps.at(-1);
  return state.clock === "step" ? step.step + 1 : step.end;
}));
const spanOf = step => state.clock === "step" ? [step.step, step.step + 1] : [step.start, step.end];

function drawTimeline(view) {
  const {run, panels: {timeline}} = view;
  const rows = run.requests.length, high = Math.max(1, Math.min(13, Math.floor(240 / rows)));
  const labels = high >= 10 ? 8 + 7 * Math.max(...run.requests.map(r => Math.min(r.name.length, 8))) : 0;
  const canvas = element("canvas", {role: "img"});
  canvas.setAttribute("aria-label", `Every request at every step; ${plural(run.steps.length, "step")}`);
  const cursor = element("div", {className: "cursor"});
  const box = element("div", {className: "box"}, canvas, cursor);
  timeline.replaceChildren(box);
  const wide = box.clientWidth || 300, tall = rows * high + 6 + ROOM.band + ROOM.axis;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = wide * ratio;
  canvas.height = tall * ratio;
  canvas.style.height = tall + "px";
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const end = axisEnd(), x = value => labels + (wide - labels - 2) * value / end;
  Object.assign(view, {x, box, cursor, labels, wide, end});

  const color = Object.fromEntries(["prefill", "decode", "recomputed", "finished", "blank", "waiting",
                                    "ink", "soft", "line"].map(name => [name, inkOf(name)]));
  const hatch = {blank: hatching(pen, inkOf("stripe"), [true]),
                 finished: hatching(pen, "#ffffffb0", [true, false])};
  const paint = (kind, left, top, width, height) => {
    for (const fill of [color[kind], hatch[kind]]) {
      if (fill) { pen.fillStyle = fill; pen.fillRect(left, top, width, height); }
    }
    pen.fillStyle = kind === "decode" ? "#ffffffcc" : "#000000aa";   // marks for grey readers
    if (kind === "decode" && height >= 5 && width >= 2) pen.fillRect(left, top + height - 3, width, 1);
    if (kind === "recomputed" && height >= 5) pen.fillRect(left + width / 2 - 1, top + height / 2 - 1, 2, 2);
  };

  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  run.requests.forEach((request, r) => {
    const top = r * high, middle = top + high / 2;
    pen.fillStyle = color.ink;
    if (labels) pen.fillText(request.name.slice(0, 8), 0, middle);
    let since = state.clock === "step" ? request.arrival : request.arrived;
    for (const [pass, first, n, reached] of request.work) {
      const step = run.steps[last(run.stepOfPass ??= run.steps.map((s, k) => [s.passes[0], k]), pass)[1]];
      const [from, to] = spanOf(step), left = x(from), width = Math.max(x(to) - left - (x(to) - left > 4 ? 1 : 0), 0.5);
      if (from > since) {
        pen.fillStyle = color.waiting;
        pen.fillRect(x(since), middle - 0.5, left - x(since), 1);
      }
      since = to;
      const shape = run.passes.shape[pass];
      const own = shape.length === 2 && shape[0] === run.passes.work[pass].length / 3 + run.passes.finished[pass].length;
      const slots = own ? shape[1] : n, again = Math.max(0, Math.min(reached, first + n) - first);
      const full = high >= 4 ? high - 1 : high;
      let y = top;
      for (const [kind, count] of [["recomputed", again],
                                   [first + again >= request.prompt.length ? "decode" : "prefill", n - again],
                                   ["blank", slots - n]]) {
        if (count) paint(kind, left, y, width, full * count / slots);
        y += full * count / slots;
      }
    }
  });
  const most = Math.max(...shown().flatMap(other => other.steps.map(step => sum(other, "slots", step))));
  const floor = rows * high + 6 + ROOM.band;
  run.steps.forEach(step => {
    const [from, to] = spanOf(step), left = x(from), width = Math.max(x(to) - left - (x(to) - left > 4 ? 1 : 0), 0.5);
    for (const pass of step.passes) {
      for (const r of run.passes.finished[pass]) paint("finished", left, r * high, width, high >= 4 ? high - 1 : high);
    }
    let y = floor;
    for (const [kind, name] of [["decode", "useful"], ["recomputed", "recomputed"], ["blank", "pad_slots"],
                                ["finished", "finished_slots"]]) {
      const height = ROOM.band * sum(run, name, step) / most;
      y -= height;
      if (height) paint(kind, left, y, width, height);
    }
  });
  pen.fillStyle = color.soft;
  if (labels) pen.fillText("slots", 0, floor - ROOM.band / 2);
  pen.fillRect(labels, floor, wide - labels, 1);
  const unit = niceUnit(end * 60 / (wide - labels));
  for (let value = 0; value < end; value += unit) {
    pen.fillRect(x(value), floor, 1, 4);
    pen.fillText(number(value) + (value === 0 ? (state.clock === "step" ? " steps" : " ms") : ""), x(value) + 3, floor + 10);
  }
}

const sum = (run, name, step) => step.passes.reduce((total, i) => total + run.passes[name][i], 0);

function niceUnit(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map(m => m * power).find(unit => unit >= least);
}

function moveCursor({run, x, cursor, now}) {
  const value = ticks[state.tick];
  const step = run.steps[now.k];
  const [from, to] = now.over || !step ? [value, value] : spanOf(step);
  cursor.style.left = x(from) - 2 + "px";
  cursor.style.width = Math.max(4, x(to) - x(from) + 3) + "px";
}

// The plan: the token budget as a bar.

function drawPlan({run, now, panels}) {
  const budget = run.knobs.token_budget ?? null, scale = Math.max(budget ?? 0, run.mostTokens);
  const bar = element("div", {className: "bar"}), parts = [];
  for (const i of now.passes) {
    for (let j = 0; j < run.passes.work[i].length; j += 3) {
      const [r, first, n] = run.passes.work[i].slice(j, j + 3), request = run.requests[r];
      const reached = last(request.work, i)[3];
      const kind = first < reached ? "recomputed" : first >= request.prompt.length ? "decode" : "prefill";
      parts.push({kind, n, name: request.name});
      const label = n * 40 > scale ? `${request.name} ${n > 1 ? n : ""}` : "";
      bar.append(element("span", {className: kind, title: `${request.name}: ${plural(n, "token")}, ${DATA.names[kind]}`,
                                  style: `width: ${100 * n / scale}%`}, label));
    }
  }
  const tokens = parts.reduce((total, part) => total + part.n, 0);
  const count = kind => parts.filter(part => part.kind === kind);
  const chunks = parts.filter(part => part.kind !== "decode");
  const words = !now.passes.length ? (now.over ? "All requests are done: nothing is computed." : "Nothing is computed in this step.")
    : (budget ? `${tokens} of ${plural(budget, "token")}: ` : `${plural(tokens, "token")}: `)
      + [count("decode").length && plural(count("decode").length, "decode"),
         chunks.length && "prefill of " + chunks.slice(0, 6).map(part => `${part.name} (${part.n})`).join(", ")
           + (chunks.length > 6 ? ", …" : "")].filter(Boolean).join(", then ") + ".";
  panels.plan.replaceChildren(bar, element("p", {}, words),
    element("p", {className: "soft"}, budget ? `token budget ${budget}` : `This stage has no token budget; the bar is as long as its largest step, ${plural(scale, "token")}.`));
}

// The tensor: every slot of every pass, in its true shape.

// {owner, position, n, sees, pads, blanks, shift, kind} of a slot; see toolbox/recorder.py.
function slotAt(run, pass, row, column) {
  let start = 0;
  for (const slots of run.passes.rows[pass][row] ?? []) {
    const [owner, first, n, sees = null, grows = 1, pads = 0, blanks = 0, shift = 0] = slots;
    if (column < start + n) {
      const k = column - start, ranges = [];
      for (let i = 0; i < (sees?.length ?? 0); i += 3) ranges.push(sees.slice(i, i + 3));
      if (ranges.length) ranges.at(-1)[2] += grows * k;
      const position = owner >= 0 ? first + k : 0;
      return {owner, position, ranges: sees && ranges, pads, blanks, shift,
              kind: kindOf(run, pass, owner, position)};
    }
    start += n;
  }
  return null;
}

function kindOf(run, pass, owner, position) {
  if (owner < 0) return owner === -1 ? "pad" : "finished";
  const request = run.requests[owner];
  if (position < last(request.work, pass)[3]) return "recomputed";
  return position < request.prompt.length ? "prefill" : "decode";
}

function slotNamed(name) {               // "view.pass.row.column" -> its parts, if there is such a slot
  const parts = (name ?? "").split(".").map(Number), run = shown()[parts[0]];
  return parts.length === 4 && run && run.passes.rows[parts[1]] && slotAt(run, ...parts.slice(1)) ? parts : null;
}

function drawTensor(view) {
  const {run, now, panels: {tensor}} = view;
  const wide = tensor.clientWidth - 6;
  view.slots = new Map();
  const parts = now.passes.map((i, k) => {
    const p = run.passes, rows = p.rows[i], width = p.shape[i].at(-1), flat = p.shape[i].length === 1;
    const labels = flat ? 0 : 4 + 7.5 * Math.max(...rows.map(row => Math.min(8, rowName(run, row).length)));
    const cell = Math.max(5, Math.min(64, Math.floor((wide - labels) / width) - 1));
    const grid = element("div", {className: "grid", tabIndex: 0, role: "application",
      style: `--high: ${rows.length > 16 ? 13 : 22}px; grid-template-columns: ${flat ? "" : labels + "px "}repeat(${width}, ${cell}px)`});
    grid.setAttribute("aria-label", "Slots of the tensor; the arrow keys move from slot to slot");
    grid.dataset.pass = i;
    grid.dataset.view = view.number;
    if (flat) {
      for (const [owner, , n] of mergeOwners(rows[0])) {
        grid.append(element("span", {className: "name above", style: `grid-column: span ${n}`}, run.requests[owner].name));
      }
    }
    rows.forEach((row, b) => {
      if (!flat) grid.append(element("span", {className: "name", title: rowName(run, row)}, rowName(run, row)));
      let column = 0;
      for (const [owner, first, n] of row) {
        for (let k = 0; k < n; k++, column++) {
          const kind = kindOf(run, i, owner, first + k), name = `${view.number}.${i}.${b}.${column}`;
          const text = owner >= 0 && cell >= 17 ? word(run, owner, first + k) : "";
          const slot = element("i", {className: "slot " + kind, textContent: text});
          slot.dataset.slot = name;
          view.slots.set(name, slot);
          grid.append(slot);
        }
      }
    });
    const counts = [["useful", "useful"], ["computed again", "recomputed"], ["pads", "pad_slots"],
                    ["finished", "finished_slots"]].filter(([, name]) => p[name][i] || name === "useful");
    const caption = element("p", {}, element("b", {}, `(${p.shape[i].join(", ")})` + (flat ? ",".repeat(0) : "")),
      ` ${now.passes.length > 1 ? `pass ${k + 1} of ${now.passes.length}: ` : ""}${plural(p.slots[i], "slot")}, `
      + counts.map(([what, name]) => `${number(p[name][i])} ${what}`).join(", ") + `; ${ms(p.ms[i])}`);
    return element("div", {className: "pass"}, caption, element("div", {className: "scroll"}, grid));
  });
  if (!parts.length) parts.push(element("p", {className: "soft"}, now.over ? `This run ended with step ${run.steps.at(-1).step}.` : "No forward pass."));
  tensor.style.minHeight = tensorHeight(run) + "px";
  tensor.replaceChildren(...parts);
}

// So that the panels below do not move from step to step, the tensor keeps room for its tallest.
function tensorHeight(run) {
  run.tallest ??= Math.max(...run.steps.map(step => step.passes.reduce((total, i) => {
    const rows = run.passes.rows[i].length;
    return total + 38 + (run.passes.shape[i].length === 1 ? 45 : rows * (rows > 16 ? 14 : 23));
  }, 0)));
  return Math.min(run.tallest, 420);
}

function rowName(run, row) {             // of a rectangle's row: the requests in it
  const owners = new Set(row.filter(([owner]) => owner !== -1).map(([owner]) => owner < -1 ? -2 - owner : owner));
  return [...owners].map(owner => run.requests[owner].name).join(" ");
}

function mergeOwners(row) {
  const merged = [];
  for (const [owner, first, n] of row) {
    if (merged.at(-1)?.[0] === owner) merged.at(-1)[2] += n; else merged.push([owner, first, n]);
  }
  return merged;
}

// Who sees whom: the keys of the slot that is pointed at.

// The keys of a slot's row, in their order: [{owner, position, column, past}, ...], owner -1: a pad.
function keysOf(run, pass, row, slot) {
  const p = run.passes, keys = [], slots = p.rows[pass][row], flat = p.shape[pass].length === 1;
  const owners = flat ? [slot.owner] : [...new Set(slots.filter(([owner]) => owner !== -1).map(([owner]) => owner < -1 ? -2 - owner : owner))];
  const past = owners.flatMap(owner => {
    const request = run.requests[owner], work = last(request.work, pass);
    const end = work[0] === pass ? work[1] : work[1] + work[2];
    return Array.from({length: end}, (_, position) => ({owner, position, past: true}));
  });
  for (let i = past.length; i < p.past[pass]; i++) keys.push({owner: -1, past: true});
  keys.push(...past);
  let column = 0;
  for (const [owner, first, n] of slots) {
    for (let k = 0; k < n; k++, column++) {
      if (!flat || owner === slot.owner) keys.push({owner, position: first + k, column, past: false});
    }
  }
  return keys;
}

// Marks each key: "past", "new" (seen, rightly), "pad", "unseen", "wrong" or "missing".
function markKeys(run, pass, row, slot) {
  const keys = keysOf(run, pass, row, slot);
  const sees = (owner, position) => slot.ranges.some(([r, from, to]) => r === owner && from <= position && position < to);
  const found = new Set();
  for (const key of keys) {
    if (key.owner < 0) { key.mark = "pad"; continue; }
    const seen = sees(key.owner, key.position);
    const may = slot.owner < 0 || (key.owner === slot.owner && key.position <= slot.position);
    key.mark = seen ? (may ? (key.past ? "past" : "new") : "wrong") : may && slot.owner >= 0 ? "missing" : "unseen";
    if (seen) found.add(key.owner + "." + key.position);
  }
  for (const [owner, from, to] of slot.ranges) {     // seen, although not in its row at all
    for (let position = from; position < to; position++) {
      if (!found.has(owner + "." + position)) keys.push({owner, position, past: true, mark: "wrong"});
    }
  }
  // Pads look alike to the X-ray, which counts them: the last ones are marked.
  const newPads = keys.filter(key => key.owner < 0 && !key.past), pastPads = keys.filter(key => key.owner < 0 && key.past);
  const fresh = Math.min(slot.pads, newPads.length), rest = slot.blanks + slot.pads - fresh;
  for (const key of [...newPads.slice(newPads.length - fresh), ...pastPads.slice(Math.max(0, pastPads.length - rest))]) key.mark = "wrong";
  return keys;
}

function drawSees(view, picked) {
  const {run, panels: {sees}} = view;
  const box = [];
  if (run.xray.left_out) {
    box.push(element("p", {className: "soft"}, `Not measured in this run: ${run.xray.left_out}.`));
  } else if (!picked) {
    box.push(element("p", {className: "soft"}, "Point at a slot of the tensor, or tap it, to see which keys it sees. A click holds it."));
  } else {
    const [, pass, row, column] = picked, slot = slotAt(run, pass, row, column);
    const keys = markKeys(run, pass, row, slot), count = mark => keys.filter(key => key.mark === mark).length;
    const request = run.requests[slot.owner], paged = Array.isArray(request && last(request.rooms, pass)?.[1]);
    const who = slot.owner === -1 ? "A pad" : slot.owner < -1 ? `A slot of ${run.requests[-2 - slot.owner].name}, which is finished,`
      : `${request.name}, position ${slot.position}, “${word(run, slot.owner, slot.position)}” (${DATA.names[slot.kind]})`;
    const wrongPads = keys.filter(key => key.mark === "wrong" && key.owner < 0).length, wrongTokens = count("wrong") - wrongPads;
    const line = element("p", {}, element("b", {}, who), ` sees ${plural(count("past") + count("new") + (slot.owner < 0 ? count("wrong") : 0), "key")}: `
      + `${count("past")} past, ${count("new")} new, ${wrongPads} pads.`
      + (slot.owner < 0 ? " No token reads what is computed here." : ""));
    if (slot.owner >= 0 && (wrongPads || wrongTokens || count("missing") || slot.shift)) {
      line.append(element("span", {className: "bad"}, " Wrong: " + [wrongPads && `it sees ${plural(wrongPads, "pad")}`,
        wrongTokens && `it sees ${plural(wrongTokens, "key")} of others or of the future`,
        count("missing") && `it does not see ${plural(count("missing"), "key")} of its own`,
        slot.shift && `it is computed as if at position ${slot.position + slot.shift}`].filter(Boolean).join(", ") + "."));
    }
    const strip = element("div", {className: "keys scroll", tabIndex: 0});
    let group = null;
    for (const key of keys) {
      const page = paged && key.past && key.owner === slot.owner
        ? last(request.rooms, pass)[1][Math.floor(key.position / run.pool.page_size)] : null;
      const here = page !== null ? `page ${page}` : key.past ? "past" : "new";
      if (here !== group) strip.append(element("b", {}, here));
      group = here;
      const text = key.owner < 0 ? "·" : word(run, key.owner, key.position);
      const about = key.owner === -1 ? "pad" : key.owner < -1 ? "finished" : `${run.requests[key.owner].name}, position ${key.position}`;
      strip.append(element("i", {className: key.mark, textContent: text, title: `${about}: ${key.mark}`}));
    }
    box.push(line, strip);
  }
  sees.replaceChildren(...box);
}

// Lights up what the pointed slot sees: in the tensor, in the strip of keys, in memory.
function drawPointed() {
  const picked = slotNamed(pointed ?? state.slot);
  for (const view of views) {
    for (const node of view.lit ?? []) node.classList.remove("lit", "picked", "wrong");
    view.lit = [];
    const mine = picked && picked[0] === view.number && view.now.passes.includes(picked[1]) ? picked : null;
    drawSees(view, mine);
    if (!mine) continue;
    const light = (node, ...names) => { if (node) { node.classList.add(...names); view.lit.push(node); } };
    const [number, pass, row, column] = mine, slot = slotAt(view.run, pass, row, column);
    light(view.slots.get(mine.join(".")), "picked");
    if (!slot.ranges) continue;
    for (const key of markKeys(view.run, pass, row, slot)) {
      if (key.column !== undefined && ["new", "wrong"].includes(key.mark)) {
        const name = [number, pass, row, key.column].join(".");
        light(view.slots.get(name), "lit", ...(key.mark === "wrong" ? ["wrong"] : []));
      }
      if (key.past && ["past", "wrong"].includes(key.mark) && key.owner >= 0) {
        const table = last(view.run.requests[key.owner].rooms, pass)?.[1];
        light(view.panels.memory.querySelector(`[data-holder="${key.owner}"]`), "lit");
        if (Array.isArray(table)) {
          const page = table[Math.floor(key.position / view.run.pool.page_size)];
          light(view.panels.memory.querySelector(`[data-page="${page}"]`), "lit");
        }
      }
    }
  }
}

// Requests: how far each is, and its text so far. With many, only those that run.

const MANY = 40;

function drawRequests(view) {
  const {run, now, states, panels: {requests}} = view;
  const counts = {};
  for (const {kind} of states) counts[kind] = (counts[kind] ?? 0) + 1;
  const words = [["waiting", "waiting"], ["prefill", "prefilling"], ["decode", "decoding"], ["recomputed", "computed again"],
                 ["preempted", "preempted"], ["done", "done"], ["absent", "not arrived"]]
    .filter(([kind]) => counts[kind]).map(([kind, name]) => `${counts[kind]} ${name}`).join(", ");
  const few = run.requests.length <= MANY;
  view.rows ??= new Map();
  const rows = [];
  run.requests.forEach((request, r) => {
    if (few || ["prefill", "decode", "recomputed", "preempted"].includes(states[r].kind)) {
      if (!view.rows.has(r)) view.rows.set(r, requestRow(request));
      fillRow(view.rows.get(r), run, request, states[r], now);
      rows.push(view.rows.get(r).node);
    }
  });
  view.count ??= element("p", {});
  view.count.textContent = words + (few ? "." : ". Only those that run are listed.");
  view.list ??= element("div", {className: "scroll", tabIndex: 0});
  if (view.list.parentNode !== requests) requests.replaceChildren(view.count, view.list);
  const same = rows.length === view.list.children.length && rows.every((row, i) => row === view.list.children[i]);
  if (!same) view.list.replaceChildren(...rows);
}

function requestRow(request) {
  const state = element("span", {className: "state"}), waits = element("span", {className: "waits"});
  const prompt = element("span", {className: "prompt"}), answer = element("span", {className: "answer"});
  const text = element("button", {className: "text", title: "show all of the text", dir: "auto"}, element("span", {}, prompt, answer));
  const node = element("div", {className: "request"}, element("b", {textContent: request.name}), state, text, waits);
  node.dataset.request = request.name;
  text.onclick = () => node.classList.toggle("open");
  prompt.textContent = textOf(request.prompt) + " ▸ ";
  return {node, state, answer, waits, said: null};
}

function fillRow(row, run, request, is, now) {
  const waits = request.steps.slice(0, is.tokens), gaps = [];
  for (let i = 1; i < waits.length; i++) gaps.push(request.ms[i] - request.ms[i - 1]);
  const said = [is.words, is.active, is.tokens].join();
  if (said === row.said) return;
  row.said = said;
  row.state.textContent = is.words;
  row.node.classList.toggle("running", is.active);
  row.answer.textContent = textOf(request.generated.slice(0, is.tokens));
  row.waits.textContent = !is.tokens ? `prompt of ${plural(request.prompt.length, "token")}`
    : `${plural(is.tokens, "token")} · TTFT ${plural(request.steps[0] - request.arrival + 1, "step")}, ${ms(request.ms[0] - request.arrived)}`
      + (gaps.length ? ` · ITL mean ${ms(gaps.reduce((a, b) => a + b) / gaps.length)}, longest ${ms(Math.max(...gaps))}` : "");
}

// Memory: caches within their limit; in the paged stage the pool and the block tables.

function drawMemory(view) {
  const {run, now, states, panels: {memory}} = view;
  const holders = run.requests.map((request, r) => ({request, r, ...states[r]}))
    .filter(holder => holder.holds !== null && !(holder.kind === "done" && now.over));
  if (!run.requests.some(request => request.rooms.length)) {
    memory.replaceChildren(element("p", {className: "soft"}, "This run keeps no keys and values: all tokens are computed again for every new one."));
    return;
  }
  memory.replaceChildren(...(run.pool ? pool(run, now, holders) : caches(run, now, holders)));
}

function caches(run, now, holders) {
  run.largest ??= Math.max(...run.requests.flatMap(request => request.rooms.map(([, room]) => room ?? 0)));
  const columns = now.passes.length ? run.passes.columns[now.pass] : 0;   // of a static batch's one cache
  const limit = run.knobs.max_kv_tokens ?? null;
  let used = 0, reserved = 0;
  const rows = holders.map(({request, r, computed, holds}) => {
    used += computed;
    reserved += holds;
    const pads = Math.max(0, columns - computed), part = (kind, n) => n ? [element("span", {className: kind, style: `width: ${100 * n / run.largest}%`})] : [];
    const row = element("div", {className: "holder"}, element("b", {textContent: request.name}),
      element("div", {className: "bar", style: `width: ${100 * holds / run.largest}%`},
        ...[["past", computed], ["pad", pads]].flatMap(([kind, n]) => n ? [element("span", {className: kind, style: `width: ${100 * n / holds}%`})] : [])),
      `${computed}${pads ? ` + ${pads} pads` : ""} of ${holds}`);
    row.dataset.holder = r;
    return row;
  });
  const total = element("p", {}, `${number(used)} tokens in caches, room reserved for ${number(reserved)}`
    + (limit ? ` of at most ${number(limit)}.` : "; no limit is set."));
  const whole = limit ? [element("div", {className: "bar", style: "height: 0.8rem"},
    element("span", {className: "past", style: `width: ${100 * used / limit}%`}),
    element("span", {className: "unseen", style: `width: ${100 * (reserved - used) / limit}%; border-right: 2px solid var(--ink)`}))] : [];
  return [total, ...whole, element("div", {className: "scroll"}, ...rows)];
}

function pool(run, now, holders) {
  const {pages, page_size: size} = run.pool, kept = new Set(last(run.kept, now.pass)?.[1] ?? []);
  const of = Array.from({length: pages}, () => []), filled = new Array(pages).fill(0);
  for (const {r, holds, computed} of holders) {
    holds.forEach((page, i) => {
      of[page].push(r);
      filled[page] = Math.max(filled[page], Math.min(size, computed - i * size));
    });
  }
  const tiny = pages > 160;
  const cells = of.map((owners, page) => {
    const shared = owners.length > 1, keeps = kept.has(page);
    const who = owners.length ? run.requests[owners[0]].name + (shared ? ` +${owners.length - 1}` : "") : keeps ? "kept" : "";
    const cell = element("div", {className: `page ${shared ? "shared" : keeps ? "kept" : owners.length ? "held" : "free"}${tiny ? " tiny" : ""}`,
      title: `page ${page}: ${owners.map(r => run.requests[r].name).join(", ") || (keeps ? "published, in no block table" : "free")}`});
    if (!tiny) cell.append(element("span", {className: "soft"}, String(page)), element("br"), who);
    if (owners.length) cell.append(element("u", {style: `width: ${100 * Math.max(0, filled[page]) / size}%`}));
    cell.dataset.page = page;
    return cell;
  });
  const held = of.filter(owners => owners.length).length, shared = of.filter(owners => owners.length > 1).length;
  const tables = holders.map(({request, r, holds}) => {
    const row = element("div", {className: "holder", style: "grid-template-columns: 3.2em minmax(0, 1fr)"},
      element("b", {textContent: request.name}), element("span", {}, holds.join(" ")));
    row.dataset.holder = r;
    return row;
  });
  return [element("p", {}, `${held} of ${plural(pages, "page")} held, ${shared} of them shared, ${kept.size} kept for later; ${plural(size, "token")} in a page.`),
    element("div", {className: "pool", style: `--page: ${tiny ? "12px" : "3.4rem"}`}, ...cells),
    element("p", {}, element("b", {}, "Block tables"), element("span", {className: "soft"}, ", the pages of a request in the order of its tokens")),
    element("div", {className: "scroll"}, ...tables)];
}

// The bill: sums over all passes up to now.

function drawBill(view) {
  const {run, now, states, panels: {bill}} = view;
  const total = name => now.pass < 0 ? 0 : run.totals[name][now.pass];
  const slots = total("slots"), share = n => slots ? `${Math.round(100 * n / slots)}% of slots` : "";
  const generated = states.reduce((n, is) => n + is.tokens, 0), firsts = [], gaps = [];
  run.requests.forEach((request, r) => {
    if (states[r].tokens) firsts.push(request.ms[0] - request.arrived);
    for (let i = 1; i < states[r].tokens; i++) gaps.push(request.ms[i] - request.ms[i - 1]);
  });
  const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
  const rows = [["forward passes", "passes", number(now.pass + 1), ""],
    ["generated tokens", "generated", number(generated), ""],
    ["slots", "slots", number(slots), ""],
    ["useful tokens", "useful", number(total("useful")), share(total("useful"))],
    ["pads", "pad_slots", number(total("pad_slots")), share(total("pad_slots"))],
    ["finished", "finished_slots", number(total("finished_slots")), share(total("finished_slots"))],
    ["computed again", "recomputed", number(total("recomputed")), share(total("recomputed"))],
    ["scores", "score_entries", number(total("score_entries")), "a head and layer"],
    ["useful scores", "useful_scores", number(total("useful_scores")),
     total("score_entries") ? `${Math.round(100 * total("useful_scores") / total("score_entries"))}% of scores` : ""],
    ["padded keys", "padded_keys", number(total("padded_keys")), ""],
    ["copied K/V", "copied_bytes", (total("copied_bytes") / 1e6).toFixed(1) + " MB", ""],
    ["time in passes", "ms", ms(total("ms")), ""],
    ["TTFT, mean", "ttft", firsts.length ? ms(mean(firsts)) : "–", plural(firsts.length, "request")],
    ["ITL, mean", "itl", gaps.length ? ms(mean(gaps)) : "–", ""],
    ["ITL, longest", "stall", gaps.length ? ms(gaps.reduce((a, b) => Math.max(a, b))) : "–", ""]];
  const table = element("tbody");
  for (const [name, figure, value, note] of rows) {
    const cell = element("td", {textContent: value});
    cell.dataset.figure = figure;
    table.append(element("tr", {}, element("th", {scope: "row"}, name), cell, element("td", {className: "soft"}, note)));
  }
  bill.replaceChildren(element("table", {}, table));
}

// --- controls -------------------------------------------------------------------------------------

const $ = id => document.getElementById(id);
let playing = null;

function drawControls() {
  $("run").value = state.run;
  $("beside").value = state.beside;
  $("clock").value = state.clock;
  $("cells").value = state.cells;
  const value = ticks[state.tick], end = ticks.at(-1);
  $("now").textContent = state.clock === "step" ? `step ${value} of ${end}` : `${ms(value)} of ${ms(end)}`;
  for (const node of document.querySelectorAll(".look")) node.classList.remove("look");
  const stop = DATA.walk[state.stop];
  [...$("walk").querySelectorAll("button")].forEach((button, i) => {
    if (i === state.stop) button.setAttribute("aria-current", "step"); else button.removeAttribute("aria-current");
  });
  if (stop) {
    const [panel, number] = stop.look;
    const where = views.length === 2 ? `, ${views[number].run.name}` : "";
    $("stop").textContent = `${stop.text} ➜ Look at: ${TITLES[panel]}${where}.`;
    views[number]?.panels[panel].closest(".panel").classList.add("look");
  } else {
    $("stop").textContent = "Six places that show what batching is about. Choose one, then walk on with the arrow keys.";
  }
}

function visit(i) {
  const {show: where} = DATA.walk[i];
  Object.assign(state, {run: where.run, beside: where.beside ?? "", clock: "step", slot: where.slot ?? null, stop: i});
  pointed = null;
  setTicks(where.step);
  build();
  document.querySelector(".look")?.scrollIntoView({block: "nearest"});
}

function play(on) {
  clearInterval(playing);
  playing = on ? setInterval(() => {
    if (state.tick === ticks.length - 1) play(false); else go(state.tick + 1);
  }, 1000 / Number($("speed").value)) : null;
  $("play").textContent = on ? "pause" : "play";
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.documentElement.style.colorScheme = theme || "light dark";
}

function turnTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  setTheme(now === "dark" ? "light" : "dark");
  build();
}

function key(event) {
  if (event.target.closest("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
  const grid = event.target.closest(".grid"), far = event.shiftKey ? 10 : 1;
  const turn = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
  const change = by => {
    const at = Math.max(0, Math.min($("speed").options.length - 1, $("speed").selectedIndex + by));
    $("speed").selectedIndex = at;
    if (playing) play(true);
  };
  const actions = {ArrowLeft: () => go(state.tick - far), ArrowRight: () => go(state.tick + far),
                   Home: () => go(0), End: () => go(ticks.length - 1), "+": () => change(1), "-": () => change(-1),
                   Escape: () => { state.slot = pointed = null; render(); }};
  if (grid && turn) moveSlot(grid, turn);
  else if (grid && event.key === "Enter") hold(pointed);
  else if (event.key === " " && !event.target.closest("button, summary")) play(!playing);
  else if (actions[event.key]) actions[event.key]();
  else return;
  event.preventDefault();
}

function moveSlot(grid, [down, right]) {
  const [view, pass] = [Number(grid.dataset.view), Number(grid.dataset.pass)];
  const here = slotNamed(pointed ?? state.slot), mine = here && here[0] === view && here[1] === pass;
  const [, , row, column] = mine ? here : [0, 0, 0, 0];
  const name = mine ? [view, pass, row + down, column + right].join(".") : [view, pass, 0, 0].join(".");
  if (views[view].slots.has(name)) {
    pointed = name;
    drawPointed();
  }
}

function hold(name) {
  state.slot = state.slot === name ? null : name;
  render();
}

function options(select, values, none) {
  select.replaceChildren(...(none ? [element("option", {value: "", textContent: none})] : []),
    ...values.map(value => element("option", {value, textContent: value})));
}

function begin() {
  const requests = DATA.runs[0].requests;
  $("about").textContent = `${plural(requests.length, "request")}, ${number(requests.reduce((n, r) => n + r.prompt.length, 0))} prompt tokens`;
  options($("run"), names);
  options($("beside"), names, "none");
  $("stages").querySelectorAll("label").forEach((label, i) => label.hidden = i < 2 && names.length === 1);
  $("walk").hidden = !DATA.walk.length;
  $("walk").querySelector("ol").replaceChildren(...DATA.walk.map((stop, i) =>
    element("li", {}, element("button", {textContent: `${i + 1} ${stop.title}`, onclick: () => visit(i)}))));
  const legend = [...Object.entries(DATA.names).filter(([kind]) => kind !== "waiting"), ["wrong", "seen, and must not be"]];
  $("legend").replaceChildren(...legend.map(([kind, name]) => element("span", {}, element("i", {className: kind}), " " + name)),
    element("span", {}, "— waiting"));

  $("run").onchange = () => show({run: $("run").value});
  $("beside").onchange = () => show({beside: $("beside").value});
  $("clock").onchange = () => show({clock: $("clock").value});
  $("cells").onchange = () => { state.cells = $("cells").value; render(); };
  $("speed").onchange = () => playing && play(true);
  $("theme").onclick = turnTheme;
  $("first").onclick = () => go(0);
  $("back").onclick = () => go(state.tick - 1);
  $("next").onclick = () => go(state.tick + 1);
  $("last").onclick = () => go(ticks.length - 1);
  $("play").onclick = () => play(!playing);
  document.addEventListener("keydown", key);

  const main = $("views");
  main.addEventListener("pointerover", event => {
    const name = event.target.dataset?.slot ?? null;
    if (event.pointerType !== "touch" && name !== pointed) { pointed = name; drawPointed(); }
  });
  main.addEventListener("mousedown", event => {      // a click holds a slot, and leaves the focus
    if (event.target.dataset?.slot) event.preventDefault();
  });
  main.addEventListener("click", event => { if (event.target.dataset?.slot) hold(event.target.dataset.slot); });
  const seek = event => {
    const view = views.find(view => view.box.contains(event.target));
    if (!view || (event.type === "pointermove" && !event.buttons)) return;
    const at = view.end * (event.clientX - view.box.getBoundingClientRect().left - view.labels) / (view.wide - view.labels - 2);
    go(state.clock === "step" ? countUpTo(ticks, at) - 1 : countUpTo(ticks, at));
  };
  main.addEventListener("pointerdown", seek);
  main.addEventListener("pointermove", seek);
  addEventListener("hashchange", () => { if (location.hash !== address()) readAddress(); });
  let wide = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== wide) { wide = innerWidth; build(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  readAddress();
}

begin();
